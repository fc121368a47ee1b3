"""Evaluates a saved model on held-out sets, in this process."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.checkpoint.manifest import MANIFEST, read_manifest
from meshwright.core.errors import Problem, UserError
from meshwright.core.packages import require_packages
from meshwright.core.units import format_plural
from meshwright.data.dataset import TokenDataset
from meshwright.data.images import has_eval_split, image_shape, open_images
from meshwright.data.shards import ShardFolder
from meshwright.launch.environment import prepare_environment
from meshwright.runs.held_out import prepare_held_out
from meshwright.runs.reporter import Reporter
from meshwright.spec.cluster import count_cores
from meshwright.spec.job import EvalSet, Job
from meshwright.spec.model import DecoderModel, ResNetModel
from meshwright.spec.paths import BUILTIN

if TYPE_CHECKING:
    from meshwright.train.batches import Batcher
    from meshwright.train.image_batches import ImageBatcher

HeldOutData = str | Path | Sequence[str] | Mapping[str, str | Path]
"""A path, a list of ``PATH`` or ``NAME=PATH``, or paths by name."""
BATCH_TOKENS = 4096
"""Tokens per forward pass, at least one sample."""
BATCH_IMAGES = 32
PRECISIONS = ("fp32", "bf16", "fp16")
FIXED_KEYS = ("path", "sources", "eval", "tokenizer", "eval_fraction")
"""Keys of ``[data]`` that the model or the option ``--data`` determine."""
PROMPT_KEYS = ("data.template", "data.prompt_field", "data.answer_field", "data.prompt_masking")
"""Keys that only sets of conversations read."""


@dataclass(frozen=True)
class Evaluation:
    """The result on one held-out set."""

    name: str
    path: str
    loss: float
    """Mean over the targets, in nats."""
    perplexity: float
    """exp(loss)."""
    accuracy: float
    """Share of targets that the model ranks first: next tokens, or labels (top-1)."""
    targets: int
    samples: int

    def as_dict(self) -> dict[str, Any]:
        """The entry of ``meshwright eval --json``."""
        return dataclasses.asdict(self)


def name_sets(data: HeldOutData) -> dict[str, str]:
    """Paths by name; a path alone is named after its file.

    Raises:
        UserError: Two sets have one name, or there is no set.
    """
    sets = {name: str(path) for name, path in data.items()} if isinstance(data, Mapping) else {}
    texts = () if isinstance(data, Mapping) else [str(data)] if isinstance(data, str | Path) else data
    for text in texts:
        named = re.fullmatch(r"([\w.-]+)=(.+)", text)
        name, path = named.groups() if named else (Path(text.removeprefix(BUILTIN)).stem or text, text)
        if name in sets:
            rule, fix = "names two held-out sets", "Give each its own name: --data NAME=PATH"
            raise UserError(Problem("eval-set-name", rule, path=name, fix=fix))
        sets[name] = path
    if not sets:
        rule = "is missing: an evaluation needs at least one held-out set"
        fix = "Add --data PATH or --data NAME=PATH: text, records, images, or a prepared folder"
        raise UserError(Problem("eval-no-data", rule, path="--data", fix=fix))
    return sets


def evaluate_saved(
    model: Path,
    sets: Mapping[str, str],
    overrides: Sequence[str],
    max_samples: int | None,
    precision: str,
    reporter: Reporter,
) -> list[Evaluation]:
    """Evaluate a model on each set.

    Args:
        model: A checkpoint or a Hugging Face folder.
        sets: Paths by name: text or conversations, or the ``eval`` split of a prepared folder or of images.
        overrides: ``data.key=value`` texts.
        max_samples: Largest number of each set, from its first; None for all.
        precision: Precision of the GEMMs, one of ``PRECISIONS``.
        reporter: Receives messages and progress.

    Raises:
        UserError: The model or a set cannot be read, or they do not match.
    """
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="evaluating a model")
    _check_overrides(overrides)
    prepare_environment(threads=count_cores())
    from meshwright.train.saved_model import build_saved_job, load_saved_model  # noqa: PLC0415  (torch)
    from meshwright.train.score import score  # noqa: PLC0415

    if (model / MANIFEST).is_file():
        read_manifest(model)  # verifies it
    prepared, folders = [], []
    for name, path in sets.items():  # all sets are checked before the first is evaluated
        job = build_saved_job(model, _set_keys(path, overrides), overrides)
        folder = prepare_held_out(job, EvalSet(name, job.data.path), model, reporter)
        folders.append(folder)
        prepared.append((name, path, _open_batcher(job, folder)))
    if isinstance(job.model, DecoderModel):
        _check_prompts(overrides, folders)
    network = load_saved_model(model, job)
    found = []
    for name, path, batcher in prepared:
        count = min(len(batcher.dataset), max_samples or len(batcher.dataset))
        with reporter.activity(f"evaluating {name}: {format_plural(count, 'sample')}"):
            total = score(network, batcher.micro_batches(np.arange(count)), precision)
        if not total.targets:
            rule = "has nothing to predict: no held-out documents, or masked prompts only"
            raise UserError(Problem("eval-no-targets", rule, path=path, fix="Add text to it"))
        loss, accuracy = total.loss_sum / total.targets, total.correct / total.targets
        perplexity = math.exp(min(loss, 700.0))  # more leaves the range of a float
        found.append(Evaluation(name, path, loss, perplexity, accuracy, total.targets, count))
    return found


def _check_overrides(overrides: Sequence[str]) -> None:
    """Refuse keys that have no effect: the model has its tokenizer, and all documents of a set count."""
    for text in overrides:
        key = text.partition("=")[0]
        if not key.startswith("data.") or key.split(".")[1] in FIXED_KEYS:
            fix = "Give other keys of [data], such as data.seq_len=512"
            raise UserError(Problem("eval-override", "cannot be set in an evaluation", path=key, fix=fix))


def _check_prompts(overrides: Sequence[str], folders: Sequence[Path]) -> None:
    """Refuse keys of conversations if every set is plain text."""
    if any(ShardFolder.open(folder).has_prompts for folder in folders):
        return
    for key in (text.partition("=")[0] for text in overrides):
        if key in PROMPT_KEYS:
            rule, fix = "has no effect: no set has conversations", "Leave it out"
            raise UserError(Problem("eval-override", rule, path=key, fix=fix))


def _set_keys(path: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Keys of ``[data]`` for a set, over those of the training."""
    keys: dict[str, Any] = {"path": path}
    if has_eval_split(path):
        keys["eval_fraction"] = None
    if any(text.startswith("data.text_field=") for text in overrides):
        keys["template"] = None
    return keys


def _open_batcher(job: Job, folder: Path) -> Batcher | ImageBatcher:
    """The samples of a set, for one process."""
    from meshwright.train.batches import Batcher  # noqa: PLC0415  (torch)
    from meshwright.train.image_batches import ImageBatcher  # noqa: PLC0415

    if isinstance(job.model, ResNetModel):
        images = open_images(str(folder), "eval", image_shape(job.model), job.data.eval_fraction)
        return ImageBatcher(images, 0, 1, BATCH_IMAGES)
    dataset = TokenDataset.open_set(folder, job.data)
    sample_weight = 1.0 if job.model.num_experts else None  # a router without weights applies no capacity
    return Batcher(dataset, 0, 1, max(1, BATCH_TOKENS // job.data.seq_len), sample_weight=sample_weight)
