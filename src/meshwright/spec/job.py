"""The job: everything that one training run is told, in one frozen object."""

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

Runtime = Literal[
    "meshwright",
    "megatron-lm",
    "megatron-lm-2022",
    "megatron-core",
    "megatron-bridge",
    "megatron-bridge-26.06",
    "megatron-deepspeed",
    "torchtitan",
    "torchtitan-2025",
    "composer-fsdp",
    "deepspeed-zero",
]
"""Frameworks that have a profile, by its name (`plan/estimate/profiles.py`); a test holds both equal."""
SYNTHETIC_IMAGES = "builtin:synthetic-images"
"""The path of images that are computed, not read."""


@dataclass(frozen=True)
class Data:
    """What is read."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    path: Location
    """Text: a prepared folder, a text or .jsonl file, a folder or glob of them, or `builtin:python-stdlib`.
    Images: a folder of arrays, or `builtin:synthetic-images`."""
    seq_len: Count
    """Tokens in one sample; for images it is left out."""
    tokenizer: str | None = None
    """`byte`, `bpe:SIZE` (trained on it), a tokenizer.json or its folder; else model.hf's, or `byte`."""
    mask: Literal["causal", "document"] = "causal"
    """Whether attention crosses document boundaries; with `document`, samples hold whole documents."""
    prompt_masking: Flag = False
    """Count the loss on answers only, not on prompts; needs instruction data."""
    template: Location | None = None
    """Chat template of instruction data: `alpaca`, `chatml`, `llama3`, `plain`, `tokenizer`, or a path."""
    prompt_field: Location | None = None
    """Field of a .jsonl line that holds the prompt, where it has no `messages`; `prompt` if left out."""
    answer_field: Location | None = None
    """Field of a .jsonl line that holds the answer; `answer` if left out."""
    eval_fraction: Annotated[float, Field(gt=0, le=0.5, strict=True)] | None = None
    """Share of the documents or images held out for evaluation; 0.01 if left out."""
    cache: Location = ".meshwright/data"
    """Where a corpus that is not a prepared folder is prepared."""


@dataclass(frozen=True)
class Train:
    """How it is trained."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    steps: Count
    """Optimizer steps."""
    global_batch: Count
    """Samples in one step, over all ranks; the same loss curve for every layout."""
    optimizer: Literal["adamw", "sgd", "lion", "muon"] = "adamw"
    """The update rule; each reads its own keys and has its own defaults, see the page Optimizers."""
    lr: Positive | None = None
    """Peak learning rate, before lr_scaling; 3e-4 if left out, `sgd` 0.1, `lion` 1e-4."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Learning rate after the warm-up; `wsd` stays at the peak and falls linearly at the end."""
    warmup: Natural = 0
    """Steps of linear warm-up."""
    min_lr_ratio: Fraction | None = None
    """Where the schedule ends, as a fraction of the peak; 0.1 if left out."""
    decay_fraction: Share | None = None
    """Share of the steps in which `wsd` falls; 0.2 if left out."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How lr grows with global_batch / lr_base_batch."""
    lr_base_batch: Count | None = None
    """The batch that lr was tuned for; needed by `linear` and `sqrt`."""
    beta1: OpenFraction | None = None
    """First decay of `adamw`, `lion` and muon's AdamW part; 0.9 if left out."""
    beta2: OpenFraction | None = None
    """Second decay of the same; 0.95 if left out, `lion` 0.99."""
    eps: Positive | None = None
    """AdamW's denominator guard; 1e-8 if left out."""
    momentum: OpenFraction | None = None
    """Decay of the momentum of `sgd` (0.9 if left out; 0 keeps no state) and `muon` (0.95)."""
    nesterov: Flag | None = None
    """Look ahead along the momentum; if left out, `sgd` does not and `muon` does."""
    weight_decay: NonNegative | None = None
    """Decay of matrices, norms have none; decoupled, but for `sgd` added to the gradient. 0.1 if left out,
    `sgd` 1e-4, `lion` 0.3."""
    decay_embeddings: Flag = True
    """Whether the embeddings of tokens (and a head tied to it) and of positions decay like other matrices."""
    grad_noise: NonNegative = 0.0
    """Variance of the Gaussian noise that is added to each gradient element after clipping, at step 0; falls
    with (1 + step)^0.55. 0 adds none."""
    noise_scale_every: Natural = 0
    """Steps between measurements of the gradient noise scale; 0 measures none."""
    balance_loss: NonNegative | None = None
    """Coefficient of the loss that keeps experts evenly busy, see the page Experts; if left out 0.01, and 0
    with balance_rate. A dense model has none."""
    balance_rate: NonNegative = 0.0
    """How far a step moves the bias by which an expert is chosen towards even use; 0 for no bias."""
    z_loss: NonNegative = 0.0
    """Coefficient of the loss that keeps the logits of routers small."""
    clip: NonNegative = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    precision: Literal["fp32", "bf16", "fp16", "fp8", "fp4"] = "fp32"
    """Precision of the matrix products; weights and reductions stay float32, and gradients if not told."""
    fp8_weight_grads: Flag = False
    """With fp8 precision, also run the weight-gradient GEMMs in fp8 (otherwise bf16): faster, rounds more."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the gradients of the blocks' linears from the GEMM to the optimizer step, for Triton blocks on
    one GPU with one micro-batch; bf16 takes half the memory. Accumulation is float32."""
    residual_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the residual stream between compiled or Triton blocks; bf16 moves and keeps half the bytes."""
    runtime: Runtime = "meshwright"
    """Whose memory and time `plan` predicts; `train` runs `meshwright` alone."""
    loss_scale: Annotated[float, Field(gt=0, le=2**32, strict=True)] = 65536.0
    """First loss scale under fp16; halved by a step that overflows, doubled after 2,000 that do not."""
    seed: Natural = 0
    """Decides the initial weights and the order of samples."""
    block_backend: Literal["eager", "compile", "triton"] = "eager"
    """Backend of the blocks: PyTorch `eager`, torch.`compile`, or `triton` kernels for Llama-shaped
    decoders on a GPU with unsharded weights (elsewhere it runs as `compile`). With `compile`, the audit skips
    activations and peak memory."""
    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    """Backend of torch.compile: `inductor` generates fast code; `aot_eager` only traces, for tests."""
    gemm_autotune: Flag = False
    """Autotune the 16-bit GEMMs of Triton blocks under sustained load: 2 s per shape, once per GPU type. Off
    takes cuBLASLt's first heuristic."""
    eval_every: Natural = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    eval_samples: Count = 64
    """Held-out samples in one evaluation (fewer if the split has fewer)."""
    tensorboard: Flag = False
    """Write curves for TensorBoard into the run's folder (extra `tensorboard`)."""
    wandb: Location | None = None
    """Project of Weights & Biases (extra `wandb`); offline in the run's folder without a key."""
    mlflow: Location | None = None
    """Experiment of MLflow (extra `mlflow`); in the run's folder without a server."""
    deterministic: Flag = False
    """Refuse operations whose result can change from run to run."""


