"""What a proof compares, how strictly, and the files through which its ranks speak.

A proof runs a job twice: in one process, which writes down gradients, weights and what modules put out, and
in its layout, whose ranks compare their own with those as they go. Only differences are kept. Who judges them
is ``verify/verdict.py``; this page has neither torch nor a verdict.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.core.events import to_json
from meshwright.spec.execution import uses_eager_blocks
from meshwright.spec.job import Checkpoint, Compression, Job, Train
from meshwright.spec.layout import Layout
from meshwright.spec.legality.table import with_layout
from meshwright.spec.load import build_job, job_tree
from meshwright.spec.model import DecoderModel
from meshwright.spec.train_defaults import with_eager_blocks

STEPS = 10
GRADIENT_STEPS = (1, STEPS)
LOSS_TOLERANCE = 1e-5
"""Of the reference's loss."""
GRADIENT_TOLERANCE = 1e-4
"""Of the norm of the parameter's gradient in the reference."""
ROUNDING = 2.0**-23
"""Float32's: a difference below this share of the whole model's gradient norm is noise. Some gradients are
nothing but noise: those of the bias of attention's keys are zero, which softmax does not see."""
ACTIVATION_TOLERANCE = 1e-4
"""Of the norm of one sample's output; it only decides who is named."""
WEIGHT_TOLERANCE = 1e-2
"""Of the norm of the first update. AdamW's first steps have one size whatever the gradient's, so a gradient
of zero and one of 1e-9 differ by a whole step; it only decides who is named."""
TIE = 1e-6
"""Scores of experts that differ by less tie: which one a token goes to is rounding's doing."""
MAX_WARMUP = 2
"""Steps: with a long warm-up nothing would move in ten."""
PROOF_PHASE = "proof"
"""The phase in which a rank's own collectives for comparing count: those of the steps stay as promised."""

TASK_FILE = "proof.json"
REFERENCE_FILE = "reference.json"
ACTIVATIONS_FILE = "activations.safetensors"
ROOT_NAME = "model"
"""How the outermost module is spoken of; in torch its name is empty."""


def gradients_file(step: int) -> str:
    """Where the reference keeps the gradients of a step."""
    return f"gradients-{step}.safetensors"


def routing_file(step: int) -> str:
    """Where the reference keeps the experts that its tokens chose in a step."""
    return f"choices-{step}.safetensors"


WEIGHTS_FILE = "weights.safetensors"
"""The reference's weights after the first step."""


def findings_file(rank: int) -> str:
    """Where a rank writes what it found."""
    return f"findings-{rank}.json"


