"""Counts the in-flight micro-batches and tensors of a pp rank at each of its actions.

A row has these counts:

- for every stage of the rank, the in-flight micro-batches before their backward pass, and in a split backward
  pass those before their weight gradients, without the micro-batch of the action;
- send buffers that are still alive, tensors passed to another stage of the rank, and the receive buffer that
  is posted ahead.

Most actions of a schedule repeat a row. Each distinct row is stored once, with its first action. The memory
of a layout is this small table multiplied with its tensor sizes (``plan.memory.pipeline``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.schedule.pipeline.actions import Kind, PipelineSchedule

Ints = NDArray[np.int64]
ROUNDS = 6
"""Rounds of pp micro-batches that contain fill, a repeated steady state, and drain."""
STEADY = 4
"""Rounds after which new rows belong to the drain."""
_KINDS = tuple(Kind)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_FORWARD, _BACKWARD, _WEIGHT = (_CODES[kind] for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT))


class WeightGrads(IntEnum):
    """The gradients of a stage that exist when an action starts."""

    NONE = 0
    """No backward pass of the stage has run."""
    HALF = 1
    """A split backward pass has run its first half: gradients of experts and of the root group exist."""
    ALL = 2


class StageState(NamedTuple):
    """The state of a stage when an action of its rank starts."""

    grads: WeightGrads = WeightGrads.NONE
    in_use: bool = False
    """A forward pass has run, and a backward pass is still to run. ZeRO-2 keeps the stage unsharded."""
    after_forward: bool = False
    """Its last pass, except weight gradients, was a forward pass. ZeRO-3 has its root group unsharded."""
    unreduced: bool = False
    """Its last pass, except forward passes, was an input gradient. Its gradients are reduced with the weight
    gradients."""
    last: bool = False
    """At most one of its weight-gradient passes (full backward passes) is still to run."""


class RankState(NamedTuple):
    """An action's kind and stage, and the state of every stage of the rank."""

    kind: Kind
    stage: int
    """Index among the stages of the rank."""
    stages: tuple[StageState, ...]


@dataclass(frozen=True)
class InFlight:
    """The distinct rows of one pp rank, in the order of their first actions."""

    states: tuple[RankState, ...]
    """The distinct states."""
    state: Ints
    """For each row an index into ``states``."""
    counts: NDArray[np.int32]
    """For each row: micro-batches before backward, per stage; those before weight gradients, per stage;
    tensors sent, passed on, and about to be received."""
    micro_batch: Ints
    """Micro-batch of each row's first action."""
    split_backward: bool

    def with_more(self, added: int, steady: int) -> InFlight:
        """The rows of a step with more micro-batches in its steady state.

        Args:
            added: Number of additional micro-batches.
            steady: The first micro-batch after the steady state.
        """
        later = np.where(self.micro_batch >= steady, self.micro_batch + added, self.micro_batch)
        return replace(self, micro_batch=later)


def steady_state_from(name: str, pp: int, micro_batches: int) -> int:
    """The smallest number of micro-batches with the same rows: the steady state repeats.

    Rounds of ``pp`` micro-batches fill the pipeline, repeat, and drain it. GPipe has all of them in flight.
    """
    if name == "gpipe" or micro_batches < (ROUNDS + 1) * pp:
        return micro_batches
    return ROUNDS * pp + micro_batches % pp


class _Row(NamedTuple):
    """The actions of one rank as columns."""

    kind: Ints
    stage: Ints
    micro_batch: Ints


def count_in_flight(schedule: PipelineSchedule) -> tuple[InFlight, ...]:
    """The rows of every pp rank of a proved schedule."""
    rows = [_read_row(schedule, rank) for rank in range(schedule.pp)]
    position = np.zeros((len(_KINDS), schedule.stages, schedule.micro_batches), dtype=np.int64)
    for row in rows:
        position[row] = np.arange(len(row.kind))
    return tuple(_count_rank(schedule, rank, row, position) for rank, row in enumerate(rows))


def _read_row(schedule: PipelineSchedule, rank: int) -> _Row:
    kinds, stages, micro_batches = zip(*schedule.ranks[rank], strict=True)
    return _Row(np.array([_CODES[kind] for kind in kinds]), np.array(stages), np.array(micro_batches))


def _count_rank(schedule: PipelineSchedule, rank: int, row: _Row, position: Ints) -> InFlight:
    stages = schedule.stages_of(rank)
    local = np.searchsorted(stages, row.stage)
    split = schedule.split_backward
    states = [_encode_state(row, stage, schedule.micro_batches, split) for stage in stages]
    in_flight = _count_in_flight(row, stages, split)
    table = np.column_stack(
        [row.kind, local, *states, *in_flight, *_count_tensors(schedule, rank, row, position)]
    )
    first, _ = _find_distinct(table)
    known = 2 + len(stages)
    heads = table[first, :known]
    of_state, state = _find_distinct(heads)
    return InFlight(
        states=tuple(
            RankState(_KINDS[kind], stage, tuple(map(_decode_state, codes)))
            for kind, stage, *codes in heads[of_state].tolist()
        ),
        state=state,
        counts=table[first, known:].astype(np.int32),
        micro_batch=row.micro_batch[first],
        split_backward=schedule.split_backward,
    )