@dataclass(frozen=True)
class Checkpoint:
    """What is kept."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    dir: Location | None = None
    """Folder of the checkpoints; `checkpoints` in the run's folder if left out."""
    every_steps: Natural = 0
    """Steps between checkpoints; 0 for none on the way. There is always one at the end."""
    every_minutes: NonNegative = 30.0
    """Minutes between checkpoints; 0 for none."""
    keep_last: Count = 2
    """Older ones are removed; the best one is kept apart."""
    on_best: Flag = False
    """Also keep the one with the lowest evaluation loss."""


@dataclass(frozen=True)
class Elastic:
    """How long to wait before a silence is a failure."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    collective_timeout_s: Positive = 600.0
    """A collective that takes longer ends the run."""
    stop_grace_s: Positive = 10.0
    """Time that ranks get to end after another one failed."""


@dataclass(frozen=True)
class Consistency:
    """How closely replicas agree."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    mode: Literal["synchronous", "bounded-stale", "local-sgd", "gossip"] = "synchronous"
    """`synchronous` is built; the others are not yet."""


@dataclass(frozen=True)
class Compression:
    """What gradients look like on the wire."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    kind: Literal["none", "bf16", "fp16", "int8", "topk", "powersgd"] = "none"
    """`bf16` and `fp16` halve the bytes and leave the equal-loss contract; others are not built yet."""


@dataclass(frozen=True)
class Job:
    """One training run."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    model: TaggedModel
    cluster: Cluster
    data: Data
    train: Train
    name: Name = "job"
    """Names the run's folder; the job file's name if left out."""
    run_dir: Location | None = None
    """Folder of this run; a fresh one under `runs/` if left out."""
    layout: Layout = field(default_factory=Layout)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    elastic: Elastic = field(default_factory=Elastic)
    consistency: Consistency = field(default_factory=Consistency)
    compression: Compression = field(default_factory=Compression)

    @property
    def unit(self) -> str:
        """What a target is a part of, for people: a loss, a rate or a batch counts these."""
        return "images" if isinstance(self.model, ResNetModel) else "tokens"

    @property
    def mixes_samples(self) -> bool:
        """Whether samples of a micro-batch see each other (batch norm): the layout then changes the loss."""
        return isinstance(self.model, ResNetModel) and self.model.norm == "batch"
