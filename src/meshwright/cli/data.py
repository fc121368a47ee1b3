"""Finds or prepares the data of a job, before anything is planned or written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from meshwright.cli.output import Output
from meshwright.cli.prepare import prepare_with_progress, summarise
from meshwright.core.errors import Problem, UserError
from meshwright.data.chat_templates import load_template
from meshwright.data.corpus_spec import parse_corpus_spec
from meshwright.data.dataset import TokenDataset, no_prompts
from meshwright.data.images import ImageShape, check_images, looks_like_images, open_images
from meshwright.data.shards import SPLITS, looks_prepared
from meshwright.data.sources import STDLIB, iter_files, locate, source_problem
from meshwright.data.tokenizer import TOKENIZER_FILE, load_tokenizer, parse_tokenizer_name
from meshwright.spec.hf_config import find_weights_file
from meshwright.spec.job import SYNTHETIC_IMAGES, Data, Job
from meshwright.spec.model import DecoderModel, ResNetModel


def prepare_data(output: Output, job: Job) -> Path:
    """The prepared folder that the job trains on; prepares it if the path is text.

    Raises:
        UserError: No text, too little of it, or more tokens than the model's vocabulary; images that the
            model cannot read.
    """
    if isinstance(job.model, ResNetModel):
        return _check_image_data(output, job, job.model)
    folder = Path(job.data.path)
    if looks_like_images(folder):
        rule, fix = "holds images; this model reads text", "Name text, or a ResNet"
        raise UserError(Problem("data-not-for-text", rule, path="data.path", value=job.data.path, fix=fix))
    if looks_prepared(folder):
        _refuse_preparing(job.data)
    else:
        name = _tokenizer_name(job)
        if name is not None and parse_tokenizer_name(name).kind == "file":  # known before hours of reading
            _require_vocabulary(job.model, load_tokenizer(locate(name, Path.cwd())).vocab_size)
        folder = _prepare_cached(output, dataclasses.replace(job.data, tokenizer=name))
    dataset, _ = (
        TokenDataset.open(folder, split, job.data.seq_len, job.data.mask, job.data.prompt_masking)
        for split in SPLITS
    )
    dataset.load_tokenizer()  # that it is the one which made the shards
    _require_vocabulary(job.model, dataset.vocab_size)
    if job.data.mask == "document":
        share = dataset.padding / (len(dataset) * job.data.seq_len)
        output.print(
            f"data: {len(dataset)} samples of whole documents, {job.data.seq_len} tokens each, in {folder}; "
            f"{share:.1%} of them is padding"
        )
    elif dataset.dropped_tokens:
        output.print(
            f"data: {len(dataset)} samples of {job.data.seq_len} tokens in {folder}; "
            f"{dataset.dropped_tokens} tokens at the shards' ends fill no sample and are dropped"
        )
    _say_epochs(output, job, len(dataset))
    return folder


def _check_image_data(output: Output, job: Job, model: ResNetModel) -> Path:
    """The folder of images, looked through; synthetic ones have none."""
    folder = Path(job.data.path)
    shape = ImageShape(model.channels, model.image_size, model.num_classes)
    if job.data.path != SYNTHETIC_IMAGES:
        if looks_prepared(folder) or folder.is_file():
            rule = "is text; this model reads images"
            fix = f"Use {SYNTHETIC_IMAGES}, or a folder with images.npy and labels.npy"
            problem = Problem("data-not-for-images", rule, path="data.path", value=job.data.path, fix=fix)
            raise UserError(problem)
        check_images(folder, shape, job.data.eval_fraction)
    _say_epochs(output, job, len(open_images(job.data.path, "train", shape, job.data.eval_fraction)))
    return folder


def _say_epochs(output: Output, job: Job, available: int) -> None:
    samples = job.train.steps * job.train.global_batch
    if samples > available:
        output.print(
            f"data: {samples} samples are asked for, so all are read {samples / available:.1f} times"
        )


def _require_vocabulary(model: DecoderModel, tokens: int) -> None:
    """Every token must have a row in the embedding."""
    if tokens <= model.vocab_size:
        return
    fix = f"Use {-(-tokens // 64) * 64} (a multiple of 64) or more, or fewer tokens"
    if model.hf:
        fix = "Set data.tokenizer to the one that the model was trained with"
    rule = f"is smaller than the tokenizer's vocabulary of {tokens}"
    value = model.vocab_size
    raise UserError(Problem("model-vocab-small", rule, path="model.vocab_size", value=value, fix=fix))


def _tokenizer_name(job: Job) -> str | None:
    """The tokenizer asked for; else that of the model's Hugging Face folder, which one with weights needs."""
    hf = job.model.hf if isinstance(job.model, DecoderModel) else None
    if job.data.tokenizer is not None or hf is None:
        return job.data.tokenizer
    folder = Path(hf)
    if (folder / TOKENIZER_FILE).is_file():
        return str(folder / TOKENIZER_FILE)
    if find_weights_file(folder) is not None:
        rule = f"has weights but no {TOKENIZER_FILE}: their tokens would mean something else here"
        fix = "Set data.tokenizer to the one that the model was trained with; byte if that was bytes"
        raise UserError(Problem("model-hf-tokenizer", rule, path="model.hf", value=hf, fix=fix))
    return None