def _find_distinct(table: Ints) -> tuple[Ints, Ints]:
    """The first index of each distinct row of a table, in order; and for each row the distinct row it equals.

    It uses a dictionary of the rows' bytes: ``np.unique`` sorts the table and takes three times as long.
    """
    content, width = table.tobytes(), table.shape[1] * table.itemsize
    found: dict[bytes, int] = {}
    which = [found.setdefault(content[at : at + width], len(found)) for at in range(0, len(content), width)]
    return np.unique(which, return_index=True)[1], np.array(which)


def _encode_state(row: _Row, stage: int, micro_batches: int, split: bool) -> Ints:
    """The state of a stage at each action of its rank, as a number."""
    forward, backward, weight = _find_passes(row, stage)
    whole = weight if split else backward
    forwards, backwards, weights = map(_before, (forward, backward, whole))
    flags = (
        (forwards > 0) & (backwards < micro_batches),
        _last_is(forward, backward),
        _last_is(backward, whole) & split,
        weights >= micro_batches - 1,
    )
    code = (backwards > 0).astype(np.int64) + (weights > 0)
    for flag in flags:
        code = code * 2 + flag
    return code


def _decode_state(code: int) -> StageState:
    in_use, after_forward, unreduced, last = (bool(code >> bit & 1) for bit in (3, 2, 1, 0))
    return StageState(WeightGrads(code >> 4), in_use, after_forward, unreduced, last)


def _find_passes(row: _Row, stage: int) -> tuple[NDArray[np.bool_], ...]:
    """Masks of the stage's forward passes, backward passes and weight gradients."""
    own = row.stage == stage
    return tuple((row.kind == code) & own for code in (_FORWARD, _BACKWARD, _WEIGHT))


def _last_is(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Before each action: whether the last action of the two kinds is of kind ``one``."""
    at = np.arange(1, len(one) + 1)
    ones, others = (np.maximum.accumulate(np.append(0, at * kind))[:-1] for kind in (one, other))
    return np.asarray(ones > others)


def _count_in_flight(row: _Row, stages: tuple[int, ...], split: bool) -> list[Ints]:
    """Per stage the micro-batches before backward; then those before weight gradients."""
    forwarded, halved = [], []
    for stage in stages:
        forward, backward, weight = _find_passes(row, stage)
        forwarded.append(_before(forward) - np.cumsum(backward))
        halved.append(_before(backward) - np.cumsum(weight) if split else np.zeros_like(row.kind))
    return [*forwarded, *halved]


def _before(flags: NDArray[np.bool_]) -> Ints:
    """Number of set flags before each position."""
    return np.cumsum(flags) - flags


def _count_tensors(schedule: PipelineSchedule, rank: int, row: _Row, position: Ints) -> list[Ints]:
    """Live send buffers, tensors passed to another stage of the rank, and the receive posted ahead."""
    step = np.array([1, -1, 0])[row.kind]  # forward goes to the next stage, backward to the one before
    source, target = row.stage - step, row.stage + step
    homes = np.array([-1, *schedule.stage_ranks, -1])  # -1: no stage before the first and after the last
    sender, receiver = (np.where(step != 0, homes[stage + 1], -1) for stage in (source, target))
    received, sent = ((peer >= 0) & (peer != rank) for peer in (sender, receiver))
    at = np.arange(len(row.kind))
    handed = _before(receiver == rank) - np.cumsum(sender == rank)
    posted = at < (at[received][-1] if received.any() else -1)
    released = np.zeros(len(at) + 1, dtype=np.int64)
    for peer in np.unique(receiver[sent]).tolist():
        sends, arrivals = at[sent & (receiver == peer)], at[received & (sender == peer)]
        used = position[row.kind[sends], target[sends], row.micro_batch[sends]]
        made = position[row.kind[arrivals], source[arrivals], row.micro_batch[arrivals]]
        np.add.at(released, _find_releases(sends, used, arrivals, made, never=len(at)), 1)
    return [_before(sent) - np.cumsum(released[:-1]), handed, posted.astype(np.int64)]


def _find_releases(sends: Ints, used: Ints, arrivals: Ints, made: Ints, never: int) -> Ints:
    """When each send to a peer is released: see :func:`meshwright.schedule.pipeline.transfers.find_releases`.

    Args:
        sends: Positions of the sending actions.
        used: Positions at the peer of the actions that consume the sends.
        arrivals: Positions of the actions that consume receives from the peer, in order.
        made: Positions at the peer of the actions that produced them.
        never: Stands for a send buffer that lives until the step ends.
    """
    following = np.searchsorted(arrivals, sends, side="right")
    padded = np.append(made, np.iinfo(np.int64).max)
    early = padded[following] < used
    while early.any():
        following += early
        early = padded[following] < used
    return np.append(arrivals, never)[following]
