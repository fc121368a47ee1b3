"""The job: all settings of a training run, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from meshwright.spec.cluster import Cluster
from meshwright.spec.fields import (
    SECTION_CONFIG,
    Count,
    Flag,
    Fraction,
    HostPort,
    Location,
    Name,
    Natural,
    NonNegative,
    OpenFraction,
    Positive,
    Share,
)
from meshwright.spec.layout import Layout
from meshwright.spec.model import ResNetModel, TaggedModel

MayChange = Literal["nothing", "data", "any"]
LostNodePolicy = Literal["wait", "give-up"]
StragglerPolicy = Literal["warn", "replace", "exclude"]
ReadStrategy = Literal["primary", "any", "nearest"]
Runtime = Literal[
    "meshwright",
    "megatron-lm",
    "megatron-lm-2022",
    "megatron-core",
    "megatron-bridge",
    "megatron-bridge-2026",
    "hai-llm",
    "megatron-like",
    "aleph-alpha-scaling",
    "megatron-deepspeed",
    "torchtitan",
    "torchtitan-2025",
    "huggingface",
    "composer-fsdp",
    "deepspeed-zero",
]
"""Frameworks with a planner profile (`plan/profiles.py`); a test compares the two lists."""
SYNTHETIC_IMAGES = "builtin:synthetic-images"
"""The path of generated images."""


@dataclass(frozen=True)
class Source:
    """A source of a mixture. The keys of fields and template are those of `[data]` if left out."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    name: Name
    """Name of the source, in reports and checkpoints."""
    path: Location
    """As `data.path`: a prepared folder, a file, a folder or a glob of text."""
    weight: NonNegative = 1.0
    """Share of the samples, relative to the weights of the other sources."""
    text_field: Location | None = None
    """As `data.text_field`."""
    template: Location | None = None
    """As `data.template`."""
    prompt_field: Location | None = None
    """As `data.prompt_field`."""
    answer_field: Location | None = None
    """As `data.answer_field`."""


@dataclass(frozen=True)
class EvalSet:
    """A held-out set besides the held-out split of the training data.

    The keys of fields and template are those of `[data]` if left out. The template of `[data]` is for sets of
    conversations; a set of plain text has none.
    """

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    name: Name
    """Name in events, curves and reports."""
    path: Location
    """As `data.path`. All documents of text count; of a prepared folder and of images the held-out split."""
    text_field: Location | None = None
    """As `data.text_field`."""
    template: Location | None = None
    """As `data.template`."""
    prompt_field: Location | None = None
    """As `data.prompt_field`."""
    answer_field: Location | None = None
    """As `data.answer_field`."""


