"""What checkpoints there are and whether they are whole; reads and rotates without torch.

A checkpoint is a folder ``step-00000100`` with ``model.safetensors``, ``optimizer.safetensors``, the
tokenizer and ``manifest.json``, which is written last and holds size and SHA-256 of the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from meshwright.core.errors import Problem, UserError
from meshwright.core.files import replace_text
from meshwright.spec.job import Data, Job, Train
from meshwright.spec.model import DEFAULT_NORM_GROUPS, Model
from meshwright.spec.train_defaults import setting

CHECKPOINT_VERSION = 1
MANIFEST = "manifest.json"
MODEL_FILE = "model.safetensors"
SELECTION_BIAS = "routers.selection_bias"
"""In that file, the biases by which experts are chosen: (layers with experts, experts)."""
OPTIMIZER_FILE = "optimizer.safetensors"
BEST_FILE = "best"
"""Names the checkpoint with the lowest evaluation loss; rotation spares it."""


@dataclass(frozen=True)
class FileFacts:
    """What a file of a checkpoint must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is a checkpoint of."""

    step: int
    """Optimizer steps done."""
    position: int
    """Samples consumed: where the data go on."""
    world_size: int
    model: dict[str, Any]
    train: dict[str, Any]
    seq_len: int
    data_sha256: str
    """Identity of the data that the position counts in."""
    buckets: list[list[str]]
    """DDP's bucket boundaries: with the same ones the curve goes on bit by bit."""
    eval_loss: float | None = None
    """Evaluation at this step, if there was one."""
    best_eval_loss: float | None = None
    """The lowest so far in the whole run."""
    micro_batch: int = 0
    compression: str = "none"
    sharding: str = ""
    """How the state was cut over the ranks; the tensors here are whole."""
    torch: str = ""
    mask: str = "causal"
    prompt_masking: bool = False
    loss_scale: dict[str, float] | None = None
    """fp16's loss scale and how it moves."""
    files: dict[str, FileFacts] = field(default_factory=dict)
    version: int = CHECKPOINT_VERSION


_MANIFEST: TypeAdapter[Manifest] = TypeAdapter(Manifest)


def checkpoint_name(step: int) -> str:
    """Folder of a step's checkpoint; names sort by step."""
    return f"step-{step:08d}"


