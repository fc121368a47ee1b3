"""Finds or prepares the data of a job: one source, or each source of a mixture."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.core.errors import Problem, UserError
from meshwright.core.files import replace_text
from meshwright.core.units import format_bytes
from meshwright.data.chat import Template
from meshwright.data.chat_templates import load_template
from meshwright.data.corpus_spec import CorpusSpec, parse_corpus_spec
from meshwright.data.dataset import TokenDataset, no_prompts
from meshwright.data.epochs import CorpusState
from meshwright.data.growth import identify_corpus
from meshwright.data.images import check_images, image_shape, looks_like_images, open_images
from meshwright.data.mixture import MixedSource, write_mixture
from meshwright.data.shards import SPLITS, ShardFolder, looks_prepared
from meshwright.data.sources import STDLIB, iter_files, locate, source_problem
from meshwright.data.tokenizer import TOKENIZER_FILE, load_tokenizer, parse_tokenizer_name
from meshwright.runs.reporter import Reporter
from meshwright.spec.hf_config import find_weights_file
from meshwright.spec.job import SYNTHETIC_IMAGES, Data, EvalSet, Job, Source
from meshwright.spec.model import DecoderModel, Model, ResNetModel
from meshwright.spec.paths import BUILTIN

if TYPE_CHECKING:
    from meshwright.data.corpus import CorpusStats, ReadOptions
    from meshwright.data.prepare import PrepareReport, Progress

PREPARATION_KEYS = (
    "eval_fraction",
    "text_field",
    "template",
    "prompt_field",
    "answer_field",
    "on_bad_records",
)
"""Keys that a job passes on to the preparation."""
FIELD_KEYS = ("text_field", "template", "prompt_field", "answer_field")
"""Keys of ``[data]`` that a source and an evaluation set may have of their own."""
DEFAULT_CACHE = ".meshwright/data"
"""Folder of prepared data, in the working folder."""


def prepare_data(job: Job, reporter: Reporter) -> Path:
    """The folder of prepared data of a job; prepares it if ``data.path`` is text.

    Raises:
        UserError: The data are missing, too short or of the wrong kind, or the vocabulary is larger than the
            model's.
    """
    if job.data.follow:
        _check_follow(job)
    if isinstance(job.model, ResNetModel):
        check_image_data(job, job.model)
        train = open_images(job.data.path, "train", image_shape(job.model), job.data.eval_fraction)
        _report_epochs(reporter, job, len(train))
        return Path(job.data.path)
    prepare = prepare_mixture if job.data.sources else prepare_source
    folder = prepare(job, job.data, reporter)
    dataset, _ = (
        TokenDataset.open(folder, split, job.data.seq_len, job.data.mask, job.data.prompt_masking)
        for split in SPLITS
    )
    dataset.load_tokenizer()  # checks that it made the shards
    _require_vocabulary(job.model, dataset.vocab_size)
    if job.data.mask == "document":
        share = dataset.padding / (len(dataset) * job.data.seq_len)
        reporter.message(
            f"data: {len(dataset)} samples of whole documents, {job.data.seq_len} tokens each, in {folder}; "
            f"{share:.1%} padding"
        )
    elif dataset.dropped_tokens:
        reporter.message(
            f"data: {len(dataset)} samples of {job.data.seq_len} tokens in {folder}; "
            f"{dataset.dropped_tokens} tokens at the ends of shards are dropped"
        )
    _report_epochs(reporter, job, len(dataset))
    return folder


def _check_follow(job: Job) -> None:
    """Only prepared folders can be followed: text that is not prepared would be read once more.

    Raises:
        UserError: The data are images, or not prepared.
    """
    paths = [source.path for source in job.data.sources] or [job.data.path]
    if not isinstance(job.model, ResNetModel) and all(looks_prepared(Path(path)) for path in paths):
        return
    rule = "needs prepared folders: what is added to text or images is not read during a run"
    fix = "Prepare the text with meshwright prepare, and use its folder; or leave data.follow out"
    raise UserError(Problem("data-follow-unprepared", rule, path="data.follow", value=True, fix=fix))


def find_corpus(job: Job, folder: Path) -> CorpusState | None:
    """What is in the prepared data of a job; None for images."""
    if isinstance(job.model, ResNetModel):
        return None
    data = job.data
    dataset = TokenDataset.open(folder, "train", data.seq_len, data.mask, data.prompt_masking)
    return identify_corpus(folder, dataset)


def prepare_source(job: Job, data: Data, reporter: Reporter, one_of_several: bool = False) -> Path:
    """The folder of prepared data of one path; prepares it if it is text.

    Args:
        job: The job, for its model.
        data: Its data, with the path.
        reporter: Receives messages.
        one_of_several: Whether it is a source of a mixture or an evaluation set: its line is a detail.
    """
    folder = Path(data.path)
    if looks_like_images(folder):
        rule, fix = "contains images; this model reads text", "Use a text corpus, or a ResNet model"
        raise UserError(Problem("data-not-for-text", rule, path=data.path, fix=fix))
    if looks_prepared(folder):
        _refuse_preparing(data)
        return folder
    name = data.tokenizer or tokenizer_name(job)
    if name is not None and parse_tokenizer_name(name).kind == "file":  # before hours of preparation
        _require_vocabulary(job.model, load_tokenizer(locate(name, Path.cwd())).vocab_size)
    return _prepare_cached(dataclasses.replace(data, tokenizer=name), reporter, one_of_several)


def prepare_mixture(job: Job, data: Data, reporter: Reporter) -> Path:
    """The folder of the mixture of a job; each source is prepared in its own folder, with one tokenizer."""
    sources = [data_of(data, source) for source in data.sources]
    prepared = [d for d in sources if looks_prepared(Path(d.path))]
    name = data.tokenizer or (None if prepared else tokenizer_name(job)) or "byte"
    if prepared:  # its tokenizer is that of the others
        name = str(Path(prepared[0].path) / TOKENIZER_FILE)
    elif parse_tokenizer_name(name).kind == "bpe":
        name = str(_train_shared_tokenizer(sources, name, data, reporter))
    folders = [
        prepare_source(job, d if d in prepared else dataclasses.replace(d, tokenizer=name), reporter, True)
        for d in sources
    ]
    tokenizers = {ShardFolder.open(folder).index.tokenizer.sha256 for folder in folders}
    if len(tokenizers) > 1:
        rule, fix = "were prepared with different tokenizers", "Prepare all with the same tokenizer"
        raise UserError(Problem("data-sources-tokenizer", rule, path="data.sources", fix=fix))
    mixed = [
        MixedSource(source.name, str(folder.resolve()), source.weight)
        for source, folder in zip(data.sources, folders, strict=True)
    ]
    digest = hashlib.sha256(repr(mixed).encode()).hexdigest()[:16]
    folder = Path(data.cache or DEFAULT_CACHE) / f"mixture-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    write_mixture(folder, mixed)
    total = sum(source.weight for source in data.sources)
    shares = ", ".join(f"{source.name} {source.weight / total:.1%}" for source in data.sources)
    reporter.message(f"data: a mixture of {shares}, in {folder}")
    return folder


def data_of(data: Data, source: Source | EvalSet) -> Data:
    """The data of a source or set: its own keys, and those of ``[data]`` for the others."""
    own = {key: value for key in FIELD_KEYS if (value := getattr(source, key)) is not None}
    if "template" in own:
        own.setdefault("text_field", None)
    elif "text_field" in own:
        own.update(template=None, prompt_field=None, answer_field=None)
    return dataclasses.replace(data, path=source.path, sources=(), eval=(), **own)


def _train_shared_tokenizer(sources: list[Data], name: str, data: Data, reporter: Reporter) -> Path:
    """Train one BPE tokenizer on all sources; cached like prepared data."""
    from meshwright.data.corpus import CorpusStats, iter_corpus  # noqa: PLC0415
    from meshwright.data.prepare import train_tokenizer  # noqa: PLC0415

    base = Path.cwd()
    if problems := [problem for d in sources if (problem := source_problem(d.path, base))]:
        raise UserError(*problems)
    templates = [load_template(d.template, base, name) if d.template else None for d in sources]
    facts = [
        (
            list_files(d.path, base),
            d.text_field,
            d.prompt_field,
            d.answer_field,
            d.on_bad_records,
            t and t.identity,
        )
        for d, t in zip(sources, templates, strict=True)
    ]
    digest = hashlib.sha256(repr((name, facts, sys.version)).encode()).hexdigest()[:16]
    folder = Path(data.cache or DEFAULT_CACHE) / f"tokenizer-{name.replace(':', '')}-{digest}"
    if (folder / TOKENIZER_FILE).is_file():
        return (folder / TOKENIZER_FILE).resolve()
    tally = CorpusStats()
    readers = [  # all at once, so that the total of the progress is known
        iter_corpus([d.path], base, options=read_options(d, template), tally=tally)
        for d, template in zip(sources, templates, strict=True)
    ]
    markers = tuple(dict.fromkeys(m for template in templates if template for m in template.markers))
    with reporter.bar(100) as show:
        progress = show_percentages(f"{len(sources)} sources", show)
        vocab_size = parse_tokenizer_name(name).vocab_size
        trained = train_tokenizer(
            chain.from_iterable(readers),
            vocab_size,
            markers,
            lambda: progress("training the tokenizer", tally),
        )
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / TOKENIZER_FILE, trained.serialized)
    return (folder / TOKENIZER_FILE).resolve()


def read_options(data: Data, template: Template | None) -> ReadOptions:
    """How the files of one source are read."""
    from meshwright.data.corpus import ReadOptions  # noqa: PLC0415

    return ReadOptions(
        data.text_field or "text",
        template,
        data.prompt_field,
        data.answer_field,
        skip_bad=data.on_bad_records == "skip",
    )


def check_image_data(job: Job, model: ResNetModel, eval_only: bool = False) -> None:
    """Check the folder of images; synthetic images have none.

    Args:
        job: With the path of the images.
        model: Its model.
        eval_only: Whether only the held-out images are read.
    """
    folder = Path(job.data.path)
    if job.data.path != SYNTHETIC_IMAGES:
        if looks_prepared(folder) or folder.is_file():
            rule = "contains text; this model reads images"
            fix = f"Use {SYNTHETIC_IMAGES}, or a folder with images.npy and labels.npy"
            raise UserError(Problem("data-not-for-images", rule, path=job.data.path, fix=fix))
        check_images(folder, image_shape(model), job.data.eval_fraction, eval_only)


def _report_epochs(reporter: Reporter, job: Job, available: int) -> None:
    samples = job.train.steps * job.train.global_batch
    if samples > available:
        reporter.message(
            f"data: {samples} samples needed, {available} available: {samples / available:.1f} epochs"
        )


def _require_vocabulary(model: Model, tokens: int) -> None:
    """Check that every token has a row in the embedding."""
    assert isinstance(model, DecoderModel), "images have no tokens"
    if tokens <= model.vocab_size:
        return
    fix = f"Use {-(-tokens // 64) * 64} (a multiple of 64) or more, or fewer tokens"
    if model.hf:
        fix = "Set data.tokenizer to the one that the model was trained with"
    rule = f"is smaller than the tokenizer's vocabulary of {tokens}"
    value = model.vocab_size
    raise UserError(Problem("model-vocab-small", rule, path="model.vocab_size", value=value, fix=fix))


def tokenizer_name(job: Job) -> str | None:
    """The job's tokenizer; else that of the model's Hugging Face folder, required if it has weights."""
    hf = job.model.hf if isinstance(job.model, DecoderModel) else None
    if job.data.tokenizer is not None or hf is None:
        return job.data.tokenizer
    folder = Path(hf)
    if (folder / TOKENIZER_FILE).is_file():
        return str(folder / TOKENIZER_FILE)
    if find_weights_file(folder) is not None:
        rule = f"has weights but no {TOKENIZER_FILE}: another tokenizer would not fit the weights"
        fix = "Set data.tokenizer to the one that the model was trained with; byte if that was bytes"
        raise UserError(Problem("model-hf-tokenizer", rule, path="model.hf", value=hf, fix=fix))
    return None


def _refuse_preparing(data: Data) -> None:
    """Refuse keys that were fixed when the folder was prepared."""
    for key in ("tokenizer", "eval_fraction", "template", "text_field"):
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


def _prepare_cached(data: Data, reporter: Reporter, one_of_several: bool) -> Path:
    """Prepare text once; the name of the cache folder is a fingerprint of the text and the settings."""
    base = Path.cwd()
    if problem := source_problem(data.path, base):
        raise UserError(problem)
    tokenizer = data.tokenizer or "byte"
    parse_tokenizer_name(tokenizer)
    if data.prompt_masking and data.template is None:  # before preparing, which may take long
        raise UserError(no_prompts("no data.template is given"))
    template = data.template and load_template(data.template, base, tokenizer)
    settings: dict[str, Any] = {"sources": [data.path], "tokenizer": tokenizer}
    for key in PREPARATION_KEYS:
        if getattr(data, key) is not None:
            settings[key] = getattr(data, key)
    folder = Path(data.cache or DEFAULT_CACHE) / _fingerprint(
        settings, base, template.identity if template else ""
    )
    if looks_prepared(folder):
        return folder
    spec = parse_corpus_spec({**settings, "out": str(folder)})
    try:
        report = prepare_in_process(spec, base, reporter)
    except UserError as error:
        if error.problems[0].code not in ("data-not-writable", "data-out-exists"):
            raise
        problems = [dataclasses.replace(p, fix="Set data.cache to a writable folder") for p in error.problems]
        raise UserError(*problems) from None
    say = reporter.detail if one_of_several and not report.quarantined else reporter.message
    say(report.describe())
    return folder


def _fingerprint(settings: dict[str, Any], base: Path, template: str) -> str:
    """A name that changes with the text, the tokenizer, the template and the split."""
    source, choice = settings["sources"][0], parse_tokenizer_name(settings["tokenizer"])
    facts: list[object] = [settings]
    if source == STDLIB:
        facts.append(sys.version)
    else:
        facts.append(list_files(source, base))
    if choice.kind == "file":
        facts.append(load_tokenizer(locate(choice.path, base)).fingerprint())
    if template:
        facts.append(template)
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    stem = "".join(c if c.isalnum() else "-" for c in Path(source.removeprefix(BUILTIN)).stem) or "corpus"
    return f"{stem}-{choice.kind}{choice.vocab_size or ''}-{digest}"


def list_files(source: str, base: Path) -> list[tuple[str, int, int]]:
    """Name, size and modification time of each file of a source."""
    return [(name, *_size_and_time(path)) for name, path in iter_files(source, base, frozenset(), _ignore)]


def _ignore(name: str, reason: str) -> None:
    """Ignore a file that cannot be listed: the preparation reports it."""


def _size_and_time(path: Path) -> tuple[int, int]:
    """Size and modification time; an unreadable file is quarantined later."""
    try:
        facts = path.stat()
    except OSError:
        return 0, 0
    return facts.st_size, facts.st_mtime_ns


def prepare_in_process(spec: CorpusSpec, base: Path, reporter: Reporter) -> PrepareReport:
    """Prepare a corpus in this process and report how far it is."""
    from meshwright.data.prepare import prepare_corpus  # noqa: PLC0415  (most data are prepared already)

    names = ", ".join(Path(source).name or source for source in spec.sources)
    with reporter.bar(100) as show:
        return prepare_corpus(spec, base, show_percentages(names, show))


def show_percentages(names: str, show: Callable[[str, int], None]) -> Progress:
    """Shows the progress of a preparation, in steps of one percent."""
    shown: tuple[str, int] | None = None

    def on_progress(phase: str, tally: CorpusStats) -> None:
        nonlocal shown
        percent = int(100 * tally.read_bytes / max(tally.total_bytes, 1))
        if (phase, percent) != shown:
            shown = phase, percent
            done = f"{tally.documents_in} documents, {format_bytes(tally.text_bytes)}"
            show(f"{phase} {percent}% of {names}: {done}", percent)

    return on_progress
