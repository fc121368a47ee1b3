"""The task of a proof: what is compared, the tolerances, and the files that its ranks exchange.

A proof runs a job twice. The reference, one process, saves gradients, weights and activations. The ranks of
the layout compare theirs with them and save the differences. ``verdict`` judges them. No torch here.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.core.events import Event, to_json
from meshwright.layout.hierarchy import find_hierarchy
from meshwright.layout.lr_schedule import scaling_factor
from meshwright.spec.execution import uses_eager_blocks, wanted_block_backend
from meshwright.spec.job import Checkpoint, Compression, Job, Train
from meshwright.spec.layout import Layout
from meshwright.spec.legality.table import with_layout
from meshwright.spec.load import build_job, job_tree
from meshwright.spec.model import DecoderModel
from meshwright.spec.train_defaults import setting, with_eager_blocks

STEPS = 10
GRADIENT_STEPS = (1, STEPS)
UPDATE_STEPS = (1, 2, STEPS)
"""The second update is the first one with moments and a bias correction of its own."""
LOSS_TOLERANCE = 1e-5
"""Relative to the loss of the reference."""
GRADIENT_TOLERANCE = 1e-4
"""Relative to the norm of the parameter's gradient in the reference."""
ROUNDING = 2.0**-23
"""Rounding of float32: a smaller difference, relative to the gradient norm of the whole model, is noise. Some
gradients are only noise: that of the bias of attention keys is zero, because softmax cancels it."""
ACTIVATION_TOLERANCE = 1e-4
"""Relative to the norm of one sample's output; only decides which module is named."""
NORM_TOLERANCE = 1e-4
"""Tolerance for the gradient norm of the whole model, relative to that of the reference."""
UPDATE_TOLERANCE = 1e-3
"""Tolerance for the change of a parameter and of its moments, relative to their formula
(``update_formulas``)."""
WEIGHT_TOLERANCE = 1e-6
"""Tolerance for initial weights, relative to those of the reference: they depend on seed and name only."""
MIN_LR = {"adamw": 1e-3, "lion": 1e-3, "muon": 1e-3, "sgd": 0.1}
"""Peak learning rate of a proof, at least: with a smaller one rounding would hide the weight decay."""
CHANGE_TOLERANCE = 1e-2
"""Tolerance for the weights in a checkpoint, relative to their change since the start. The first steps of
AdamW depend on signs: where the gradient of an element is rounding, the element differs by a whole step."""
NOISE_GRADIENT = 1e-6
"""A gradient below this share of the whole model's is rounding; so are the directions of its updates."""
TIE = 1e-6
"""Expert scores that differ by less tie: rounding decides where the token goes."""
RELOAD_STEP = 5
"""The step after which the held-out samples are evaluated, and a checkpoint is saved and reloaded."""
FIRST_PROBE_STEP = 3
"""The first step that may read other tokens than its samples have (``token_probe``)."""
MAX_WARMUP = 2
"""In steps: with a long warm-up the weights would hardly change in ten."""
PROOF_PHASE = "proof"
"""Phase of the collectives that the comparison adds; those of the steps stay as planned."""


@dataclass(frozen=True)
class Tolerances:
    """How much a layout may differ from one process in the same precision."""

    loss: float
    gradient: float
    gradient_norm: float
    rounding: float
    """Rounding of a gradient, relative to the gradient norm of the whole model."""
    gradient_steps: tuple[int, ...]
    """Steps whose gradients are compared."""
    tie: float
    """Expert scores that differ by less tie."""


EXACT = Tolerances(LOSS_TOLERANCE, GRADIENT_TOLERANCE, NORM_TOLERANCE, ROUNDING, GRADIENT_STEPS, TIE)
"""Tolerances of float32."""
BF16 = Tolerances(5e-3, 0.1, 5e-2, 2.0**-8, GRADIENT_STEPS[:1], 2e-2)
"""A layout rounds in another order. Later gradients are those of other weights."""
FP16 = dataclasses.replace(BF16, gradient_norm=1e-2)
"""It has three bits of mantissa more."""
TOLERANCES = {"fp32": EXACT, "bf16": BF16, "fp16": FP16}
MIXED_PRECISIONS = ("bf16", "fp16")
"""Precisions that a CPU has."""
MAX_LOSS_SCALE = 1024.0
"""Largest loss scale of fp16: near overflow a layout may skip steps that one process does not."""