@dataclass(frozen=True)
class Data:
    """Training data."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    path: str
    """Text: a prepared folder; a .jsonl, .json, .csv, .tsv, .parquet or text file, also as .gz or .zst; a
    folder or glob of files; or `builtin:python-stdlib`. Images: a folder of arrays, or
    `builtin:synthetic-images`."""
    seq_len: Count
    """Tokens per sample; left out for images."""
    sources: tuple[Source, ...] = ()
    """Sources of a mixture, in place of `path`; tables `[[data.sources]]`."""
    tokenizer: str | None = None
    """`byte`, `bpe:SIZE` (trained on the data), a tokenizer.json or its folder; that of model.hf or `byte` if
    left out."""
    mask: Literal["causal", "document"] = "causal"
    """Attention mask: `causal` crosses document boundaries; `document` does not."""
    prompt_masking: Flag = False
    """Mask prompts in the loss, so that only answers count; needs instruction data."""
    text_field: Location | None = None
    """Field or column with the text, without a template; `text` if left out."""
    template: Location | None = None
    """Chat template of instruction data: `alpaca`, `chatml`, `llama3`, `plain`, `tokenizer`, or a path."""
    prompt_field: Location | None = None
    """Field with the prompt; if left out, `instruction`, `prompt` or `question`, or the field `messages`."""
    answer_field: Location | None = None
    """Field with the answer; if left out, `output`, `completion`, `answer` or `response`."""
    on_bad_records: Literal["error", "skip"] = "error"
    """What to do with a file or record that cannot be read: stop, or leave it out and count it."""
    eval: tuple[EvalSet, ...] = ()
    """Further held-out sets; tables `[[data.eval]]`. One of old data shows forgetting."""
    eval_fraction: Annotated[float, Field(gt=0, le=0.5, strict=True)] | None = None
    """Fraction of the documents or images held out for evaluation; 0.01 if left out."""
    follow: Flag = False
    """Follow prepared folders that grow: documents that are added during the run are read at the end of the
    epoch."""
    cache: Location | None = None
    """Folder for the shards of data that are not prepared yet; if left out, `.meshwright/data` in the working
    folder."""


@dataclass(frozen=True)
class Train:
    """Optimization, precision and execution of the training loop."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    steps: Count
    """Optimizer steps."""
    global_batch: Count
    """Samples per optimizer step, over all ranks; every layout has the same loss curve."""
    optimizer: Literal["adamw", "sgd", "lion", "muon"] = "adamw"
    """Optimizer; each has its own keys and defaults, see the page Optimizers."""
    lr: Positive | None = None
    """Peak learning rate, before lr_scaling; 3e-4 if left out, `sgd` 0.1, `lion` 1e-4."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Learning rate schedule after the warm-up; `wsd` (warm-up, stable, decay) decays linearly at the end."""
    warmup: Natural = 0
    """Linear warm-up steps."""
    min_lr_ratio: Fraction | None = None
    """Final learning rate as a fraction of the peak; 0.1 if left out."""
    decay_fraction: Share | None = None
    """Fraction of the steps in which `wsd` decays; 0.2 if left out."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How lr scales with global_batch / lr_base_batch."""
    lr_base_batch: Count | None = None
    """Batch size that lr was tuned for; required by `linear` and `sqrt`."""
    beta1: OpenFraction | None = None
    """First beta of `adamw`, `lion` and muon's AdamW part; 0.9 if left out."""
    beta2: OpenFraction | None = None
    """Second beta of the same; 0.95 if left out, `lion` 0.99."""
    eps: Positive | None = None
    """AdamW's epsilon; 1e-8 if left out."""
    momentum: OpenFraction | None = None
    """Momentum of `sgd` (0.9 if left out; 0 keeps no state) and `muon` (0.95)."""
    nesterov: Flag | None = None
    """Nesterov momentum; if left out, off for `sgd` and on for `muon`."""
    weight_decay: NonNegative | None = None
    """Weight decay of matrices, not of norms and biases; decoupled, except `sgd` (L2 in the gradient). 0.1 if
    left out, `sgd` 1e-4, `lion` 0.3."""
    decay_embeddings: Flag = True
    """Whether weight decay applies to token (and tied head) and position embeddings."""
    grad_noise: NonNegative = 0.0
    """Variance at step 0 of Gaussian noise that is added to each gradient element after clipping; it decays
    with (1 + step)^0.55. 0 adds none."""
    noise_scale_every: Natural = 0
    """Steps between measurements of the gradient noise scale; 0 for none."""
    balance_loss: NonNegative | None = None
    """Coefficient of the load-balancing loss of experts (page Expert parallel); if left out 0.01, or 0 with
    balance_rate."""
    balance_rate: NonNegative = 0.0
    """Update per step of the router bias that balances the expert load (DeepSeek-V3); 0 for none."""
    z_loss: NonNegative = 0.0
    """Coefficient of the router z-loss."""
    clip: NonNegative = 1.0
    """Gradient clipping: largest global norm; 0 for none."""
    on_bad_step: Literal["skip", "rollback", "stop"] = "skip"
    """What to do after a step whose loss or gradients are not finite, or a gradient spike; no such step
    changes the parameters. `skip` goes on with the next samples; `rollback` goes back to the last in-memory
    snapshot or checkpoint, and on with the next samples; `stop` ends the run."""
    spike_factor: NonNegative = 1000.0
    """A gradient norm above this multiple of the median of the last 32 steps is a spike; 0 for none."""
    replica_check_every: Natural = 0
    """Steps between comparisons of the replicated parameters by checksums, which find silent corruption; 0
    for none."""
    precision: Literal["fp32", "bf16", "fp16", "fp8", "fp4"] = "fp32"
    """Precision of the GEMMs (mixed precision); master weights, optimizer state and reductions stay float32;
    gradients too, unless grad_dtype says otherwise."""
    fp8_weight_grads: Flag = False
    """With fp8 precision, also run the weight-gradient GEMMs in fp8 (otherwise bf16): faster, rounds more."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the gradients of the blocks' linears from the GEMM to the optimizer step, for Triton blocks on
    one GPU with one micro-batch; bf16 takes half the memory. Accumulation is float32."""
    residual_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the residual stream between compiled or Triton blocks; bf16 moves and keeps half the bytes."""
    runtime: Runtime = "meshwright"
    """Framework whose memory and time `plan` predicts; `train` runs `meshwright` only."""
    loss_scale: Annotated[float, Field(gt=0, le=2**32, strict=True)] = 65536.0
    """Initial loss scale under fp16; halved on overflow, doubled after 2,000 steps without one."""
    seed: Natural = 0
    """Seed of the initial weights and of the sample order."""
    block_backend: Literal["eager", "compile", "triton"] | None = None
    """Backend of the blocks: PyTorch `eager`, torch.`compile`, or `triton` kernels for Llama-shaped
    decoders on a GPU with unsharded weights (elsewhere it runs as `compile`, on a CPU as `eager`). By default
    the fastest: `triton` for a dense decoder in 16 bits or fp8 on GPUs, `eager` otherwise. With `compile`,
    the audit skips activations and peak memory."""
    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    """Backend of torch.compile: `inductor` generates fast code; `aot_eager` only traces, for tests."""
    gemm_autotune: Flag = False
    """Autotune the 16-bit GEMMs of Triton blocks under sustained load: 2 s per shape, once per GPU type. Off
    takes cuBLASLt's first heuristic."""
    eval_every: Natural = 0
    """Steps between evaluations; 0 for one at the end only."""
    eval_samples: Count = 64
    """Held-out samples per evaluation, at most those of the split."""
    tensorboard: Flag = False
    """Write TensorBoard logs into the run's folder (extra `tensorboard`)."""
    wandb: Location | None = None
    """Weights & Biases project (extra `wandb`); offline in the run's folder without an API key."""
    mlflow: Location | None = None
    """MLflow experiment (extra `mlflow`); in the run's folder without a server."""
    transport: Literal["auto", "gloo", "shared_memory"] = "auto"
    """What runs the collectives of CPU ranks on one node: `shared_memory`, or `gloo` over sockets. `auto`
    takes shared memory where ranks have it. The order of sums differs, so the losses of three or more ranks
    differ in rounding. GPUs use NCCL."""
    all_reduce: Literal["backend", "hierarchical"] = "backend"
    """How DDP all-reduces gradients: by one collective of the backend, or in phases (`hierarchical`):
    reduce-scatter inside each node, all-reduce between nodes, all-gather inside each node. The order of sums
    differs, so losses differ in rounding."""
    deterministic: Flag = False
    """Use deterministic algorithms only, and fail where an operation has none."""


