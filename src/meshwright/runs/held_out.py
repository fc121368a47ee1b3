"""Prepares evaluation sets: text, conversations, prepared folders or images besides the training data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.data.hf_tokenizer import hf_tokenizer_text
from meshwright.data.images import has_eval_split
from meshwright.data.shards import looks_prepared
from meshwright.data.sources import source_problem
from meshwright.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from meshwright.runs.data import FIELD_KEYS, check_image_data, data_of, prepare_source, read_options
from meshwright.runs.reporter import Reporter
from meshwright.spec.job import SYNTHETIC_IMAGES, Data, EvalSet, Job
from meshwright.spec.model import ResNetModel


def check_paths(job: Job) -> None:
    """Check that the sets of a job exist, before its data are prepared, which may take long.

    Raises:
        UserError: Some do not; all of them are reported.
    """
    sets = () if isinstance(job.model, ResNetModel) else job.data.eval
    if problems := [problem for one in sets if (problem := source_problem(one.path, Path.cwd()))]:
        raise UserError(*problems)


def prepare_held_out(job: Job, one: EvalSet, tokenizer: Path, reporter: Reporter) -> Path:
    """The folder of a prepared evaluation set; its ``eval`` split is evaluated.

    Args:
        job: Whose model is evaluated.
        one: The set.
        tokenizer: The model's tokenizer file, or its folder.
        reporter: Receives messages and progress.

    Raises:
        UserError: The set cannot be read, or was prepared with another tokenizer.
    """
    path, data = Path(one.path), data_of(job.data, one)
    if isinstance(job.model, ResNetModel):
        _refuse_fields(one, "has images")
        fraction = None if has_eval_split(one.path) else data.eval_fraction
        data = dataclasses.replace(data, eval_fraction=fraction)
        check_image_data(dataclasses.replace(job, data=data), job.model, eval_only=True)
        return path if one.path == SYNTHETIC_IMAGES else path.resolve()
    if looks_prepared(path):
        _refuse_fields(one, "is already prepared")
        none: dict[str, Any] = dict.fromkeys((*FIELD_KEYS, "tokenizer", "eval_fraction"))
        folder = prepare_source(job, dataclasses.replace(data, **none), reporter)
        if hf_tokenizer_text(load_tokenizer(folder)) != hf_tokenizer_text(load_tokenizer(tokenizer)):
            rule, fix = "was prepared with another tokenizer than the model's", "Give the text itself"
            raise UserError(Problem("eval-tokenizer", rule, path=one.path, fix=fix))
        return folder.resolve()
    own = str(tokenizer if tokenizer.is_file() else tokenizer / TOKENIZER_FILE)
    names_fields = (one.template or one.prompt_field or one.answer_field) is not None
    if data.template is not None and not names_fields and not _holds_conversations(data):
        data = dataclasses.replace(data, template=None, prompt_field=None, answer_field=None)
    masked = data.prompt_masking and data.template is not None
    data = dataclasses.replace(data, tokenizer=own, eval_fraction=1.0, prompt_masking=masked)
    return prepare_source(job, data, reporter, one_of_several=bool(job.data.eval)).resolve()


def _holds_conversations(data: Data) -> bool:
    """Whether a set has conversations, which the template of ``[data]`` renders; otherwise it is text."""
    from meshwright.data.first_records import starts_with_conversation  # noqa: PLC0415

    return starts_with_conversation(data.path, Path.cwd(), read_options(data, None))


def _refuse_fields(one: EvalSet, why: str) -> None:
    for key in FIELD_KEYS:
        if (value := getattr(one, key)) is not None:
            rule, where = f"has no effect: {one.path} {why}", f"data.eval.{key}"
            fix = f"Leave {where} out"
            raise UserError(Problem("data-already-prepared", rule, path=where, value=value, fix=fix))