TASK_FILE = "proof.json"
REFERENCE_FILE = "reference.json"
CHECKPOINTS = "checkpoints"
ACTIVATIONS_FILE = "activations.safetensors"
ROOT_NAME = "model"
"""Name of the outermost module in reports; in torch its name is empty."""


def gradients_file(step: int) -> str:
    """File of the reference with the gradients of a step."""
    return f"gradients-{step}.safetensors"


def routing_file(step: int) -> str:
    """File of the reference with the routing decisions of a step."""
    return f"choices-{step}.safetensors"


WEIGHTS_FILE = "weights.safetensors"
"""The reference's initial weights."""


def findings_file(rank: int) -> str:
    """File with the findings of a rank."""
    return f"findings-{rank}.json"


@dataclass(frozen=True)
class ProofTask:
    """The task of a rank, beside the plan."""

    positions: tuple[int, ...]
    """Samples of the first step whose activations are compared, by position in the global batch."""
    reference: str | None = None
    """Folder of the reference to compare with; None makes this run the reference."""
    steps: int = STEPS
    precision: str = "fp32"

    @property
    def tolerances(self) -> Tolerances:
        """Tolerances of the precision."""
        return TOLERANCES[self.precision]

    def write(self, folder: Path) -> None:
        """Write it beside the plan."""
        (folder / TASK_FILE).write_text(to_json(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> ProofTask:
        """Read it."""
        facts = json.loads((folder / TASK_FILE).read_text(encoding="utf-8"))
        return cls(tuple(facts["positions"]), facts["reference"], facts["steps"], facts["precision"])


@dataclass
class ReferenceRecord:
    """The record of the reference beside its tensors."""

    modules: list[str] = field(default_factory=list)
    """In the order of their outputs."""
    parameters: list[str] = field(default_factory=list)
    """In the order of their gradients."""
    shared: dict[str, list[str]] = field(default_factory=dict)
    """Other names of a parameter that several modules share."""
    gradient_norms: dict[str, dict[str, float]] = field(default_factory=dict)
    """By step and parameter; without parameters that have no gradient."""
    weight_norms: dict[str, float] = field(default_factory=dict)
    """Norms of the initial weights."""
    rules: dict[str, str] = field(default_factory=dict)
    """Update rule of each parameter."""
    decayed: list[str] = field(default_factory=list)
    """Parameters with weight decay."""
    lrs: list[float] = field(default_factory=list)
    """Learning rate of each step."""
    tokens_read: int = 0
    """Tokens of the vocabulary that the last steps read."""
    idle_experts: dict[str, list[int]] = field(default_factory=dict)
    """Experts that got no token in any step, by layer; layers without are left out."""

    def write(self, folder: Path) -> None:
        """Write it for the ranks of the layout and the verdict."""
        (folder / REFERENCE_FILE).write_text(to_json(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> ReferenceRecord:
        """Read it."""
        return cls(**json.loads((folder / REFERENCE_FILE).read_text(encoding="utf-8")))


@dataclass
class TensorDifference:
    """Difference of a full gradient or weight from the reference."""

    difference: float | None
    """Norm of the difference; None if it is not finite, or the shapes differ."""
    factor: float | None = None
    """The factor of the reference that fits best."""
    rest: float | None = None
    """The difference after that factor, relative to the norm."""
    missing: bool = False
    """The rank holds the parameter and has no gradient for it."""
    note: str = ""
    """Which rows differ, if only some do."""


@dataclass
class UpdateDifference:
    """Difference of the update of a parameter from its formula."""

    difference: float | None
    """Difference of the parameter or a moment, relative; None if it is not finite."""
    term: str = ""
    """The term that is wrong: `weight decay`, `bias correction`, `moment`, `gradient`, `clipping`, `lr`;
    `update` if none of them explains the difference."""
    note: str = ""


@dataclass
class StateDifference:
    """Difference of a tensor of a checkpoint, on one rank."""

    parameter: str | None
    """None for a counter or another state of the whole model."""
    what: str
    """`weight`, a moment, or a counter."""
    difference: float | None
    """Relative to the norm, or to the change of a weight; None if it is not finite."""
    note: str
    """`saved`: the file differs from that of one process; `reloaded`: the rank's state was not restored."""


@dataclass
class RunFigures:
    """Losses and norms that the ranks of one run reported in their events."""

    losses: list[float | None] = field(default_factory=list)
    """By step, of rank 0."""
    grad_norms: dict[int, list[float | None]] = field(default_factory=dict)
    """By rank and step; None where it is not finite."""
    eval_losses: dict[int, list[float]] = field(default_factory=dict)
    """By rank."""

    def feed(self, event: Event) -> None:
        """Take in one event."""
        if event["event"] == "step":
            self.grad_norms.setdefault(event["rank"], []).append(event["grad_norm"])
            if event["rank"] == 0:
                self.losses.append(event["loss"])
        if event["event"] == "eval":
            self.eval_losses.setdefault(event["rank"], []).append(event["loss"])


@dataclass
class ActivationDifference:
    """Difference of a module's input or output from the reference, for one sample."""

    module: str
    what: str
    """`input` or `output`."""
    position: int
    difference: float | None
    """Relative to the norm of the reference; None if it is not finite."""


@dataclass
class RankFindings:
    """The differences that one rank of the layout found."""

    rank: int
    activations: list[ActivationDifference] = field(default_factory=list)
    gradients: dict[str, dict[str, TensorDifference]] = field(default_factory=dict)
    """By step and parameter, of the parameters that this rank holds."""
    weights: dict[str, TensorDifference] = field(default_factory=dict)
    """Initial, by parameter."""
    updates: dict[str, dict[str, UpdateDifference]] = field(default_factory=dict)
    """By step and parameter."""
    checkpoint: list[StateDifference] = field(default_factory=list)
    """Differences between the state before a save and after a reload."""
    wrong_tokens: dict[str, list[int]] = field(default_factory=dict)
    """Tokens whose embedding (`embed`) or loss as a target (`head`) is wrong."""
    not_compared: list[str] = field(default_factory=list)
    """Modules whose output has another shape on this rank: a shard."""
    replayed_ties: int = 0
    """Routing decisions of this rank that were replayed from the reference, over all steps and layers."""

    def write(self, folder: Path) -> None:
        """Write them for the verdict."""
        (folder / findings_file(self.rank)).write_text(to_json(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path, rank: int) -> RankFindings:
        """Read those of a rank."""
        facts = json.loads((folder / findings_file(rank)).read_text(encoding="utf-8"))

        def tensors(table: dict[str, Any]) -> dict[str, TensorDifference]:
            return {name: TensorDifference(**row) for name, row in table.items()}

        return cls(
            rank=facts["rank"],
            activations=[ActivationDifference(**row) for row in facts["activations"]],
            gradients={step: tensors(table) for step, table in facts["gradients"].items()},
            weights=tensors(facts["weights"]),
            updates={
                step: {name: UpdateDifference(**row) for name, row in table.items()}
                for step, table in facts["updates"].items()
            },
            checkpoint=[StateDifference(**row) for row in facts["checkpoint"]],
            wrong_tokens=facts["wrong_tokens"],
            not_compared=facts["not_compared"],
            replayed_ties=facts["replayed_ties"],
        )


def proof_job(job: Job, memory_bytes: int) -> Job:
    """The job as it is proved: float32, on the CPU, deterministic, ten steps with a short warm-up.

    The legality of its layout is not checked here: the job may still be shrunk.
    """
    first = {field.name: field.default for field in dataclasses.fields(Train)}
    warmup = 0 if job.train.schedule == "wsd" else min(job.train.warmup, MAX_WARMUP)
    quiet = ("loss_scale", "tensorboard", "wandb", "mlflow", "eval_every", "runtime")
    train = dataclasses.replace(
        with_eager_blocks(job.train),
        **{key: first[key] for key in quiet},  # type: ignore[arg-type]
        steps=STEPS,
        warmup=warmup,
        lr=proof_lr(job.train),
        eval_samples=min(job.train.eval_samples, job.train.global_batch + 1),  # one rank has more than others
        precision="fp32",
        noise_scale_every=0,
        deterministic=True,
    )
    open_layout = dataclasses.replace(train, all_reduce="backend")  # a setting of given layouts
    plain = dataclasses.replace(
        job, train=open_layout, run_dir=None, checkpoint=Checkpoint(), compression=Compression()
    )
    if plain.data.eval:
        plain = dataclasses.replace(plain, data=dataclasses.replace(plain.data, eval=()))
    tree = {section: table for section, table in job_tree(plain).items() if section != "layout"}
    # A fixed peak: otherwise every rank would measure it, and the proof does not need MFU.
    here = {"preset": "local", "device": "cpu", "matmul_flops_per_s": 1e11, "memory_bytes": memory_bytes}
    layout = dataclasses.replace(job.layout, placement="rank-order")  # on one machine
    if find_hierarchy(job) is not None:  # the ranks are on this machine, grouped as on the nodes of the job
        cluster, layout = job.cluster, job.layout
        here |= {"nodes": cluster.nodes, "devices_per_node": cluster.devices_per_node}
        here |= {"nic_bytes_per_s": cluster.nic_bytes_per_s, "nic_latency_s": cluster.nic_latency_s}
    settled = build_job({**tree, "cluster": here}, settled=True, to_run=False)
    return with_layout(dataclasses.replace(settled, train=train), layout)


def proof_lr(train: Train) -> float:
    """``train.lr``, or a larger one: that of the first updates must show."""
    return max(setting(train, "lr"), MIN_LR[train.optimizer] / scaling_factor(train))


def mixed_job(job: Job, precision: str, loss_scale: float) -> Job:
    """The job of a proof in its own precision, instead of float32."""
    scale = min(loss_scale, MAX_LOSS_SCALE) if precision == "fp16" else job.train.loss_scale
    train = dataclasses.replace(job.train, precision=precision, loss_scale=scale)  # type: ignore[arg-type]
    return dataclasses.replace(job, train=train)


def explain_settings(job: Job) -> list[str]:
    """Where the proof differs from the settings of the job, in sentences."""
    changes = []
    if job.train.precision != "fp32":
        own = f", then in {job.train.precision}" if job.train.precision in MIXED_PRECISIONS else ""
        changes.append(f"float32 GEMMs instead of train.precision={job.train.precision}{own}")
    if job.compression.kind != "none":
        changes.append(f"uncompressed gradients instead of compression.kind={job.compression.kind}")
    if not uses_eager_blocks(job):
        changes.append(f"train.block_backend=eager instead of {wanted_block_backend(job)}")
    if job.cluster.device != "cpu":
        changes.append(f"the CPU of this machine instead of {job.cluster.device_name or job.cluster.device}")
    if isinstance(job.model, DecoderModel) and job.model.hf is not None:
        changes.append(f"weights drawn from train.seed instead of any in model.hf={job.model.hf}")
    if job.train.warmup > MAX_WARMUP:
        changes.append(f"a warm-up of at most {MAX_WARMUP} steps instead of {job.train.warmup}")
    if (lr := proof_lr(job.train)) > setting(job.train, "lr"):
        changes.append(
            f"train.lr={lr:g} instead of {setting(job.train, 'lr'):g}: updates must exceed rounding"
        )
    return changes


def reference_job(job: Job) -> Job:
    """The same job in one process."""
    layout = Layout(mode="given", micro_batch=job.layout.micro_batch)
    return dataclasses.replace(job, layout=layout, train=dataclasses.replace(job.train, all_reduce="backend"))


def select_sample_positions(global_batch: int, data_degree: int) -> tuple[int, ...]:
    """The first and the last sample of each data rank (``train.batches.assign_samples``)."""
    base, extra = divmod(global_batch, data_degree)
    starts = [rank * base + min(rank, extra) for rank in range(data_degree + 1)]
    ends = ((start, end - 1) for start, end in itertools.pairwise(starts) if end > start)
    return tuple(sorted({position for pair in ends for position in pair}))
