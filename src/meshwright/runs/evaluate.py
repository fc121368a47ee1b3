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
from meshwright.data.hf_tokenizer import hf_tokenizer_text
from meshwright.data.shards import looks_prepared
from meshwright.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from meshwright.launch.environment import prepare_environment
from meshwright.runs.data import prepare_data
from meshwright.runs.reporter import Reporter
from meshwright.spec.cluster import count_cores
from meshwright.spec.job import Job
from meshwright.spec.model import ResNetModel

if TYPE_CHECKING:
    from meshwright.train.batches import Batcher
    from meshwright.train.image_batches import ImageBatcher

BATCH_TOKENS = 4096
"""Tokens per forward pass, at least one sample."""
BATCH_IMAGES = 32


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


def name_sets(texts: Sequence[str]) -> dict[str, str]:
    """Paths by name, from ``NAME=PATH`` or ``PATH`` texts; a path alone is named after its file.

    Raises:
        UserError: Two sets have one name, or there is none.
    """
    sets: dict[str, str] = {}
    for text in texts:
        named = re.fullmatch(r"([\w.-]+)=(.+)", text)
        name, path = named.groups() if named else (Path(text.removeprefix("builtin:")).stem or text, text)
        if name in sets:
            rule, fix = "names two held-out sets", "Give each its own name: --data NAME=PATH"
            raise UserError(Problem("eval-set-name", rule, path=name, fix=fix))
        sets[name] = path
    if not sets:
        raise UserError(Problem("eval-set-name", "names no held-out set", path="--data", fix="Give a path"))
    return sets


def evaluate_saved(
    model: Path,
    sets: Mapping[str, str],
    overrides: Sequence[str],
    max_samples: int | None,
    reporter: Reporter,
) -> list[Evaluation]:
    """Evaluate a model on each set.

    Args:
        model: A checkpoint or a Hugging Face folder.
        sets: Paths by name: text, a prepared folder (its ``eval`` split), or images (their ``eval`` split).
        overrides: ``data.key=value`` texts.
        max_samples: Of each set, from its first; None for all.
        reporter: Receives messages and progress.

    Raises:
        UserError: The model or a set cannot be read, or they do not match.
    """
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="evaluating a model")
    for text in overrides:
        if not text.startswith("data.") or text.startswith("data.path="):
            rule, fix = "cannot be set here", "Give keys of [data] except the path, such as data.seq_len=512"
            raise UserError(Problem("eval-override", rule, path=text.partition("=")[0], fix=fix))
    prepare_environment(threads=count_cores())
    from meshwright.train.saved_model import build_saved_job, load_saved_model  # noqa: PLC0415  (torch)
    from meshwright.train.score import score  # noqa: PLC0415

    if (model / MANIFEST).is_file():
        read_manifest(model)  # verifies it
    prepared = []
    for name, path in sets.items():  # all sets are checked before the first is evaluated
        job = build_saved_job(model, _data_keys(model, path), overrides)
        batcher = _open_batcher(job, prepare_data(job, reporter), model)
        prepared.append((name, path, job, batcher))
    network = load_saved_model(model, prepared[0][2])
    found = []
    for name, path, job, batcher in prepared:
        count = min(len(batcher.dataset), max_samples or len(batcher.dataset))
        with reporter.activity(f"evaluating {name}: {format_plural(count, 'sample')}"):
            total = score(network, batcher.micro_batches(np.arange(count)), next(network.parameters()).device)
        if not total.targets:
            rule, fix = (
                "has no target to predict",
                f"Give more data, or a data.seq_len below {job.data.seq_len}",
            )
            raise UserError(Problem("eval-no-targets", rule, path=path, fix=fix))
        loss, accuracy = total.loss_sum / total.targets, total.correct / total.targets
        perplexity = math.exp(min(loss, 700.0))  # more leaves the range of a float
        found.append(Evaluation(name, path, loss, perplexity, accuracy, total.targets, count))
    return found


def _data_keys(model: Path, path: str) -> dict[str, Any]:
    """The path, and for text that is not prepared the model's own tokenizer."""
    is_text = (model / TOKENIZER_FILE).is_file() and not looks_prepared(Path(path))
    return {"path": path, **({"tokenizer": str(model / TOKENIZER_FILE)} if is_text else {})}


def _open_batcher(job: Job, folder: Path, model: Path) -> Batcher | ImageBatcher:
    """The samples of a set: of a prepared folder and of images the eval split, of text all documents."""
    from meshwright.train.batches import Batcher  # noqa: PLC0415  (torch)
    from meshwright.train.image_batches import open_image_batches  # noqa: PLC0415

    if isinstance(job.model, ResNetModel):
        _, held_out, _ = open_image_batches(job, job.model, folder, 0)
        return dataclasses.replace(held_out, micro_batch=BATCH_IMAGES)
    split = "eval" if looks_prepared(Path(job.data.path)) else "all"
    data = job.data
    dataset = TokenDataset.open(folder, split, data.seq_len, data.mask, data.prompt_masking)
    texts = [hf_tokenizer_text(t) for t in (dataset.load_tokenizer(), load_tokenizer(model))]
    if texts[0] != texts[1]:
        rule = f"was prepared with another tokenizer than that of {model}"
        raise UserError(Problem("eval-tokenizer", rule, path=data.path, fix="Give the text itself"))
    return Batcher(dataset, 0, 1, max(1, BATCH_TOKENS // data.seq_len))