@dataclass(frozen=True)
class Checkpoint:
    """When checkpoints are saved, and how many are kept."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    dir: Location | None = None
    """Checkpoint folder, or URL in an object store (`s3://BUCKET/PREFIX`); `checkpoints` in the run's folder
    if left out."""
    every_steps: Natural = 0
    """Steps between checkpoints; 0 for none. There is always one at the end."""
    every_minutes: NonNegative = 30.0
    """Minutes between checkpoints; 0 for none."""
    auto: Flag = False
    """Set the minutes between checkpoints by the measured cost of a save and `cluster.failure_hours`, so that
    the least time is lost (Daly's formula)."""
    keep_last: Count = 2
    """Number of newest checkpoints to keep, besides the best one."""
    keep_every: Natural = 0
    """Also keep all checkpoints whose step is a multiple of this; 0 for none."""
    stores: tuple[Location, ...] = ()
    """Further folders or URLs (`s3://BUCKET/PREFIX`) that get a full copy of every checkpoint."""
    quorum: Natural = 0
    """How many of the stores, `dir` included, must have a checkpoint before it is committed; 0: more than
    half."""
    read: ReadStrategy = "primary"
    """Which copy is read where several stores have one: `primary` in the order of `dir` and `stores`, `any`
    at random, `nearest` from the store that lists its checkpoints fastest."""
    on_best: Flag = False
    """Save whenever the evaluation loss is the lowest so far, and keep that checkpoint."""
    asynchronous: Flag = True
    """Write checkpoints while training goes on, from a copy in CPU memory; `false` needs no copy."""


@dataclass(frozen=True)
class Elastic:
    """Failure handling: how a run goes on when a rank fails."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    collective_timeout_s: Positive = 600.0
    """Timeout of a collective. After it the rank fails, and the run recovers (`restarts`)."""
    heartbeat_timeout_s: NonNegative = 5.0
    """Time within which a silent or stuck rank is named; 0 to wait for `collective_timeout_s` instead."""
    stop_grace_s: Positive = 10.0
    """Time that the other ranks have to leave their collectives after one failed; then they are killed. Also
    the time that a scheduler leaves between SIGTERM and SIGKILL: steps that take longer are reported."""
    restarts: Natural = 3
    """Consecutive failures without a new step that a run survives; 0: the first failure ends it."""
    spares: Natural = 0
    """Warm processes that wait to take over the rank of a failed one; without one, a process is started."""
    orphan_s: NonNegative = 60.0
    """How long ranks go on when the command has died. Then they save and stop. `train --resume` adopts them
    meanwhile; 0: they are killed at once."""
    join_timeout_s: Positive = 300.0
    """How long a run on several nodes waits for the agents of the other nodes to join."""
    policy: LostNodePolicy = "wait"
    """What a run does when the agent of a node is lost: `wait` for another one (`node_wait_s`), or `give-up`:
    it goes on at once with the devices that are left (`may_change`), or fails."""
    node_wait_s: Positive = 60.0
    """How long a run waits for another agent of a lost node to join. Then it goes on with the devices that
    are left (`may_change`), or fails."""
    may_change: MayChange = "nothing"
    """What a run may change to go on with fewer devices: `nothing`, the data-parallel degrees (`data`), or
    the whole layout, which the planner searches again (`any`). Global batch and samples stay the same. When
    devices come back, the run uses them again."""
    grow_after_s: NonNegative = 30.0
    """How long a device that came back must stay before the run changes its layout to use it."""
    retry_device_s: NonNegative = 600.0
    """A device whose rank failed more than `restarts` times in a row is left out, if `may_change` allows
    it. After this time it is tried again; 0: never."""
    snapshot_every: Natural = 10
    """Steps between in-memory snapshots of the state, from which ranks go on after a failure; 0: none."""
    straggler: StragglerPolicy = "warn"
    """What a run does with a straggler, a rank that is slower than its peers: `warn` names it, `replace` also
    gives its rank to another process (at most 3 times), `exclude` goes on without its device
    (`may_change`)."""
    metrics: HostPort | None = None
    """Serve `/health` and Prometheus `/metrics` at this `HOST:PORT`, such as `127.0.0.1:9400`; nothing is
    served if left out."""
    metrics_token_file: Location | None = None
    """The bearer token that clients must send; written with mode 0600 if it does not exist. `metrics-token`
    in the run's folder if left out."""


@dataclass(frozen=True)
class Consistency:
    """Consistency of the replicas."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    mode: Literal["synchronous", "bounded-stale", "local-sgd", "gossip"] = "synchronous"
    """`synchronous` is implemented; the others are not yet."""


@dataclass(frozen=True)
class Compression:
    """Gradient compression."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    kind: Literal["none", "bf16", "fp16", "int8", "topk", "powersgd"] = "none"
    """Dtype or method of gradient communication: `bf16` and `fp16` halve the bytes and give up the equal-loss
    contract; others are not implemented yet."""


@dataclass(frozen=True)
class Job:
    """One training run."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    model: TaggedModel
    cluster: Cluster
    data: Data
    train: Train
    name: Name = "job"
    """Name of the job and of the run's folder; that of the job file if left out."""
    run_dir: Location | None = None
    """Folder of the run; a new one under `runs/` if left out."""
    layout: Layout = field(default_factory=Layout)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    elastic: Elastic = field(default_factory=Elastic)
    consistency: Consistency = field(default_factory=Consistency)
    compression: Compression = field(default_factory=Compression)

    @property
    def unit(self) -> str:
        """The unit of batches and throughput: tokens or images."""
        return "images" if isinstance(self.model, ResNetModel) else "tokens"

    @property
    def mixes_samples(self) -> bool:
        """Whether samples of a micro-batch affect each other (batch norm)."""
        return isinstance(self.model, ResNetModel) and self.model.norm == "batch"