@dataclass(frozen=True)
class ProofTask:
    """What a rank of a proof is told beside the plan."""

    positions: tuple[int, ...]
    """Samples of the first step, by their place in the global batch, whose activations are compared."""
    reference: str | None = None
    """Folder of the reference to compare with; None makes this run the reference."""
    steps: int = STEPS

    def write(self, folder: Path) -> None:
        """Put it beside the plan."""
        (folder / TASK_FILE).write_text(to_json(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> ProofTask:
        """Read what was written there."""
        facts = json.loads((folder / TASK_FILE).read_text(encoding="utf-8"))
        return cls(tuple(facts["positions"]), facts["reference"], facts["steps"])


@dataclass
class ReferenceRecord:
    """What the one process saw, beside its tensors."""

    modules: list[str] = field(default_factory=list)
    """In the order in which their outputs were ready."""
    parameters: list[str] = field(default_factory=list)
    """In the order in which their gradients were ready."""
    shared: dict[str, list[str]] = field(default_factory=dict)
    """Other names of a parameter that several modules use."""
    gradient_norms: dict[str, dict[str, float]] = field(default_factory=dict)
    """By step and parameter; a parameter without a gradient is left out."""
    update_norms: dict[str, float] = field(default_factory=dict)
    """How far the first step moved each parameter."""

    def write(self, folder: Path) -> None:
        """Leave them for the ranks of the layout and for the judge."""
        (folder / REFERENCE_FILE).write_text(to_json(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> ReferenceRecord:
        """Read what was written there."""
        return cls(**json.loads((folder / REFERENCE_FILE).read_text(encoding="utf-8")))


@dataclass
class TensorDifference:
    """How far a full gradient or weight is from the reference's."""

    difference: float | None
    """Norm of the difference; None if it is not finite, or the shapes differ."""
    factor: float | None = None
    """How many times the reference it is, as near as one factor comes."""
    rest: float | None = None
    """What that factor leaves unexplained, of its norm."""
    missing: bool = False
    """The rank holds the parameter and has no gradient for it."""


@dataclass
class ActivationDifference:
    """How far one module's input or output is from the reference's, for one sample."""

    module: str
    what: str
    """`input` or `output`."""
    position: int
    difference: float | None
    """Of the reference's norm; None if it is not finite."""


@dataclass
class RankFindings:
    """What one rank of the layout found."""

    rank: int
    activations: list[ActivationDifference] = field(default_factory=list)
    gradients: dict[str, dict[str, TensorDifference]] = field(default_factory=dict)
    """By step and parameter; those that the rank does not hold are left out."""
    weights: dict[str, TensorDifference] = field(default_factory=dict)
    """After the first step."""
    not_compared: list[str] = field(default_factory=list)
    """Modules whose output the rank holds in another shape: a part."""
    replayed_ties: int = 0
    """Tokens of this rank, in all steps and layers, whose experts tied and were taken from the reference."""

    def write(self, folder: Path) -> None:
        """Leave them for the judge."""
        (folder / findings_file(self.rank)).write_text(to_json(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path, rank: int) -> RankFindings:
        """Read what a rank has written."""
        facts = json.loads((folder / findings_file(rank)).read_text(encoding="utf-8"))

        def tensors(table: dict[str, Any]) -> dict[str, TensorDifference]:
            return {name: TensorDifference(**row) for name, row in table.items()}

        return cls(
            rank=facts["rank"],
            activations=[ActivationDifference(**row) for row in facts["activations"]],
            gradients={step: tensors(table) for step, table in facts["gradients"].items()},
            weights=tensors(facts["weights"]),
            not_compared=facts["not_compared"],
            replayed_ties=facts["replayed_ties"],
        )


def proof_job(job: Job, memory_bytes: int) -> Job:
    """The job as it is proved: float32, on the cores of this machine, repeatable, ten steps that move.

    Whether its layout can run is not asked here: the layout may still be made smaller.
    """
    first = {field.name: field.default for field in dataclasses.fields(Train)}
    warmup = 0 if job.train.schedule == "wsd" else min(job.train.warmup, MAX_WARMUP)
    quiet = ("loss_scale", "tensorboard", "wandb", "mlflow", "eval_every", "runtime")
    train = dataclasses.replace(
        with_eager_blocks(job.train),
        **{key: first[key] for key in quiet},  # type: ignore[arg-type]
        steps=STEPS,
        warmup=warmup,
        precision="fp32",
        noise_scale_every=0,
        deterministic=True,
    )
    plain = dataclasses.replace(
        job, train=train, run_dir=None, checkpoint=Checkpoint(), compression=Compression()
    )
    tree = {section: table for section, table in job_tree(plain).items() if section != "layout"}
    # The peak is given because nobody asks: it would be measured for a second in every rank.
    here = {"preset": "local", "device": "cpu", "matmul_flops_per_s": 1e11, "memory_bytes": memory_bytes}
    return with_layout(build_job({**tree, "cluster": here}, settled=True, to_run=False), job.layout)


def explain_settings(job: Job) -> list[str]:
    """What the proof does otherwise than the job says, in sentences."""
    said = []
    if job.train.precision != "fp32":
        said.append(f"float32 products instead of train.precision={job.train.precision}")
    if job.compression.kind != "none":
        said.append(f"whole gradients on the wire instead of compression.kind={job.compression.kind}")
    if not uses_eager_blocks(job):
        said.append(f"train.block_backend=eager instead of {job.train.block_backend}")
    if job.cluster.device != "cpu":
        said.append(f"the cores of this machine instead of {job.cluster.device_name or job.cluster.device}")
    if isinstance(job.model, DecoderModel) and job.model.hf is not None:
        said.append(f"weights drawn from train.seed instead of any in model.hf={job.model.hf}")
    if job.train.warmup > MAX_WARMUP:
        said.append(f"a warm-up of at most {MAX_WARMUP} steps instead of {job.train.warmup}")
    return said


def reference_job(job: Job) -> Job:
    """The same in one process: nothing is split, sent or computed twice."""
    return dataclasses.replace(job, layout=Layout(mode="given", micro_batch=job.layout.micro_batch))


def select_sample_positions(global_batch: int, data_degree: int) -> tuple[int, ...]:
    """The first and the last sample of each data rank, as samples are dealt."""
    base, extra = divmod(global_batch, data_degree)
    starts = [rank * base + min(rank, extra) for rank in range(data_degree + 1)]
    ends = ((start, end - 1) for start, end in itertools.pairwise(starts) if end > start)
    return tuple(sorted({place for pair in ends for place in pair}))
