"""Closed forms for time and peak memory of pipeline schedules, vectorised for the planner's search.

Every argument of the public functions may be a number or an array; they broadcast together, including the
schedule (a name, an array of names, or an array of :data:`CODES`). All stages take equal times. Tests compare
the forms with the walked schedule (``walk.py``).

Legend: p ranks, v stages per rank, m micro-batches; f, b, w seconds per stage and micro-batch (forward, input
gradient, weight gradients), g = b + w, c = f + g; t seconds of a transfer to the next rank.

Sources: GPipe and 1F1B (p - 1) / m and interleaving's 1 / v of it, Narayanan et al. 2021; the zero-bubble
forms, Qi et al. 2023. The terms for transfers and unequal f, b, w are the longest paths through the
walked schedules.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.spec.layout import SCHEDULES

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CODES = {name: code for code, name in enumerate(SCHEDULES)}
"""Schedules as integers, for arrays."""


def pipeline_time(
    schedule: ArrayLike,
    pp: ArrayLike,
    virtual_stages: ArrayLike,
    micro_batches: ArrayLike,
    forward_s: ArrayLike,
    backward_input_s: ArrayLike,
    backward_weight_s: ArrayLike,
    transfer_s: ArrayLike = 0.0,
    overlap: ArrayLike = True,
    slowest_s: ArrayLike | None = None,
) -> Floats:
    """Seconds of a step, from the first action to the last.

    Args:
        schedule: Names, or :data:`CODES`.
        pp: Ranks.
        virtual_stages: Stages per rank, for ``interleaved``; V-shaped schedules have 2, others 1.
        micro_batches: Micro-batches of one step; for ``interleaved`` a multiple of ``pp``, for
            ``dualpipe-v`` 2 ``pp`` or more.
        forward_s: Forward pass of one micro-batch in one stage (1 / v of a rank), mean over the stages.
        backward_input_s: Input gradient, likewise.
        backward_weight_s: Weight gradients, likewise; a full backward pass takes the sum of both.
        transfer_s: Transfer of one micro-batch's activations or gradients to the next rank.
        overlap: Whether the sender computes during a transfer. Without it every transfer of the busiest rank
            is exposed. With it those of fill and drain are. 1F1B also exposes up to 2 t per micro-batch in
            its steady state, because the waiting rank has no other action to run. The others hide them
            there: interleaved while t <= min(f, g), ZB-H1 while t <= w / 2, ZBV while t <= w + min(f, b).
        slowest_s: Compute time of the slowest rank per micro-batch, over all its stages. If it is above the
            mean, v c, it limits the steady state. Exact for GPipe, and for 1F1B with a slow last stage;
            slightly too high if the slow stage comes earlier.

    Returns:
        Seconds, of the broadcast shape; a 0-d array for numbers.
    """
    code = encode(schedule)
    p, v, m = (np.asarray(a, dtype=np.int64) for a in (pp, virtual_stages, micro_batches))
    f, b, w, t = (
        np.asarray(a, dtype=np.float64) for a in (forward_s, backward_input_s, backward_weight_s, transfer_s)
    )
    v = _stages_per_rank(code, v)
    hidden = np.asarray(overlap, dtype=bool)
    forms = (
        _gpipe(p, m, f, b + w, t, hidden),
        _1f1b(p, m, f, b + w, t, hidden),
        _interleaved(p, v, m, f, b + w, t, hidden),
        _zb_h1(p, m, f, b, w, t, hidden),
        _zbv(p, m, f, b, w, t, hidden),
        _dualpipe_v(p, m, f, b, w, t, hidden),
    )
    seconds = _choose(code, forms)
    if slowest_s is not None:
        excess = np.asarray(slowest_s, dtype=np.float64) - v * (f + b + w)
        seconds = seconds + (m - 1) * np.maximum(0.0, excess)
    return np.asarray(seconds, dtype=np.float64)


def peak_in_flight(
    schedule: ArrayLike,
    stage_rank: ArrayLike,
    pp: ArrayLike,
    virtual_stages: ArrayLike,
    micro_batches: ArrayLike,
) -> Ints:
    """Peak in-flight activations of a rank, each of one stage (1 / v of the rank) and micro-batch.

    An activation lives from the start of its forward pass to the end of its backward pass; in a split
    backward pass to the end of W, which reads it.

    Args:
        schedule: Names, or :data:`CODES`.
        stage_rank: The rank, 0 to pp - 1.
        pp: Ranks.
        virtual_stages: Stages per rank, for ``interleaved``; V-shaped schedules have 2, others 1.
        micro_batches: Micro-batches of one step.

    Returns:
        Counts, of the broadcast shape.
    """
    code = encode(schedule)
    r, p, v, m = (np.asarray(a, dtype=np.int64) for a in (stage_rank, pp, virtual_stages, micro_batches))
    forms = (
        m + 0 * (r + p),
        np.minimum(m, p - r),
        np.minimum(m * v, 2 * (p - r - 1) + (v - 1) * p + 1),
        np.minimum(m, p) + 0 * r,
        np.minimum(np.minimum(2 * m, 2 * p), m + r + 1),
        np.minimum(2 * m, 2 * p + 1) + 0 * r,
    )
    return np.asarray(_choose(code, forms), dtype=np.int64)


def encode(schedule: ArrayLike) -> Ints:
    """Schedules as :data:`CODES`, from names or from codes."""
    given = np.asarray(schedule)
    if given.dtype.kind in "iu":
        if given.size and not (given.min() >= 0 and given.max() < len(SCHEDULES)):
            raise ValueError(f"a schedule code is not in 0 to {len(SCHEDULES) - 1}: {', '.join(SCHEDULES)}")
        return given.astype(np.int64)
    names, inverse = np.unique(given.astype(str), return_inverse=True)
    unknown = [str(name) for name in names if name not in CODES]
    if unknown:
        raise ValueError(f"no closed form for {', '.join(unknown)}; there are {', '.join(SCHEDULES)}")
    codes = np.array([CODES[str(name)] for name in names], dtype=np.int64)
    return np.asarray(codes[inverse].reshape(given.shape), dtype=np.int64)


def _stages_per_rank(schedule: Ints, given: Ints) -> Ints:
    """Stages per rank: as given for ``interleaved``, fixed for the others."""
    own = np.where((schedule == CODES["zbv"]) | (schedule == CODES["dualpipe-v"]), 2, 1)
    return np.where(schedule == CODES["interleaved"], given, own)


def _choose(schedule: Ints, forms: tuple[Any, ...]) -> Any:
    """The form of each element's schedule."""
    which, *each = np.broadcast_arrays(schedule, *forms)
    return np.select([which == n for n in range(len(each))], each)


