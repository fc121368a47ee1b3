"""The manifest of a checkpoint: lists, verifies and rotates checkpoints without torch.

A checkpoint is a folder ``step-00000100`` with a file of tensors per rank, the tokenizer, and
``manifest.json``, which holds size and SHA-256 of the others and a checksum of itself. A folder without a
valid manifest is not a checkpoint. ``draft`` writes checkpoints, ``tensor_files`` reads their tensors. In
format 1 ``model.safetensors`` and ``optimizer.safetensors`` hold all tensors, and the manifest has no
checksum. It is still read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import shutil
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from meshwright.checkpoint.retention import Retention
from meshwright.core.errors import Problem, UserError
from meshwright.core.object_path import AnyPath, ObjectPath, StoreError, remove_tree, write_whole
from meshwright.core.tensor_header import ELEMENT_BYTES, read_tensor_header
from meshwright.data.epochs import CorpusState, EpochTable
from meshwright.data.identity import SourceIdentity
from meshwright.spec.job import Data, Job, Train
from meshwright.spec.model import DEFAULT_NORM_GROUPS, Model
from meshwright.spec.train_defaults import setting

CHECKPOINT_VERSION = 2
MANIFEST = "manifest.json"
PROPOSAL = "proposal.json"
"""The manifest of a draft, before its files are known."""
TENSORS_SUFFIX = ".safetensors"
FORMAT_1_FILES = ("model.safetensors", "optimizer.safetensors")
CHECKSUM_KEY = "sha256"
"""In a JSON file: the checksum of all else in it."""
SMALL_FILE_SUFFIXES = (".jinja", ".json", ".zip")
"""Suffixes of tokenizers, chat templates and the Hugging Face source, which a checkpoint may have."""
MAX_MANIFEST_BYTES = 2**28
MAX_DIMS = 8
MAX_SEQ_LEN = 2**24
"""Readers allocate the tables of the positions; the files do not bound their size."""
VERIFY_THREADS = 4
BEST_FILE = "best"
"""Names the checkpoint with the lowest evaluation loss, which rotation keeps."""

Natural = Annotated[int, Field(ge=0, lt=2**53)]


@dataclass(frozen=True)
class FileFacts:
    """Size and checksum of a file."""

    bytes: Natural
    sha256: str


@dataclass(frozen=True)
class TensorFacts:
    """Dtype (as safetensors files name it) and shape of a full tensor."""

    dtype: str
    shape: Annotated[tuple[Natural, ...], Field(max_length=MAX_DIMS)]

    @property
    def bytes(self) -> int:
        """Its size; raises a LookupError for a dtype that the format does not have."""
        return ELEMENT_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Manifest:
    """Describes a checkpoint: the run, the counters, and the files."""

    step: Natural
    """Optimizer steps done."""
    position: Natural
    """Samples consumed: where the data continue."""
    world_size: Annotated[int, Field(ge=1, lt=2**31)]
    model: dict[str, Any]
    train: dict[str, Any]
    seq_len: Annotated[int, Field(ge=1, le=MAX_SEQ_LEN)]
    data_sha256: str
    """Identity of the data that the position counts in."""
    buckets: list[list[str]]
    """DDP buckets: with the same ones the loss curve continues bit by bit."""
    eval_loss: float | None = None
    """Evaluation at this step, if there was one."""
    best_eval_loss: float | None = None
    """The lowest so far in the whole run."""
    micro_batch: Natural = 0
    compression: str = "none"
    sharding: str = ""
    """How the run sharded its state."""
    transport: str = ""
    """What ran the collectives of ranks on one node: gives the order of sums. Empty in older checkpoints."""
    tensors: dict[str, TensorFacts] = field(default_factory=dict)
    """All full tensors by name; empty in format 1."""
    torch: str = ""
    mask: str = "causal"
    prompt_masking: bool = False
    template: Annotated[str, Field(pattern=r"^[\w-]+$")] | None = None
    """Chat template: a built-in one, or ``tokenizer`` for the one in this folder."""
    eval_fraction: float | None = None
    """Held-out fraction of the data, if the job gave one: which images were not trained on."""
    sources: dict[str, float] = field(default_factory=dict)
    """Weights of the sources of a mixture, by name."""
    source_positions: dict[str, Natural] = field(default_factory=dict)
    """Samples consumed from each source."""
    data: dict[str, SourceIdentity] = field(default_factory=dict)
    """The shards of each source, by its name; empty for images."""
    epochs: dict[str, EpochTable] = field(default_factory=dict)
    """Which epoch read which index, of each source; empty for images and in older checkpoints."""
    loss_scale: dict[str, float] | None = None
    """State of the fp16 loss scaler."""
    saved_at: float = 0.0
    """Time of the save, equal in all copies of a checkpoint: seconds since 1970."""
    grad_norms: list[float] = field(default_factory=list)
    """Gradient norms of the last steps, by which a spike is found."""
    files: dict[str, FileFacts] = field(default_factory=dict)
    version: int = CHECKPOINT_VERSION

    @property
    def tensor_files(self) -> list[str]:
        """The files that hold tensors."""
        return sorted(name for name in self.files if name.endswith(TENSORS_SUFFIX))

    @property
    def corpus(self) -> CorpusState:
        """The data that the position counts in; those of older checkpoints had not grown."""
        first = CorpusState.first(self.data_sha256, self.data)
        return replace(first, epochs=self.epochs) if self.epochs else first

    @property
    def positions(self) -> dict[str, int]:
        """Samples consumed from each source; the name of an only source is empty."""
        return self.source_positions or {"": self.position}


_MANIFEST: TypeAdapter[Manifest] = TypeAdapter(Manifest)
_NAME = re.compile(r"step-(\d{8,})(?:\.([1-9]\d*))?")


def checkpoint_name(step: int, revision: int = 0) -> str:
    """Folder of a step's checkpoint. A step that is saved again gets a new revision; nothing is replaced."""
    return f"step-{step:08d}" + (f".{revision}" if revision else "")


