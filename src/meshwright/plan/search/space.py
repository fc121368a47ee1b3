"""All legal layouts of a job, as numpy columns.

Degrees are divisors of the number of devices; settings are crossed with them without a loop over layouts. The
rules are those of ``spec/legality/table.py`` in vectorised form; a test checks that both agree.

The space is limited further:

- Settings without effect are not repeated: one schedule with ``pp=1``, one context method with ``cp=1``.
- ``micro_batch`` divides the samples per rank, or is the smallest size with as many micro-batches as a power
  of two. ``virtual_stages`` is the smallest for each number of layers per stage, at most 8.
- ``sequence_parallel`` is on wherever ``tp`` allows it with eager blocks: the best with it is within 1% of
  the best without. Compiled and Triton blocks gain less by it: both are tried.
- ``etp`` is 1 or ``tp``: expert matrices are split like all others, or not at all.
- Schedules, ZeRO stages and axes are those that the job's runtime supports (``runtimes.py``).
- ``gpipe`` and ``dualpipe-v`` only if named: 1F1B takes as long as GPipe and never needs more memory.
- ``offload`` only on request: see ``find.py``. ``prefetch`` and ``accumulate`` keep their value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from meshwright.plan.estimate.grid import (
    CODED,
    CONTEXTS,
    OFFLOADS,
    RECOMPUTES,
    Grid,
    Ints,
)
from meshwright.plan.search.columns import Choices, Columns, count_choices, expand, keep
from meshwright.plan.search.runtimes import runtime_support
from meshwright.spec.execution import uses_eager_blocks
from meshwright.spec.job import Job
from meshwright.spec.layout import AXES, SCHEDULES, Layout
from meshwright.spec.model import DecoderModel
from meshwright.spec.numbers import divisors

CHUNK = 1 << 16
"""Layouts that are estimated at once, so that the columns stay in the CPU cache."""
MOST_VIRTUAL_STAGES = 8
"""Most virtual stages in a search; more are possible if named."""
NO_SHARDS, SHARDS_OF_SEQUENCE, SHARDS = range(3)
"""The axes that ZeRO can shard over: none, only cp, or dp_shard."""


def pinned_keys(layout: Layout, named: Sequence[str] = ()) -> dict[str, Any]:
    """The layout keys that the search must not change.

    Args:
        layout: The job's.
        named: Keys that the user wrote; keys that differ from their default are pinned, too.
    """
    found = {}
    for field in dataclasses.fields(layout):
        value = getattr(layout, field.name)
        if field.name not in ("mode", "bucket_mb", "placement") and (
            field.name in named or value != field.default
        ):
            found[field.name] = value
    return found


def world_sizes(job: Job) -> list[int]:
    """World sizes to try, largest first: divisors of the nodes, and of one node."""
    per_node = job.cluster.devices_per_node
    whole = [nodes * per_node for nodes in divisors(job.cluster.nodes)]
    return sorted({*whole, *divisors(per_node)}, reverse=True)


def _evenly(count: int, ranks: Ints) -> np.ndarray:
    """Whether heads split evenly over ranks, or are replicated evenly where there are fewer heads."""
    return np.asarray((count % ranks == 0) | (ranks % count == 0))


@cache
def micro_batch_choices(share: int) -> tuple[int, ...]:
    """Micro-batch sizes of the samples per rank, with no padding or as little as possible."""
    evened = {-(-share // -(-share // 2**power)) for power in range(share.bit_length())}
    return tuple(sorted({*divisors(share), *evened}))


@cache
def virtual_stage_choices(layers: int, pp: int) -> tuple[int, ...]:
    """Virtual stages from 2 to 8: the smallest for each number of layers in the largest stage."""
    fewest: dict[int, int] = {}
    for stages in range(2, min(layers // pp, MOST_VIRTUAL_STAGES) + 1):
        fewest.setdefault(-(-layers // (pp * stages)), stages)
    return tuple(fewest.values())


@dataclass(frozen=True)
class LayoutSpace:
    """The layouts of a job on one number of devices.

    Args:
        job: What is planned; only ``pins`` constrain its layout.
        world_size: Number of devices of every layout.
        pins: Keys with a fixed value.
        offloads: Values of ``offload`` to try.
    """

    job: Job
    world_size: int
    pins: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    offloads: tuple[str, ...] = ("none",)

    @property
    def model(self) -> DecoderModel:
        """The job's decoder."""
        assert isinstance(self.job.model, DecoderModel), "only decoders have a space of layouts"
        return self.job.model

    @cached_property
    def _degrees(self) -> tuple[Columns, int]:
        """Mesh degrees with the settings that depend only on them, and the number of illegal ones."""
        model, illegal = self.model, 0
        columns: Columns = {"rest": np.array([self.world_size], dtype=np.int64)}
        for axis in AXES[:-1]:  # dp_replicate takes what the others leave
            name = "tp" if axis == "dp_replicate" else axis
            columns = expand(columns, columns["rest"], (name,), lambda rest: [(d,) for d in divisors(rest)])
            columns["rest"] = columns["rest"] // columns[name]
        columns["dp_replicate"] = columns.pop("rest")
        legal = self._legal_degrees(columns)
        illegal += int((~legal).sum())
        columns = keep(columns, legal & self._as_pinned(columns, AXES) & self._supported_degrees(columns))
        if model.num_experts:
            columns, excluded = self._expand_experts(columns)
            illegal += excluded
        else:
            columns |= {name: np.ones_like(columns["pp"]) for name in ("ep", "etp")}
        kind = np.where(
            columns["dp_shard"] > 1, SHARDS, np.where(columns["cp"] > 1, SHARDS_OF_SEQUENCE, NO_SHARDS)
        )
        # ZeRO stage 0 with shards, stages 1 to 3 without; sequence parallelism without tp.
        illegal += int(np.array([3, 0, 1])[kind].sum()) + int((columns["tp"] == 1).sum())
        columns = expand(columns, kind, ("zero",), self._zero_choices)
        pieces = np.where(columns["tp"] > 1, columns["tp"] * columns["cp"], 1)
        columns = expand(columns, pieces, ("sequence_parallel",), self._sp_choices)
        columns = self._expand_context(columns)
        # Shuffled, so that a search that stops early has seen all kinds of layouts.
        order = np.random.default_rng(0).permutation(len(columns["pp"]))
        return keep(columns, order), illegal

    def _legal_degrees(self, columns: Columns) -> np.ndarray:
        model, tp, cp, pp = self.model, columns["tp"], columns["cp"], columns["pp"]
        legal = (model.num_heads % tp == 0) & (pp <= model.num_layers)
        legal &= self.job.data.seq_len % cp == 0
        if model.expert_layers:  # ranks of tp route equal parts of the tokens
            legal &= (tp == 1) | (self.job.data.seq_len % (tp * cp) == 0)
        if model.attention == "heads":
            legal &= _evenly(model.num_kv_heads, tp)
        if model.expert_layers < model.num_layers:
            legal &= model.ffn_size % tp == 0
        if model.expert_layers:
            legal &= (model.shared_experts * model.expert_width) % tp == 0
        return np.asarray(legal, dtype=np.bool_)

    def _as_pinned(self, columns: Columns, names: Sequence[str]) -> np.ndarray:
        kept = np.ones(len(columns["pp"]), dtype=np.bool_)
        for name in names:
            if name in self.pins:
                kept &= columns[name] == self._code(name, self.pins[name])
        return kept

    def _supported_degrees(self, columns: Columns) -> np.ndarray:
        """Axes that the runtime does not support stay at 1, unless pinned."""
        kept = np.ones(len(columns["pp"]), dtype=np.bool_)
        for name in AXES:
            if name not in runtime_support(self.job).axes and name not in self.pins:
                kept &= columns[name] == 1
        return kept

    def _code(self, name: str, value: Any) -> int:
        return CODED[name].index(value) if name in CODED else int(value)

    def _allowed(self, name: str, values: Sequence[Any]) -> list[Any]:
        if name in ("ep", "etp") and name not in runtime_support(self.job).axes and name not in self.pins:
            return [1]
        return [v for v in values if name not in self.pins or self.pins[name] == v]

    def _expand_experts(self, columns: Columns) -> tuple[Columns, int]:
        """``ep`` divides the experts, ``etp`` their width, and both together dp_shard x cp x tp."""
        model, base = self.model, self.world_size + 1
        key = columns["dp_shard"] * columns["cp"] * columns["tp"] * base + columns["tp"]
        experts = model.num_experts or 1

        def all_choices(key: int) -> Choices:
            ranks, tp = divmod(key, base)
            named = (self.pins["etp"],) if "etp" in self.pins else sorted({1, tp})
            return [(ep, etp) for etp in named if ranks % etp == 0 for ep in divisors(ranks // etp)]

        def choices(key: int) -> Choices:
            return [
                (ep, etp)
                for ep, etp in all_choices(key)
                if ep in self._allowed("ep", (ep,))
                and etp in self._allowed("etp", (etp,))
                and experts % ep == 0
                and model.expert_width % etp == 0
            ]

        grown = expand(columns, key, ("ep", "etp"), choices)
        return grown, int(count_choices(key, all_choices).sum()) - len(grown["pp"])

    def _zero_choices(self, kind: int) -> Choices:
        """ZeRO-0 has no shards; the other stages need dp_shard or cp."""
        stages = {NO_SHARDS: (0,), SHARDS_OF_SEQUENCE: (0, 1, 2, 3), SHARDS: (1, 2, 3)}[kind]
        with_1f1b = 2 if self.pins.get("accumulate") == "deferred" else 0
        with_1f1b = 3 if self.pins.get("prefetch", 1) != 1 else with_1f1b
        known = runtime_support(self.job).zeros
        return [
            (s,)
            for s in self._allowed("zero", stages)
            if s >= with_1f1b and (s in known or "zero" in self.pins)
        ]

    def _sp_choices(self, pieces: int) -> Choices:
        """Whether sequence parallelism may be on; ``pieces`` are the shards of a sequence, 1 without tp."""
        able = pieces > 1 and self.job.data.seq_len % pieces == 0
        return [(int(flag),) for flag in self._allowed("sequence_parallel", self._sp_values(able))]

    def _sp_values(self, able: bool) -> tuple[bool, ...]:
        if not able:
            return (False,)
        both = "sequence_parallel" in self.pins or not uses_eager_blocks(self.job)
        return (True, False) if both else (True,)

    def _expand_context(self, columns: Columns) -> Columns:
        """Ring attention, or Ulysses where tp x cp divides the heads; one choice without cp."""
        model, base = self.model, self.world_size + 1

        def choices(key: int) -> Choices:
            tp, cp = divmod(key, base)
            if cp == 1:
                return [(CONTEXTS.index(name),) for name in self._allowed("context", ("ring",))]
            heads = model.num_heads % (tp * cp) == 0
            if model.attention == "heads":
                heads = heads and bool(_evenly(max(model.num_kv_heads // tp, 1), np.array(cp)))
            even = self.job.data.seq_len % (2 * cp) == 0
            legal = [name for name in CONTEXTS if (even if name == "ring" else heads)]
            return [(CONTEXTS.index(name),) for name in self._allowed("context", legal)]

        return expand(columns, columns["tp"] * base + columns["cp"], ("context",), choices)

    def schedule_choices(self, key: int) -> Choices:
        """Schedules and virtual stages; ``key`` is 2 x pp, plus 1 if pp divides the micro-batches."""
        pp, in_groups = divmod(key, 2)
        named = self.pins.get("schedule")
        if pp == 1:
            found = [("1f1b", 1)] if named in (None, "1f1b") else []
        else:
            found = []
            for name in (named,) if named else runtime_support(self.job).schedules:
                if name != "interleaved":
                    found.append((name, 2 if name in ("zbv", "dualpipe-v") else 1))
                elif in_groups:
                    found += [(name, stages) for stages in self._interleaved_stages(pp)]
        layers = self.model.num_layers
        return [
            (SCHEDULES.index(name), stages)
            for name, stages in found
            if stages * pp <= layers and stages == self.pins.get("virtual_stages", stages)
        ]

    def _interleaved_stages(self, pp: int) -> Sequence[int]:
        if "virtual_stages" in self.pins:
            return [self.pins["virtual_stages"]] if self.pins["virtual_stages"] > 1 else []
        return virtual_stage_choices(self.model.num_layers, pp)

    def _micro_choices(self, share: int) -> Choices:
        pinned = self.pins.get("micro_batch")
        return [(m,) for m in ((pinned,) if pinned else micro_batch_choices(share)) if m <= share]

    @cached_property
    def _shares(self) -> Ints:
        """Samples per rank, for each row of degrees."""
        columns, _ = self._degrees
        return -(-self.job.train.global_batch // (columns["dp_replicate"] * columns["dp_shard"]))

    @cached_property
    def _memory_choices(self) -> list[tuple[int, int]]:
        """Choices of ``recompute`` and ``offload``."""
        return [
            (RECOMPUTES.index(mode), OFFLOADS.index(away))
            for mode in self._allowed("recompute", RECOMPUTES)
            for away in ([self.pins["offload"]] if "offload" in self.pins else self.offloads)
        ]

    @cached_property
    def _counts(self) -> tuple[Ints, Ints]:
        """Number of layouts of each row of degrees, without and with schedules."""
        columns, _ = self._degrees

        def whole(key: int) -> int:
            share, pp = divmod(key, self.model.num_layers + 1)
            keys = [2 * pp + int(-(-share // micro) % pp == 0) for (micro,) in self._micro_choices(share)]
            return sum(len(self.schedule_choices(k)) for k in keys)

        keys, group = np.unique(
            self._shares * (self.model.num_layers + 1) + columns["pp"], return_inverse=True
        )
        with_schedules = np.array([whole(int(key)) for key in keys], dtype=np.int64)[group]
        kept_back = len(self._memory_choices)
        return count_choices(self._shares, self._micro_choices) * kept_back, with_schedules * kept_back

    def __len__(self) -> int:
        return int(self._counts[1].sum())

    @property
    def illegal(self) -> int:
        """Number of combinations that a rule excludes."""
        return self._degrees[1]

    @property
    def has_1f1b(self) -> bool:
        """Whether the space has 1F1B with one stage per rank."""
        is_1f1b = self.pins.get("schedule", "1f1b") == "1f1b" and self.pins.get("virtual_stages", 1) == 1
        return is_1f1b and "1f1b" in runtime_support(self.job).schedules

    def chunks(self, size: int = CHUNK) -> Iterator[Chunk]:
        """The layouts in chunks of about ``size``; their schedules are still open."""
        columns, _ = self._degrees
        ends = np.cumsum(self._counts[1])
        start = 0
        while start < len(ends):
            done = ends[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, done + size, side="right")))
            rows = np.arange(start, stop)
            start = stop
            grown = expand(keep(columns, rows), self._shares[rows], ("micro_batch",), self._micro_choices)
            grown = expand(
                grown, np.zeros_like(grown["pp"]), ("recompute", "offload"), lambda _: self._memory_choices
            )
            if len(grown["pp"]):
                yield Chunk(self, grown)

    def schedule_keys(self, columns: Columns) -> Ints:
        """The key of :meth:`schedule_choices` for each row."""
        share = -(-self.job.train.global_batch // (columns["dp_replicate"] * columns["dp_shard"]))
        in_groups = -(-share // columns["micro_batch"]) % columns["pp"] == 0
        return np.asarray(2 * columns["pp"] + in_groups, dtype=np.int64)

    def grid(self, columns: Columns) -> Grid:
        """The columns as a grid, with the settings that all layouts share."""
        columns, count = dict(columns), len(columns["pp"])
        for name in ("accumulate", "prefetch"):
            value = self.pins.get(name, getattr(self.job.layout, name))
            columns[name] = np.full(count, self._code(name, value), dtype=np.int64)
        columns["backup_replicas"] = np.full(count, self.job.layout.backup_replicas, dtype=np.int64)
        columns["sequence_parallel"] = columns["sequence_parallel"].astype(np.bool_)
        return Grid(**columns)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Chunk:
    """Some layouts of a space, without schedules."""

    space: LayoutSpace
    columns: Columns

    @cached_property
    def _keys(self) -> Ints:
        return self.space.schedule_keys(self.columns)

    @property
    def sizes(self) -> Ints:
        """Number of schedules of each row."""
        return count_choices(self._keys, self.space.schedule_choices)

    def with_1f1b(self) -> Grid:
        """Each row with 1F1B and one stage per rank, the schedule that needs least memory."""
        one = np.ones_like(self.columns["pp"])
        return self.space.grid(
            {**self.columns, "schedule": one * SCHEDULES.index("1f1b"), "virtual_stages": one}
        )

    def expand_schedules(self, rows: np.ndarray | None = None) -> Grid:
        """Rows crossed with their schedules; all rows by default."""
        columns, keys = self.columns, self._keys
        if rows is not None:
            columns, keys = keep(columns, rows), keys[rows]
        return self.space.grid(
            expand(columns, keys, ("schedule", "virtual_stages"), self.space.schedule_choices)
        )
