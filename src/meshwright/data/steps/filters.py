"""Filters documents by length, character shares, repetition and language.

The rules are those of Gopher (Rae et al., 2021, appendix A1) with thresholds of one's own. Counts are sums
over the pieces of a text; a line is repeated if it occurs before in the same piece.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

Count = Annotated[int, Field(ge=0, strict=True)]
Share = Annotated[float, Field(ge=0, le=1, strict=True)]

_FREQUENT = {
    "de": "der die das und ist nicht ein eine zu mit den von im auf für sich",
    "en": "the of and to in is that it for was on are with as be this by",
    "es": "el la los las de que y en un una es por con para no se del",
    "fr": "le la les de des et est un une que dans pour pas qui sur au",
    "it": "il la di che e un una per non con sono del della dei nel",
    "pt": "o a os as de que e um uma em para com não se do da por",
}
STOP_WORDS = {name: frozenset(words.split()) for name, words in _FREQUENT.items()}
"""Frequent words by language: the share of a text's words that they are is a language's score."""

_SYMBOL = re.compile(r"[^\w\s]")
_LETTER = re.compile(r"[^\W\d_]")


@dataclass(frozen=True)
class FilterSpec:
    """``[filter]`` of a CORPUS.toml. A rule that is left out drops nothing."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    min_characters: Count = 0
    """Fewest characters."""
    max_characters: Count | None = None
    """Most characters."""
    min_words: Count = 0
    """Fewest words; a word is what ``str.split()`` gives."""
    min_letters: Share = 0.0
    """Smallest share of characters, without white space, that are letters."""
    max_symbols: Share = 1.0
    """Largest share of characters, without white space, that are neither letters, digits nor ``_``."""
    max_repeated_lines: Share = 1.0
    """Largest share of lines that occurred before in the document."""
    max_top_word: Share = 1.0
    """Largest share of words that are the most frequent word."""
    languages: tuple[str, ...] = ()
    """Languages to keep, by their frequent words: de, en, es, fr, it, pt. Empty: all."""
    min_stop_words: Share = 0.02
    """Smallest share of frequent words for a language to be recognised; with ``languages`` only."""


@dataclass
class TextCounts:
    """Counts over the pieces of one text."""

    characters: int = 0
    visible: int = 0
    letters: int = 0
    symbols: int = 0
    words: int = 0
    lines: int = 0
    repeated_lines: int = 0
    _word_counts: Counter[str] = field(default_factory=Counter)

    def add(self, piece: str) -> None:
        """Count one piece."""
        words = piece.split()
        lines = [line for line in piece.split("\n") if line.strip()]
        self.characters += len(piece)
        self.visible += sum(map(len, words))
        self.letters += len(_LETTER.findall(piece))
        self.symbols += len(_SYMBOL.findall(piece))
        self.words += len(words)
        self.lines += len(lines)
        self.repeated_lines += len(lines) - len(set(lines))
        self._word_counts.update(words)

    @property
    def top_word(self) -> int:
        """How often the most frequent word occurs."""
        return max(self._word_counts.values(), default=0)

    def language(self, least: float) -> str | None:
        """The language with the largest share of frequent words, the first by name of equal ones."""
        scores = {
            name: sum(self._word_counts[word] + self._word_counts[word.capitalize()] for word in frequent)
            for name, frequent in STOP_WORDS.items()
        }
        best = max(sorted(scores), key=scores.__getitem__)
        return best if self.words and scores[best] >= least * self.words else None


def failed_rule(counts: TextCounts, spec: FilterSpec) -> str | None:
    """The first rule that a text breaks; None if it is kept."""
    visible, words, lines = max(counts.visible, 1), max(counts.words, 1), max(counts.lines, 1)
    rules = {
        "min_characters": counts.characters < spec.min_characters,
        "max_characters": spec.max_characters is not None and counts.characters > spec.max_characters,
        "min_words": counts.words < spec.min_words,
        "min_letters": counts.letters < spec.min_letters * visible,
        "max_symbols": counts.symbols > spec.max_symbols * visible,
        "max_repeated_lines": counts.repeated_lines > spec.max_repeated_lines * lines,
        "max_top_word": counts.top_word > spec.max_top_word * words,
        "languages": bool(spec.languages) and counts.language(spec.min_stop_words) not in spec.languages,
    }
    return next((rule for rule, broken in rules.items() if broken), None)


def unknown_languages(spec: dict[str, Any]) -> list[str]:
    """Languages of a ``[filter]`` table that have no list of frequent words."""
    named = spec.get("languages", ())
    return [name for name in named if isinstance(name, str) and name not in STOP_WORDS]


def describe_rules(spec: FilterSpec | None) -> str:
    """The rules that are set, as ``key=value``."""
    set_rules = {} if spec is None else {one.name: getattr(spec, one.name) for one in fields(spec)}
    defaults = FilterSpec()
    return ", ".join(f"{key}={value}" for key, value in set_rules.items() if value != getattr(defaults, key))


FILTER_KEYS = tuple(entry.name for entry in fields(FilterSpec))