def parse_name(name: str) -> tuple[int, int] | None:
    """Step and revision of a checkpoint's folder; None for another name."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2] or 0)) if found else None


def list_checkpoints(root: AnyPath) -> list[AnyPath]:
    """Finished checkpoints, oldest first."""
    return sort_by_step(path.parent for path in root.glob(f"step-*/{MANIFEST}"))


def sort_by_step(folders: Iterable[AnyPath]) -> list[AnyPath]:
    """The paths that have the name of a checkpoint, oldest first."""
    numbered = {number: path for path in folders if (number := parse_name(path.name))}
    return [numbered[number] for number in sorted(numbered)]


def rotate(root: AnyPath, retention: Retention, newest: AnyPath) -> None:
    """Remove the checkpoints that are not kept after one was written, oldest first."""
    for left in root.glob(".step-*.old"):
        with contextlib.suppress(OSError):
            remove_tree(left)
    for left in root.glob(f".{BEST_FILE}.*.part"):  # of a process that was killed in mark_best
        with contextlib.suppress(OSError):
            left.unlink()
    written = parse_name(newest.name)
    assert written is not None, f"{newest.name} is not the name of a checkpoint"
    found = [number for path in list_checkpoints(root) if (number := parse_name(path.name))]
    best = parse_name(best_checkpoint(root) or "")
    for old in sorted(retention.choose_removed(found, written, best)):
        with contextlib.suppress(OSError):
            remove_checkpoint(root / checkpoint_name(*old))


def remove_checkpoint(path: AnyPath) -> None:
    """Remove a checkpoint or a leftover; renamed first, so that a partial one is never used.

    In an object store the manifest is removed first: what is left is a draft.
    """
    if isinstance(path, ObjectPath):
        (path / MANIFEST).unlink(missing_ok=True)
        path.remove_below()
        return
    aside = path
    if not path.name.startswith("."):
        aside = path.parent / f".{path.name}.old"
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)
    shutil.rmtree(aside)


def best_checkpoint(root: AnyPath) -> str | None:
    """Name of the best checkpoint, if one was marked."""
    try:
        if _plain_size(root / BEST_FILE) is None:
            return None
        return (root / BEST_FILE).read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):  # ValueError: not UTF-8
        return None


def beats_best(root: AnyPath, eval_loss: float | None) -> bool:
    """Whether an evaluation is better than that of the marked checkpoint, or none is marked."""
    if eval_loss is None:
        return False
    name = best_checkpoint(root)
    try:
        marked = None if name is None else read_manifest(root / name, verify=False).eval_loss
    except UserError:  # it is gone
        marked = None
    return marked is None or eval_loss < marked


def mark_best(root: AnyPath, checkpoint: AnyPath) -> None:
    """Keep this checkpoint from rotation until there is a better one."""
    write_whole(root / BEST_FILE, f"{checkpoint.name}\n".encode())


def encode_checked(content: dict[str, Any]) -> bytes:
    """A JSON file with a checksum of itself; :func:`decode_checked` accepts these bytes and no others."""
    body = {key: value for key, value in content.items() if key != CHECKSUM_KEY}
    digest = hashlib.sha256(_to_json(body)).hexdigest()
    return _to_json({CHECKSUM_KEY: digest, **body})


def decode_checked(data: bytes) -> dict[str, Any]:
    """The contents of such a file.

    Raises:
        ValueError: Any bit of it was changed; with the reason.
    """
    content = json.loads(data)
    if not isinstance(content, dict) or encode_checked(content) != data:
        raise ValueError("its checksum differs from its content")
    return {key: value for key, value in content.items() if key != CHECKSUM_KEY}


def _to_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"


def parse_manifest(data: bytes) -> Manifest:
    """A manifest from the contents of its file.

    Raises:
        ValueError: It is not one, or it was changed; with the reason.
    """
    content = json.loads(data)
    version = content.get("version") if isinstance(content, dict) else None
    if version not in (1, CHECKPOINT_VERSION):
        raise ValueError(f"format version {version}; versions 1 to {CHECKPOINT_VERSION} are read")
    if version != 1 or CHECKSUM_KEY in content:
        content = decode_checked(data)
    try:
        return _MANIFEST.validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}") from None


def read_manifest(checkpoint: AnyPath, verify: bool = True) -> Manifest:
    """Read a manifest and check its version, and the presence and size of every file.

    Args:
        checkpoint: The folder.
        verify: Also read every file and check its checksum.

    Raises:
        UserError: It is no checkpoint, or it is damaged.
        StoreError: Its object store cannot be reached: it may be intact.
    """
    path = checkpoint / MANIFEST
    try:
        if (size := _plain_size(path)) is None and path.exists():
            raise ValueError("it is not a plain file")
        if size is not None and size > MAX_MANIFEST_BYTES:
            raise ValueError("it is too large")
        manifest = parse_manifest(path.read_bytes())
    except FileNotFoundError:
        rule = "is not a checkpoint: it has no manifest.json"
        raise UserError(Problem("checkpoint-missing", rule, path=str(checkpoint))) from None
    except StoreError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise broken_checkpoint(checkpoint, f"has a manifest that cannot be used: {error}") from None
    if (name := find_wrong_file(checkpoint, manifest)) is not None:
        raise broken_checkpoint(checkpoint, f"is incomplete: {name} is missing or has another size")
    if (name := _find_unlisted_file(checkpoint, manifest)) is not None:
        raise broken_checkpoint(checkpoint, f"has a file that its manifest does not list: {name}")
    if not _has_room_for_tensors(manifest):
        raise broken_checkpoint(checkpoint, "has a manifest of more tensors than its files can hold")
    if verify:
        _verify_files(checkpoint, manifest)
    return manifest


def find_wrong_file(folder: AnyPath, manifest: Manifest) -> str | None:
    """The first file of a manifest that is missing, has another size, or is not a plain file."""
    needed = FORMAT_1_FILES if manifest.version == 1 else ()
    sizes = folder.list_sizes().get if isinstance(folder, ObjectPath) else lambda n: _plain_size(folder / n)
    for name in dict.fromkeys((*needed, *manifest.files)):
        facts = manifest.files.get(name)
        if facts is None or Path(name).name != name or sizes(name) != facts.bytes:
            return name
    return None


def _find_unlisted_file(folder: AnyPath, manifest: Manifest) -> str | None:
    """A file of a kind that readers look for by name, without a checksum in the manifest."""
    found = sorted(path.name for path in folder.iterdir() if path.suffix in SMALL_FILE_SUFFIXES)
    listed = {MANIFEST, PROPOSAL, *manifest.files}  # a coordinator may die before it removes its proposal
    return next((name for name in found if name not in listed and not name.startswith(".")), None)


def _has_room_for_tensors(manifest: Manifest) -> bool:
    """Whether the files are large enough for the tensors: a reader allocates memory by their shapes."""
    try:
        needed = sum(facts.bytes for facts in manifest.tensors.values())
    except LookupError:
        return False
    return needed <= sum(manifest.files[name].bytes for name in manifest.tensor_files)


def _plain_size(path: AnyPath) -> int | None:
    """Size of a plain file; None if it is missing, a link, a folder, a pipe or a device."""
    try:
        facts = path.lstat()
    except StoreError:
        raise
    except (OSError, ValueError):  # a name may be too long, or have a null character
        return None
    return facts.st_size if stat.S_ISREG(facts.st_mode) else None


def _verify_files(checkpoint: AnyPath, manifest: Manifest) -> None:
    """Compare the checksums of all files, several at a time."""
    with ThreadPoolExecutor(VERIFY_THREADS) as pool:
        found = pool.map(lambda name: file_sha256(checkpoint / name), manifest.files)
        try:
            for (name, facts), sha256 in zip(manifest.files.items(), found, strict=True):
                if sha256 != facts.sha256:
                    raise broken_checkpoint(
                        checkpoint, f"is damaged: the checksum of {name} differs from the manifest"
                    )
        except StoreError:
            raise
        except OSError as error:
            raise broken_checkpoint(checkpoint, f"has a file that cannot be read: {error}") from None
    _verify_tensors(checkpoint, manifest)


def _verify_tensors(checkpoint: AnyPath, manifest: Manifest) -> None:
    """Check that the files hold tensors, and as many bytes of them as the manifest describes."""
    held = 0
    for name in manifest.tensor_files:
        try:
            held += sum(info.bytes for info in read_tensor_header(checkpoint / name).values())
        except StoreError:
            raise
        except (OSError, ValueError) as error:
            raise broken_checkpoint(checkpoint, f"has a file that cannot be read: {name}: {error}") from None
    needed = sum(facts.bytes for facts in manifest.tensors.values())
    if manifest.version > 1 and held != needed:
        raise broken_checkpoint(
            checkpoint, f"has {held} bytes of tensors in its files and {needed} in its manifest"
        )


def check_same_job(manifest: Manifest, model: Model, data: Data, checkpoint: AnyPath) -> None:
    """Refuse a checkpoint of another model, or of samples that were built differently."""
    for key in ("seq_len", "mask", "prompt_masking"):
        there, here = getattr(manifest, key), getattr(data, key)
        if there != here:
            rule = f"does not match the job: data.{key} is {there} in the checkpoint and {here} in the job"
            fix = "Use the same value: the position in the data counts such samples"
            raise UserError(Problem("resume-mismatch", rule, path=str(checkpoint), fix=fix))
    weights = {source.name: source.weight for source in data.sources}
    if list(manifest.sources.items()) != list(weights.items()):
        rule = "does not match the job: the names, weights or order of data.sources differ "
        rule += f"({manifest.sources or 'none'} in the checkpoint, {weights or 'none'} in the job)"
        fix = "Use the same sources: the position of each is a function of all weights"
        raise UserError(Problem("resume-mismatch", rule, path=str(checkpoint), fix=fix))
    defaults = {known.name: known.default for known in fields(model)} | {"norm_groups": DEFAULT_NORM_GROUPS}
    for key, value in json.loads(json.dumps(asdict(model))).items():  # tuples become lists
        there = manifest.model.get(key)
        if there is None:  # omitted, or the checkpoint is older than the key
            there = defaults[key]
        value = defaults[key] if value is None else value  # noqa: PLW2901
        if key not in ("preset", "init_std", "hf") and there != value:
            rule = f"does not match the job: model.{key} is {there} in the checkpoint and {value} in the job"
            fix = "Use the job file of that run"
            raise UserError(Problem("resume-mismatch", rule, path=str(checkpoint), fix=fix))


def check_same_optimizer(manifest: Manifest, train: Train, checkpoint: AnyPath) -> None:
    """Refuse a checkpoint of another optimizer: its state cannot be converted."""
    there = manifest.train.get("optimizer", "adamw")
    if there != train.optimizer:
        rule = "does not match the job: "
        rule += f"train.optimizer is {there} in the checkpoint and {train.optimizer} in the job"
        fix = f"Use train.optimizer={there}: optimizer state cannot be converted"
        raise UserError(Problem("resume-mismatch", rule, path=str(checkpoint), fix=fix))
    momentum = setting(train, "momentum") if there == "sgd" else 0.0
    if there == "sgd" and (manifest.train.get("momentum") == 0) != (momentum == 0):
        before = manifest.train.get("momentum")
        rule = (
            f"does not match the job: train.momentum is {before} in the checkpoint and {momentum} in the job"
        )
        fix = "Resume with momentum if the run had it, else without"
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


def broken_checkpoint(checkpoint: AnyPath, rule: str) -> UserError:
    """The error of a checkpoint that cannot be used."""
    return UserError(Problem("checkpoint-broken", rule, path=str(checkpoint), fix="Use an older checkpoint"))


def file_sha256(path: AnyPath) -> str:
    """Checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