def _gpipe(p: Ints, m: Ints, f: Floats, g: Floats, t: Floats, hidden: NDArray[np.bool_]) -> Any:
    """(m + p - 1) (f + g): fill and drain once. Without overlap a rank waits for each of its sends."""
    sends = 2 * (p - 1) + np.where(hidden | (p == 1), 0, 2 * (m - 1))
    return (m + p - 1) * (f + g) + sends * t


def _1f1b(p: Ints, m: Ints, f: Floats, g: Floats, t: Floats, hidden: NDArray[np.bool_]) -> Any:
    """GPipe's time, and exposed transfers.

    Rank 0 has at most p in-flight micro-batches, so every p of them wait for a round trip. A path down k
    ranks and back takes 2 k transfers and advances the pipeline by k + 1 micro-batches: ceil(m / p) full
    round trips, and a shorter one for the rest.
    """
    trips = (p - 1) * -(-m // p) + np.maximum(0, (m - 1) % p - 1)
    waits = np.where(p == 2, (m - 1), 2 * (m - 1) - (m > 1))
    sends = np.where(hidden, 2 * trips, 2 * (p - 1) + waits)
    return (m + p - 1) * (f + g) + np.where(p == 1, 0, sends) * t


def _interleaved(
    p: Ints, v: Ints, m: Ints, f: Floats, g: Floats, t: Floats, hidden: NDArray[np.bool_]
) -> Any:
    """(m v + p - 1) (f + g): 1F1B's bubble with stages that are v times shorter.

    With overlap, the transfers of the first micro-batch through all p v stages and of the last one back are
    exposed; in between a rank has other stages to run, unless a transfer takes longer than a stage. Without
    overlap, the first and last rank send 2 v - 1 times per micro-batch and hide one wait; ranks between them
    send 2 v times and become the bottleneck.
    """
    c = f + g
    long = (v - 1) * np.maximum(0, m - p) * np.maximum(0, t - np.minimum(f, g))
    longer = m * (p - 1) // (2 * p) * np.maximum(0, 2 * t - c)
    shown = (m * v + p - 1) * c + (2 * (p * v - 1) * t + long + longer) * (p > 1)
    ends = (m * v + p - 1) * c + (2 * m * v - m + 2 * p - 3) * t * (p > 1)
    drain = np.maximum(np.abs(g - f) + 2 * (p - 3) * t, (2 * p - 5) * t)
    middle = m * v * (c + 2 * t) + (p - 2) * c + drain
    return np.where(hidden, shown, np.where(p < 3, ends, np.maximum(ends, middle)))


def _zb_h1(p: Ints, m: Ints, f: Floats, b: Floats, w: Floats, t: Floats, hidden: NDArray[np.bool_]) -> Any:
    """Is m c + (p - 1) max(f, b, f + b - w): p - 1 weight gradients fill the final bubble of 1F1B."""
    ends, most = m + p - 1, np.maximum(m, p)
    paths = (
        (ends, ends, np.maximum(1, m - p + 1), 4 * (p - 1) * (m >= p)),
        (ends, most, m, np.where(m >= p, 3 * (p - 1), (p + m + 1) * (m > 1))),
        (most, ends, m, 2 * (p - 1)),
    )
    free = _longest(paths, f, b, w, t * hidden)
    # A transfer longer than w / 2 is not hidden: as in 1F1B, with the weight gradient of each round trip.
    bound = _1f1b(p, m, f, b, t * hidden, np.asarray(True)) + -(-m // p) * w
    waits = np.where(hidden | (p == 1), 0, np.where(p == 2, m + 1, 2 * m + 2 * p - 5))
    return np.maximum(free, bound) + waits * t


def _zbv(p: Ints, m: Ints, f: Floats, b: Floats, w: Floats, t: Floats, hidden: NDArray[np.bool_]) -> Any:
    """Is 2 m c + (p - 1) f for f = b = w: only the last rank waits for its first micro-batch.

    If f, b and w differ, it is the longest of eight paths, and of two more with fewer than 2 (p - 1)
    micro-batches, which do not reach the steady state. It is exact without transfers from there on.
    """
    k, few = 2 * m, np.maximum(0, 2 * (p - 1) - m)
    many = m > p
    paths = (
        (k, k + p - 1, k, 5 * p - 7),
        (k + 2 * p - 3, k - p + 2, k, 3 * p - 5),
        (k + few, k + 1, k + p - 2, 3 * p - 3),
        (k + 1 + few, k, k + p - 2, 3 * p - 5),
        (k, (k + 2 * p - 2) * many, (k - 2 * p + 2) * many, 6 * p - 8),
        (k + 2 * p - 2, k - p + 1, k - 1, 3 * p - 3),
        (k + p - 2, k + 1, k, 5 * p - 7),
        ((k + p - 1) * many, (k + p - 1) * many, (k - 2 * p + 1) * many, 6 * p - 6),
        ((2 * p + m - 1) * (m < p), 2 * p, k, 2 * (2 * p - 1) - 2 * m),
        ((2 * p + m - 2) * (m <= p), 2 * p + m, m, 4 * p - 4),
    )
    long = np.maximum(0, k * (p - 1) // p - 2 * p) * np.maximum(0, t - w - np.minimum(f, b))
    waits = np.where(hidden, long, np.where(p == 2, k + 2, 2 * k + p - 3) * t)
    return np.where(p == 1, k * (f + b + w), _longest(paths, f, b, w, t * hidden) + waits)


def _dualpipe_v(
    p: Ints, m: Ints, f: Floats, b: Floats, w: Floats, t: Floats, hidden: NDArray[np.bool_]
) -> Any:
    """Is 2 m c + (p - 1) max(f, f + b - w, ...): the longest of seven paths, exact without transfers.

    Two more paths are for transfers longer than a pass: every p micro-batches wait for a round trip.
    """
    q, k, deep = p - 1, 2 * m, 2 * ((p - 1) // 4)
    trips = k // np.maximum(p, 1)
    paths = (
        (k + q, k, k, 3 * q // 2),
        (k + 2 * q, k - q, k - q, 2 * q),
        (k - 1, k + 2 * q, k - q, 4 * q + deep),
        (k - 1, k + q, k, 7 * q // 2),
        (k + q, k + q, k - q, 2 * q + deep),
        (k + 2 * q, k, k - 2 * q - 1, 4 * q),
        (k + 2 * q - 1, k + 1, k - 2 * q + 1, 4 * q - 2),
        (k - 1, k + 2 * q, k - 2 * q - 1, 6 * q),
        (trips + 2 * p - 1, k + 2 * q, trips + 1, k - trips + 4 * q - 2),
    )
    # Ranks that wait for their sends: the first and last send twice per micro-batch, the others four times.
    between = (
        (k + q - 1, k, k, 2 * k + q - 1),
        (k, k + q - 1, k, 2 * k + q - 2),
        (k, k + 2 * q - 1, k - q, 2 * k + q + 1),
        (k + q - 1, k + q, k - q, 2 * k + q + 1),
    )
    at_ends = _longest(paths[:7], f, b, w, t) + k * t
    waits = np.where(p < 3, at_ends, np.maximum(at_ends, _longest(between, f, b, w, t)))
    return np.where(p == 1, k * (f + b + w), np.where(hidden, _longest(paths, f, b, w, t), waits))


def _longest(paths: tuple[tuple[Any, ...], ...], f: Floats, b: Floats, w: Floats, t: Floats) -> Any:
    """The longest path; each has a number of forward, input and weight passes and of transfers."""
    lengths = [n[0] * f + n[1] * b + n[2] * w + n[3] * t for n in paths]
    return np.maximum.reduce(np.broadcast_arrays(*lengths))
