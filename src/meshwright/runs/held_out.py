"""Prepares held-out sets: text, prepared folders or images besides the training data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.data.hf_tokenizer import hf_tokenizer_text
from meshwright.data.shards import looks_prepared
from meshwright.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from meshwright.runs.data import prepare_data
from meshwright.runs.reporter import Reporter
from meshwright.spec.job import SYNTHETIC_IMAGES, Job
from meshwright.spec.model import ResNetModel


@dataclass(frozen=True)
class HeldOutSet:
    """A prepared held-out set."""

    name: str
    folder: Path
    split: str
    """``eval`` of a prepared folder and of images; ``all`` of a text."""


def prepare_held_out(job: Job, name: str, path: str, tokenizer: Path, reporter: Reporter) -> HeldOutSet:
    """Prepare a held-out set with the keys of the job's data.

    Args:
        job: Whose model is evaluated.
        name: Of the set.
        path: As ``data.path``.
        tokenizer: The model's tokenizer file, or its folder.
        reporter: Receives messages and progress.

    Raises:
        UserError: The set cannot be read, or was prepared with another tokenizer.
    """
    if isinstance(job.model, ResNetModel):
        data = dataclasses.replace(job.data, path=path, eval=())
        folder = prepare_data(dataclasses.replace(job, data=data), reporter)
        return HeldOutSet(name, folder if path == SYNTHETIC_IMAGES else folder.resolve(), "eval")
    is_prepared = looks_prepared(Path(path))
    own = str(tokenizer if tokenizer.is_file() else tokenizer / TOKENIZER_FILE)
    keys: dict[str, Any] = {"tokenizer": None if is_prepared else own, "eval_fraction": None}
    if is_prepared:
        keys |= {"template": None, "text_field": None}
    data = dataclasses.replace(job.data, path=path, eval=(), sources=(), **keys)
    folder = prepare_data(dataclasses.replace(job, data=data), reporter)
    if hf_tokenizer_text(load_tokenizer(folder)) != hf_tokenizer_text(load_tokenizer(tokenizer)):
        rule, fix = "was prepared with another tokenizer than the model's", "Give the text itself"
        raise UserError(Problem("eval-tokenizer", rule, path=path, fix=fix))
    return HeldOutSet(name, folder.resolve(), "eval" if is_prepared else "all")
