"""``CORPUS.toml``: the corpus to prepare. All mistakes are reported at once."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from meshwright.core.errors import Problem, UserError
from meshwright.data.shards import SHARD_TOKENS
from meshwright.data.steps.filters import FILTER_KEYS, STOP_WORDS, FilterSpec, unknown_languages
from meshwright.data.tokenizer import parse_tokenizer_name
from meshwright.spec.fields import Flag

# Strict: a quoted number or truth value is a mistake, because TOML has types.
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$", strict=True)]


def _check_not_empty(sources: tuple[str, ...]) -> tuple[str, ...]:
    # Not min_length: pydantic would then report only the length when the items are bad.
    if not sources:
        raise PydanticCustomError("no_sources", "Input should name at least one source")
    return sources


def _check_fraction(fraction: float) -> float:
    if fraction > 0.5 and fraction != 1:
        raise PydanticCustomError("eval_fraction", "Input should be at most 0.5, or 1 for an evaluation set")
    return fraction


@dataclass(frozen=True)
class CorpusSpec:
    """A corpus to prepare. Paths are relative to the folder of the file."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    sources: Annotated[tuple[Text, ...], AfterValidator(_check_not_empty)]
    """Files, folders, globs or ``builtin:python-stdlib``, read in this order."""
    out: Text
    """Folder for the prepared data; an earlier one is replaced."""
    tokenizer: Text = "byte"
    """``byte``, ``bpe:4096`` (trained on this corpus), or the path of a ``tokenizer.json`` or its folder."""
    eval_fraction: Annotated[float, Field(gt=0, strict=True), AfterValidator(_check_fraction)] = 0.01
    """Fraction of the documents held out for evaluation, at most 0.5; 1 for an evaluation set."""
    text_field: Text = "text"
    """Field of a record with the text, without a template."""
    template: Text | None = None
    """Chat template of instruction data: built in, ``tokenizer``, or a path; see ``chat_templates``."""
    prompt_field: Text | None = None
    """Field of a record with the prompt; the usual names if left out, see ``chat``."""
    answer_field: Text | None = None
    """Field of a record with the answer; the usual names if left out."""
    on_bad_records: Literal["error", "skip"] = "skip"
    """What to do with a file or record that cannot be read: ``skip`` counts and names it."""
    shard_tokens: Annotated[int, Field(ge=1, le=2**40, strict=True)] = SHARD_TOKENS
    """Maximum tokens per shard, unless one document is longer."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    """Seed of the split (which documents are held out) and of the shuffle."""
    normalize: Flag = False
    """Normalise text: Unicode NFC, line feeds, no control characters, no spaces at the end of a line."""
    filter: FilterSpec | None = None
    """Rules that drop documents; see ``steps.filters``."""
    near_duplicates: Flag = False
    """Drop a document that shares a MinHash band with an earlier one; see ``steps.near_duplicates``."""
    shuffle: Flag = False
    """Order the documents by a keyed hash of their text, not as they were read."""


_SPEC: TypeAdapter[CorpusSpec] = TypeAdapter(CorpusSpec)


def load_corpus_spec(path: Path) -> CorpusSpec:
    """Read and check a ``CORPUS.toml``.

    Raises:
        UserError: It cannot be read, or has mistakes; one problem each.
    """
    try:
        content = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise UserError(
            Problem(
                code="corpus-unreadable",
                path=str(path),
                rule=f"cannot be read: {error.strerror or error}",
                fix="Give a CORPUS.toml with at least sources and out",
            )
        ) from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise UserError(
            Problem(
                code="corpus-bad-toml", path=str(path), rule=f"is not TOML: {error}", fix="Correct its syntax"
            )
        ) from error
    return parse_corpus_spec(content, path.name)


def parse_corpus_spec(content: dict[str, Any], file_name: str = "CORPUS.toml") -> CorpusSpec:
    """Check the content of a ``CORPUS.toml``, which errors call by its name; see :func:`load_corpus_spec`."""
    problems: list[Problem] = []
    spec: CorpusSpec | None = None
    try:
        spec = _SPEC.validate_python(content)
    except ValidationError as error:
        problems += [_problem(dict(detail), file_name) for detail in error.errors()]
    if isinstance(name := content.get("tokenizer"), str) and name:
        try:
            parse_tokenizer_name(name, key="tokenizer")
        except UserError as error:
            problems += error.problems
    problems += _fields_without_use(content)
    if isinstance(rules := content.get("filter"), dict) and (unknown := unknown_languages(rules)):
        fix = f"Use {', '.join(sorted(STOP_WORDS))}"
        problems.append(
            Problem(
                "corpus-language", "is not recognised", path="filter.languages", value=unknown[0], fix=fix
            )
        )
    if problems or spec is None:
        raise UserError(*problems)
    return spec


def _fields_without_use(content: dict[str, Any]) -> list[Problem]:
    """Fields without effect because of the template."""
    idle = ("text_field", "normalize") if "template" in content else ("prompt_field", "answer_field")
    needs = "with a template" if "template" in content else "without a template"
    fix = "Leave it out" if "template" in content else 'Add, for example, template = "chatml"'
    return [
        Problem("corpus-idle-key", f"has no effect {needs}", path=key, value=content[key], fix=fix)
        for key in idle
        if key in content
    ]


def _problem(detail: dict[str, Any], name: str) -> Problem:
    """A problem from one of pydantic's error details."""
    path = ".".join(map(str, detail["loc"]))
    in_filter = path.startswith("filter.")
    known = [f"filter.{key}" for key in FILTER_KEYS] if in_filter else [f.name for f in fields(CorpusSpec)]
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        near = difflib.get_close_matches(path, known, n=1)
        fix = f"Did you mean {near[0]}?" if near else f"The keys are {', '.join(known)}"
        return Problem("corpus-unknown-key", f"Unknown key {path} in {name}", path=path, fix=fix)
    if detail["type"] in ("missing", "missing_argument"):
        fix = {
            "sources": 'Add, for example, sources = ["builtin:python-stdlib"]',
            "out": 'Add, for example, out = "prepared"',
        }[path]
        return Problem(code="corpus-missing-key", path=path, rule=f"is missing from {name}", fix=fix)
    message = re.sub(r"^\w+ should ", "", str(detail["msg"]))
    if detail["type"] == "tuple_type":
        message = 'be a list, such as ["text/"]'
    return Problem(
        code="corpus-bad-value", path=path, value=detail["input"], rule=f"is not valid: it should {message}"
    )