def _refuse_preparing(data: Data) -> None:
    """What was decided when the folder was prepared cannot be set again."""
    for key in ("tokenizer", "eval_fraction", "template"):
        value = getattr(data, key)
        if value is not None:
            rule = f"has no effect: data.path={data.path} is already prepared"
            raise UserError(
                Problem(
                    "data-already-prepared",
                    rule,
                    path=f"data.{key}",
                    value=value,
                    fix=f"Leave data.{key} out",
                )
            )


def _prepare_cached(output: Output, data: Data) -> Path:
    """Prepare text once; the folder's name stands for the text and how it was prepared."""
    base = Path.cwd()
    if problem := source_problem(data.path, base):
        raise UserError(problem)
    tokenizer = data.tokenizer or "byte"
    parse_tokenizer_name(tokenizer)
    if data.prompt_masking and data.template is None:  # said before the text is prepared, which may take long
        raise UserError(no_prompts("no data.template is given"))
    template = data.template and load_template(data.template, base, tokenizer)
    settings: dict[str, Any] = {"sources": [data.path], "tokenizer": tokenizer}
    for key in ("eval_fraction", "template", "prompt_field", "answer_field"):
        if getattr(data, key) is not None:
            settings[key] = getattr(data, key)
    folder = Path(data.cache) / _fingerprint(settings, base, template.identity if template else "")
    if looks_prepared(folder):
        return folder
    spec = parse_corpus_spec({**settings, "out": str(folder)})
    try:
        report = prepare_with_progress(output, spec, base)
    except UserError as error:
        if error.problems[0].code not in ("data-not-writable", "data-out-exists"):
            raise
        problems = [
            dataclasses.replace(p, fix="Set data.cache to a folder that can be") for p in error.problems
        ]
        raise UserError(*problems) from None
    output.print(summarise(report))
    return folder


def _fingerprint(settings: dict[str, Any], base: Path, template: str) -> str:
    """A name that changes when the text, the tokenizer, the template or the split may have changed."""
    source, choice = settings["sources"][0], parse_tokenizer_name(settings["tokenizer"])
    facts: list[object] = [settings]
    if source == STDLIB:
        facts.append(sys.version)
    else:
        files = iter_files(source, base, frozenset(), lambda *_: None)
        facts.append([(name, *_size_and_time(path)) for name, path in files])
    if choice.kind == "file":
        facts.append(load_tokenizer(locate(choice.path, base)).fingerprint())
    if template:
        facts.append(template)
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    stem = "".join(c if c.isalnum() else "-" for c in Path(source.removeprefix("builtin:")).stem) or "corpus"
    return f"{stem}-{choice.kind}{choice.vocab_size or ''}-{digest}"


def _size_and_time(path: Path) -> tuple[int, int]:
    """What changes with a file's content; a file that cannot be looked at is quarantined later."""
    try:
        facts = path.stat()
    except OSError:
        return 0, 0
    return facts.st_size, facts.st_mtime_ns
