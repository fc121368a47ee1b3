"""Saved models in the public API: checkpoints, Hugging Face folders, generation and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from meshwright.core.errors import require_argument
from meshwright.core.object_path import AnyPath, parse_location
from meshwright.runs.reporter import SILENT, Reporter

if TYPE_CHECKING:
    from meshwright.checkpoint.hf.export import Exported
    from meshwright.checkpoint.inventory import PruneResult, StoredCheckpoint
    from meshwright.runs.checkpoints import CopiedCheckpoint
    from meshwright.runs.evaluate import Evaluation, HeldOutData


def generate(
    checkpoint: str | Path,
    prompt: str = "",
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    chat: bool = False,
    template: str | None = None,
    tp: int = 1,
    on_token: Callable[[int], None] = lambda count: None,
) -> str:
    """Sample text from a trained model.

    Args:
        checkpoint: A checkpoint, a folder of checkpoints, a run, or a Hugging Face folder.
        prompt: Text to continue.
        tokens: Tokens to generate.
        temperature: 0 always takes the most likely token.
        top_k: Sample among this many tokens; 0 for all.
        seed: Seed of the sampling.
        chat: The prompt is a user message, in the chat template that the model was trained with.
        template: The same with another chat template.
        tp: Tensor-parallel ranks.
        on_token: Called with the number of tokens generated so far.
    """
    from meshwright.runs.generate import generate_from  # noqa: PLC0415

    require_argument(tokens >= 1, "tokens", tokens, "must be at least 1")
    require_argument(temperature >= 0, "temperature", temperature, "must not be negative")
    require_argument(top_k >= 0, "top_k", top_k, "must not be negative")
    settings = {
        "prompt": prompt,
        "tokens": tokens,
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
        "template": template,
        "tp": tp,
    }
    return generate_from(find_model(checkpoint), settings, chat, on_token)


def evaluate(
    model: str | Path,
    data: HeldOutData,
    *overrides: str,
    samples: int | None = None,
    precision: str = "fp32",
    reporter: Reporter = SILENT,
) -> list[Evaluation]:
    """Loss, perplexity and accuracy of a saved model on held-out sets, in this process.

    Args:
        model: A checkpoint, a folder of checkpoints, a run, or a Hugging Face folder.
        data: A path, a list of ``PATH`` or ``NAME=PATH``, or paths by name. All documents of a text count; of
            a prepared folder and of images the held-out split.
        overrides: Keys of ``[data]``, such as ``data.seq_len=512``; by default those of the training.
        samples: Samples of each set, from its first; None for all.
        precision: Precision of the GEMMs: ``fp32``, ``bf16`` or ``fp16``.
        reporter: Receives messages and progress.

    Raises:
        UserError: The model or a set cannot be read, or they do not match.
    """
    from meshwright.runs.evaluate import PRECISIONS, evaluate_saved, name_sets  # noqa: PLC0415

    require_argument(samples is None or samples >= 1, "samples", samples, "must be at least 1")
    choices = ", ".join(PRECISIONS)
    require_argument(precision in PRECISIONS, "precision", precision, f"must be one of {choices}")
    return evaluate_saved(find_model(model), name_sets(data), overrides, samples, precision, reporter)


def find_model(path: str | Path) -> Path:
    """The model that a path means: a Hugging Face folder, or what :func:`find_checkpoint` finds."""
    from meshwright.runs.generate import find_model as find  # noqa: PLC0415

    return find(parse_location(path))


def find_checkpoint(path: str | AnyPath) -> AnyPath:
    """The checkpoint that a path means: itself, or the newest of a folder, a run or an object store.

    Raises:
        UserError: There is none.
    """
    from meshwright.runs.checkpoints import find_checkpoint as find  # noqa: PLC0415

    return find(parse_location(path))


def list_checkpoints(
    path: str | AnyPath, *, verify: bool = False, reporter: Reporter = SILENT
) -> list[StoredCheckpoint]:
    """The checkpoints of a folder, a run or an object store.

    Args:
        path: A checkpoint, a folder of checkpoints, a run, or a URL (``s3://BUCKET/PREFIX``).
        verify: Whether to read every file and compare its checksum.
        reporter: Receives progress.
    """
    from meshwright.runs.checkpoints import list_all  # noqa: PLC0415

    return list_all(parse_location(path), verify, reporter)


def copy_checkpoints(
    source: str | AnyPath, target: str | AnyPath, *, every: bool = False, reporter: Reporter = SILENT
) -> list[CopiedCheckpoint]:
    """Copy the newest checkpoint to another folder or object store, and verify it on the way.

    Args:
        source: A checkpoint, a folder of checkpoints, a run, or a URL (``s3://BUCKET/PREFIX``).
        target: Folder or URL that holds checkpoints; created if it is missing.
        every: Copy all intact checkpoints.
        reporter: Receives progress.

    Raises:
        UserError: There is none to copy, one does not verify, or the target cannot be written.
    """
    from meshwright.runs.checkpoints import copy_checkpoints as copy  # noqa: PLC0415

    return copy(parse_location(source), parse_location(target), every, reporter)


def prune_checkpoints(path: str | AnyPath, keep: int, keep_every: int = 0) -> PruneResult:
    """Delete old checkpoints; the newest complete ones and the best one stay.

    Args:
        path: A folder of checkpoints, or a run.
        keep: Number of the newest to keep, at least one.
        keep_every: Also keep those whose step is a multiple of it; 0 for none.

    Raises:
        UserError: A run is writing into the folder.
    """
    from meshwright.checkpoint.retention import Retention  # noqa: PLC0415
    from meshwright.runs.checkpoints import prune_folder  # noqa: PLC0415

    return prune_folder(parse_location(path), Retention(keep, keep_every))


def export_checkpoint(
    path: str | AnyPath,
    out: str | Path,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    shard_bytes: int = 5 * 10**9,
    reporter: Reporter = SILENT,
) -> Exported:
    """Write a checkpoint as a Hugging Face folder.

    A run that started from one (``model.hf``) gives the same kind of folder back, with its files.

    Args:
        path: A checkpoint, a folder of checkpoints, a run, or a URL (``s3://BUCKET/PREFIX``).
        out: New or empty folder.
        dtype: Dtype of the weights; None for the dtypes of the run's Hugging Face folder, float32 without
            one.
        shard_bytes: Largest file of weights.
        reporter: Receives progress.
    """
    from meshwright.runs.checkpoints import export_to  # noqa: PLC0415

    return export_to(find_checkpoint(path), Path(out), dtype, shard_bytes, reporter)
