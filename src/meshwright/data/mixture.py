"""Mixtures of sources: which source each sample of a run comes from.

The pattern of sources is periodic. In a period each source has a whole number of samples, in proportion to
its weight, so that every window of one period holds exactly these numbers. Within a period the samples of a
source are spread evenly by Tijdeman's algorithm (the chairman assignment problem, 1980): up to any position,
the number of samples of each source differs from its share by less than one. The source of a position, and
the number of its samples before it, are looked up in a table; there is no state to save.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshwright.core.errors import Problem, UserError
from meshwright.core.files import replace_text
from meshwright.data.epochs import GrowingOrder
from meshwright.data.order import SampleOrder

MIXTURE_FILE = "mixture.json"
MIXTURE_VERSION = 1
MAX_PERIOD = 65536
"""Weights that need a longer period are rounded to multiples of 1 / 65536."""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MixedSource:
    """One source of a mixture."""

    name: str
    folder: str
    """Its prepared data."""
    weight: float


def write_mixture(folder: Path, sources: Sequence[MixedSource]) -> None:
    """Write the file that makes a folder a mixture of prepared folders."""
    content = {"version": MIXTURE_VERSION, "sources": [asdict(source) for source in sources]}
    replace_text(folder / MIXTURE_FILE, json.dumps(content, indent=1))


def read_mixture(folder: Path) -> tuple[MixedSource, ...]:
    """The sources of a mixture; a prepared folder is its own and only source."""
    path = folder / MIXTURE_FILE
    if not path.exists():
        return (MixedSource("", str(folder), 1.0),)
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["version"] != MIXTURE_VERSION:
        rule = f"has version {content['version']}; this meshwright reads version {MIXTURE_VERSION}"
        fix = "Delete its folder: it is written again"
        raise UserError(Problem("data-shards-broken", rule, path=str(path), fix=fix))
    return tuple(MixedSource(**source) for source in content["sources"])


class MixturePattern:
    """The source of each position."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Build the table.

        Args:
            weights: Weights of the sources, relative to each other; at least one is above 0.
        """
        self.counts: tuple[int, ...] = tuple(_period_counts(weights))
        """Samples of each source in a period."""
        self.period = sum(self.counts)
        self._source: Int64s = np.asarray(_spread(self.counts), dtype=np.int64)
        of_source = self._source[:, None] == np.arange(len(self.counts))
        self._before: Int64s = np.cumsum(of_source, axis=0, dtype=np.int64) - of_source

    def locate(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """The source of each position, and how many samples that source had before it."""
        period, offset = np.divmod(positions, self.period)
        source = self._source[offset]
        counts = np.asarray(self.counts, dtype=np.int64)
        return source, period * counts[source] + self._before[offset, source]

    def count(self, position: int) -> list[int]:
        """Samples of each source before a position."""
        periods, offset = divmod(position, self.period)
        return [
            periods * count + int(before)
            for count, before in zip(self.counts, self._before[offset], strict=True)
        ]


def count_by_source(weights: Mapping[str, float], position: int) -> dict[str, int]:
    """Samples of each source before a position; without weights there is one source, without a name."""
    if not weights:
        return {"": position}
    return dict(zip(weights, MixturePattern(list(weights.values())).count(position), strict=True))


class MixtureOrder:
    """The sample at each position of a mixture; each source has its own order and its own epochs."""

    def __init__(self, orders: Sequence[SampleOrder | GrowingOrder], weights: Sequence[float]) -> None:
        """Fix the order.

        Args:
            orders: Order of each source; the dataset numbers the samples in this order.
            weights: Weights of the sources.
        """
        self._orders = list(orders)
        self._pattern = MixturePattern(weights)
        sizes = [order.samples_per_epoch for order in self._orders]
        self._starts = np.cumsum([0, *sizes])

    def samples_at(self, positions: npt.ArrayLike) -> Int64s:
        """The samples at many positions, in the numbering of the dataset."""
        given: Int64s = np.asarray(positions, dtype=np.int64)
        source, index = self._pattern.locate(given.reshape(-1))
        samples = np.empty_like(source)
        for number, order in enumerate(self._orders):
            chosen = source == number
            samples[chosen] = self._starts[number] + order.samples_at(index[chosen])
        return samples.reshape(given.shape)


def _period_counts(weights: Sequence[float]) -> list[int]:
    """Samples of each source in a period: exact if the period is short enough, else rounded."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    if any(weight < 0 for weight in exact) or total <= 0:
        raise ValueError(f"weights must not be negative, and one must be above 0: {list(weights)}")
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return [int(share * period) for share in shares]
    counts = [max(math.floor(share * MAX_PERIOD), int(share > 0)) for share in shares]  # no source vanishes
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i] * MAX_PERIOD, i))
    for number in by_remainder[: max(0, MAX_PERIOD - sum(counts))]:
        counts[number] += 1
    return counts


def _spread(counts: Sequence[int]) -> list[int]:
    """The source of each position of a period, by Tijdeman's algorithm in whole numbers.

    With n sources and shares s, a source may be next if its deficit, s * position minus its samples, is at
    least 1 / (2n - 2). Of these, the one is next whose deficit reaches 1 - 1 / (2n - 2) first.
    """
    period = sum(counts)
    active = [number for number, count in enumerate(counts) if count]
    if len(active) == 1:
        return active * period
    scale = 2 * len(active) - 2
    taken = dict.fromkeys(active, 0)
    order = []
    for position in range(1, period + 1):
        best, due = -1, math.inf
        for number in active:
            deficit = scale * (counts[number] * position - taken[number] * period)  # in 1 / (scale * period)
            if deficit >= period:
                left = ((scale - 1) * period - deficit) / counts[number]
                if left < due:
                    best, due = number, left
        assert best >= 0, "one of the sources has a deficit of 1 / (2n - 2)"
        order.append(best)
        taken[best] += 1
    return order