def list_checkpoints(root: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(p.parent for p in root.glob(f"step-*/{MANIFEST}"))


def rotate(root: Path, keep_last: int, newest: Path) -> None:
    """Remove all but the last ``keep_last`` checkpoints up to the one just written, and the best one.

    A later one can only be left over from an attempt that this one passed over; it is not counted.
    """
    for left in list_leftovers(root):
        shutil.rmtree(left, ignore_errors=True)
    best = best_checkpoint(root)
    done = [path for path in list_checkpoints(root) if path.name <= newest.name]
    for old in done[:-keep_last]:
        if old.name != best:
            with contextlib.suppress(OSError):
                remove_checkpoint(old)


def list_leftovers(root: Path) -> list[Path]:
    """What killed processes left behind: drafts, and checkpoints that were about to go."""
    return [*root.glob(".step-*.part"), *root.glob(".step-*.old")]


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint or a leftover; hidden first, so that half of one is never taken for a whole."""
    aside = path
    if not path.name.startswith("."):
        aside = path.parent / f".{path.name}.old"
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)
    shutil.rmtree(aside)


def best_checkpoint(root: Path) -> str | None:
    """Name of the best checkpoint, if one was marked."""
    try:
        return (root / BEST_FILE).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def mark_best(root: Path, checkpoint: Path) -> None:
    """Spare this checkpoint from rotation until a better one comes."""
    replace_text(root / BEST_FILE, checkpoint.name + "\n")


def read_manifest(checkpoint: Path, verify: bool = True) -> Manifest:
    """Read and check a manifest: the version must be ours and every file there.

    Args:
        checkpoint: The folder.
        verify: Also read every file and compare its checksum.
    """
    path = checkpoint / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        rule = "is not a checkpoint: it has no manifest.json"
        raise UserError(Problem("checkpoint-missing", rule, path=str(checkpoint))) from None
    except (OSError, ValueError) as error:
        raise _broken(checkpoint, f"has a manifest that cannot be read: {error}") from None
    version = content.get("version") if isinstance(content, dict) else None
    if version != CHECKPOINT_VERSION:
        raise _broken(checkpoint, f"has version {version}; this is version {CHECKPOINT_VERSION}")
    try:
        manifest = _MANIFEST.validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _broken(checkpoint, f"has a manifest that is not whole: {where}: {first['msg']}") from None
    for name in (MODEL_FILE, OPTIMIZER_FILE, *manifest.files):
        facts = manifest.files.get(name)
        path = checkpoint / name
        plain_file = Path(name).name == name and path.is_file() and not path.is_symlink()
        if facts is None or not plain_file or path.stat().st_size != facts.bytes:
            raise _broken(checkpoint, f"is not whole: {name} is missing or has another size")
        if verify and file_sha256(path) != facts.sha256:
            raise _broken(checkpoint, f"is damaged: {name} has another checksum than the manifest")
    return manifest


def find_newest(root: Path) -> tuple[Path, list[str]] | None:
    """The newest checkpoint that verifies, and a sentence for each newer one that does not."""
    refused: list[str] = []
    for checkpoint in reversed(list_checkpoints(root)):
        try:
            read_manifest(checkpoint)
        except UserError as error:
            refused.append(f"{checkpoint} {error.problems[0].rule}")
        else:
            return checkpoint, refused
    if refused:
        raise UserError(
            Problem("checkpoint-none-good", f"holds no whole checkpoint: {refused[0]}", path=str(root))
        )
    return None


def check_same_job(manifest: Manifest, model: Model, data: Data, checkpoint: Path) -> None:
    """A checkpoint of another model, or of samples that were made in another way, cannot be resumed."""
    for key in ("seq_len", "mask", "prompt_masking"):
        there, here = getattr(manifest, key), getattr(data, key)
        if there != here:
            rule = f"does not fit this job: data.{key} is {there} there and {here} in the job"
            fix = "Use the same value: the position in the data counts samples made with it"
            raise UserError(Problem("resume-mismatch", rule, path=str(checkpoint), fix=fix))
    defaults = {known.name: known.default for known in fields(model)} | {"norm_groups": DEFAULT_NORM_GROUPS}
    for key, value in json.loads(json.dumps(asdict(model))).items():  # tuples as the manifest has them
        there = manifest.model.get(key)
        if there is None:  # left out, or a checkpoint from before there was such a key
            there = defaults[key]
        value = defaults[key] if value is None else value  # noqa: PLW2901
        if key not in ("preset", "init_std", "hf") and there != value:
            rule = f"does not fit this job: model.{key} is {there} there and {value} in the job"
            fix = "Use the job file that it came from"
            raise UserError(Problem("resume-mismatch", rule, path=str(checkpoint), fix=fix))


def check_same_optimizer(manifest: Manifest, train: Train, checkpoint: Path) -> None:
    """State of one update rule means nothing to another."""
    there = manifest.train.get("optimizer", "adamw")
    if there != train.optimizer:
        rule = f"does not fit this job: train.optimizer is {there} there and {train.optimizer} in the job"
        fix = f"Use train.optimizer={there}: its state cannot become that of another"
        raise UserError(Problem("resume-mismatch", rule, path=str(checkpoint), fix=fix))
    momentum = setting(train, "momentum") if there == "sgd" else 0.0
    if there == "sgd" and (manifest.train.get("momentum") == 0) != (momentum == 0):
        before = manifest.train.get("momentum")
        rule = f"does not fit this job: train.momentum is {before} there and {momentum} in the job"
        fix = "Resume with a momentum where there was one, and without where there was none"
        raise UserError(Problem("resume-mismatch", rule, path=str(checkpoint), fix=fix))


def describe_sharding(job: Job) -> str:
    """How the layout shards the state, for the manifest; empty where it is replicated."""
    layout, parts = job.layout, []
    if layout.pp > 1:
        order = "a file" if layout.schedule_file else layout.schedule
        layers = ",".join(str(count) for count in layout.stage_layers or ())
        parts.append(f"pp={layout.pp} schedule={order} stage_layers={layers}")
    if layout.zero:
        parts.append(f"dp_replicate={layout.dp_replicate} dp_shard={layout.dp_shard} zero={layout.zero}")
    if layout.cp > 1:
        parts.append(f"cp={layout.cp} context={layout.context}")
    if layout.ep * layout.etp > 1:
        parts.append(f"ep={layout.ep} etp={layout.etp}")
    if layout.tp > 1:
        parts.append(f"tp={layout.tp}" + (" sequence_parallel" if layout.sequence_parallel else ""))
    return " ".join(parts)


def _broken(checkpoint: Path, rule: str) -> UserError:
    return UserError(Problem("checkpoint-broken", rule, path=str(checkpoint), fix="Use an older checkpoint"))


def file_sha256(path: Path) -> str:
    """Checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
