"""Which of the library's algorithms computes each product of a step: the one that lasts best on this GPU.

A GPU under load keeps to its power: an H200 lowers its clock from 1.98 to 1.5 GHz when products last. What is
fastest for a moment is not what takes the least energy, and in a step it is energy that counts. So the
algorithms that cuBLASLt proposes for a shape run one after the other without a pause, each long enough for
the clock to follow, the best of them and torch's own once more in turn. What won is kept in a file, for one
kind of GPU and one version of the library, and a later run of the same shapes begins at once.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshwright.core.events import EventWriter
from meshwright.core.files import replace_text
from meshwright.layout.gemms import KINDS, is_scaled, list_linears
from meshwright.measure.elapsed import count_calls, elapsed_s
from meshwright.models.dtypes import LOW_PRECISION
from meshwright.models.kernels import gemm as chosen
from meshwright.models.kernels.cublas import ALGORITHM_BYTES, CublasError, Multiplier, Shape, library_version
from meshwright.spec.execution import narrows_gradients, races_products
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

WARM_S = 1.0
"""Until a GPU that did nothing has come to its power."""
SETTLE_S, HEAT_S = 0.04, 0.08
"""How long an algorithm runs before it is timed, and while it is."""
GLANCE_S = 0.01
"""A first look, after which the slow ones are left out."""
TOO_SLOW = 1.08
FINALISTS, ROUNDS = 2, 2
LEAST_GAIN = 0.005
"""Less is noise, and torch's own stays: two heats of one algorithm are within 1% of each other."""
LARGEST_ERROR = 5e-3
"""Of a product, over its size: operands are of 16 bits, and sums are in another order."""
FILE_VERSION = 2
NOTHING_RACES = "only 16-bit products between our own kernels race, on a GPU (docs/one-gpu.md)"

Racer = TypeVar("Racer")


@dataclass(frozen=True)
class Winner:
    """What is kept of a race."""

    algorithm: bytes | None
    """None for torch's own."""
    gain: float
    """Of torch's time, what it saves."""


def choose_products(job: Job, device: torch.device, events: EventWriter) -> None:
    """Choose an algorithm for each 16-bit product of a job's step on a rank's GPU, where they race.

    Args:
        job: Of any kind.
        device: The rank's; a GPU is the current one.
        events: Told how a race went.
    """
    chosen.choose({}, device)  # not what another job has chosen
    if races_products(job):
        _race_products(job, device, events)
    elif job.train.products == "raced":
        events.write("no_race", reason=NOTHING_RACES)


def _race_products(job: Job, device: torch.device, events: EventWriter) -> None:
    started, file = time.perf_counter(), find_file()
    shapes = count_shapes(job)
    kept = read_winners(file).items()
    known = {shape: winner for shape, winner in kept if shape in shapes and _still_right(shape, winner)}
    missing = [shape for shape in shapes if shape not in known]
    if missing:
        events.write("racing", products=len(missing))
        _warm_up(missing[0])
    for shape in missing:
        try:
            known[shape] = _race(shape)
            write_winners(file, {shape: known[shape]})  # an interrupted race goes on where it was
        except torch.OutOfMemoryError:  # torch's own needs less
            known[shape] = Winner(None, 0.0)
        torch.cuda.empty_cache()
    others = {shape: winner.algorithm for shape, winner in known.items() if winner.algorithm is not None}
    chosen.choose({shape: _by(shape, algorithm) for shape, algorithm in others.items()}, device)
    events.write(
        "products",
        raced=len(missing),
        known=len(shapes) - len(missing),
        changed=len(others),
        gain=weigh_gain(known, shapes),
        seconds=time.perf_counter() - started,
        file=None if file is None else str(file),
    )


def count_shapes(job: Job) -> dict[Shape, int]:
    """The 16-bit products of a micro-batch, and how often it has each."""
    assert isinstance(job.model, DecoderModel), "our own kernels are a decoder's"
    low, found = LOW_PRECISION[job.train.precision], Counter[Shape]()
    for linear in list_linears(job, job.model, 1):
        for kind in KINDS:  # a head's gradient is a sum over chunks, in float32
            narrow = kind == "weight" and linear.again and narrows_gradients(job)
            if not is_scaled(job, linear, kind):
                shape = Shape(kind, low, linear.rows, linear.depth, linear.columns, narrow)
                found[shape] += linear.times
    return dict(found)


def weigh_gain(winners: dict[Shape, Winner], times: dict[Shape, int]) -> float:
    """What all winners save of the time of all products, if those take as long as they have FLOPs."""
    work = {s: count * s.tokens * s.inputs * s.outputs for s, count in times.items()}
    return sum(work[shape] * winners[shape].gain for shape in work) / sum(work.values())


def _by(shape: Shape, algorithm: bytes) -> chosen.Algorithm:
    """Products of a shape by an algorithm."""
    return functools.partial(Multiplier(shape).run, algorithm)


def _by_torch(shape: Shape, left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    return chosen.by_torch(shape.kind, left, right, shape.out_dtype, out)


def _warm_up(shape: Shape) -> None:
    left, right, out = _draw(shape)
    _last(lambda: _by_torch(shape, left, right, out), WARM_S, 0.0)


def _still_right(shape: Shape, winner: Winner) -> bool:
    """Whether an algorithm that was kept gives the product here, too."""
    if winner.algorithm is None:
        return True
    try:
        left, right, out = _draw(shape)
        wanted, run = _by_torch(shape, left, right, out).clone(), _by(shape, winner.algorithm)
        return is_right(lambda: run(left, right, out, False), out, wanted)
    except torch.OutOfMemoryError:
        return False


def _race(shape: Shape) -> Winner:
    """All proposals for a shape, and torch's own."""
    multiplier, (left, right, out) = Multiplier(shape), _draw(shape)

    def call_of(algorithm: bytes | None) -> Callable[[], object]:
        if algorithm is None:
            return lambda: _by_torch(shape, left, right, out)
        return lambda: multiplier.run(algorithm, left, right, out)

    wanted = _by_torch(shape, left, right, out).clone()
    usable = [a for a in multiplier.propose() if is_right(call_of(a), out, wanted)]
    del wanted
    best, gain = pick(None, usable, lambda algorithm, settle, heat: _last(call_of(algorithm), settle, heat))
    return Winner(best, gain)


def is_right(call: Callable[[], object], out: Tensor, wanted: Tensor) -> bool:
    """Whether an algorithm fills all of ``out`` with the product."""
    out.fill_(float("nan"))
    try:
        call()
    except CublasError:
        return False
    error, size = (torch.linalg.vector_norm(x, dtype=torch.float32) for x in (out - wanted, wanted))
    return bool(error <= LARGEST_ERROR * size)


def pick(
    own: Racer, others: Sequence[Racer], lasts_s: Callable[[Racer, float, float], float]
) -> tuple[Racer, float]:
    """The one that lasts best, and what it saves of the time of our own.

    Of some that are equal, one is the best by chance. So it is timed once more against our own, and only
    that counts.

    Args:
        own: What is there anyway.
        others: What may take its place.
        lasts_s: Seconds that one takes, after so many that do not count, over so many that do.
    """
    slowest = TOO_SLOW * lasts_s(own, SETTLE_S, HEAT_S)
    left = [racer for racer in others if lasts_s(racer, 0.0, GLANCE_S) <= slowest]
    left = _best(left, FINALISTS, _sum_times(left, 1, lasts_s))
    left = _best(left, 1, _sum_times(left, ROUNDS, lasts_s))
    if not left:
        return own, 0.0
    own_s, best_s = _sum_times((own, *left), ROUNDS, lasts_s)
    gain = 1.0 - best_s / own_s
    return (own, 0.0) if gain < LEAST_GAIN else (left[0], gain)


def _sum_times(
    racers: Sequence[Racer], rounds: int, lasts_s: Callable[[Racer, float, float], float]
) -> list[float]:
    """What each takes in some rounds together, in which they take turns."""
    turns = [[lasts_s(racer, SETTLE_S, HEAT_S) for racer in racers] for _ in range(rounds)]
    return [sum(times) for times in zip(*turns, strict=True)]


def _best(racers: Sequence[Racer], count: int, times: Sequence[float]) -> list[Racer]:
    """So many of them, the fastest first."""
    return [racers[index] for index in sorted(range(len(racers)), key=times.__getitem__)[:count]]


def _last(call: Callable[[], object], settle_s: float, heat_s: float) -> float:
    """Seconds of a call, among so many that the clock has followed."""
    one_s = elapsed_s(call, 1)
    elapsed_s(call, count_calls(settle_s, one_s, 1))
    return elapsed_s(call, count_calls(heat_s, one_s, 2))


def _draw(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Both operands, random, as zeros take less power; and where the product goes."""
    own = torch.Generator("cuda").manual_seed(0)  # a run draws the same whether products race or not
    left, right = (
        torch.randn(size, dtype=shape.dtype, device="cuda", generator=own)
        for size in (shape.left, shape.right)
    )
    return left, right, torch.empty(shape.out, dtype=shape.out_dtype, device="cuda")


def find_file() -> Path | None:
    """Where the winners on GPUs of this kind are kept; None for a user without a home."""
    kind = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower())
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return cache / "meshwright" / f"products-{kind}-cublaslt-{library_version()}.json"


def read_winners(file: Path | None) -> dict[Shape, Winner]:
    """What was kept; nothing, if it is not there or is not what was written, and no row that is not."""
    found: dict[Shape, Winner] = {}
    try:
        kept = {} if file is None else json.loads(file.read_text())
        rows = list(kept["products"]) if kept.get("v") == FILE_VERSION else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return found
    for row in rows:
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            shape, winner = _winner_of(row)
            found[shape] = winner
    return found


def _winner_of(row: dict[str, Any]) -> tuple[Shape, Winner]:
    tokens, inputs, outputs = (int(row[name]) for name in ("tokens", "inputs", "outputs"))
    kept = row["algorithm"]
    algorithm = None if kept is None else bytes.fromhex(kept)
    if algorithm is not None and len(algorithm) != ALGORITHM_BYTES:
        raise ValueError(kept)
    shape = Shape(row["kind"], getattr(torch, row["dtype"]), tokens, inputs, outputs, bool(row["narrow"]))
    return shape, Winner(algorithm, float(row["gain"]))


def write_winners(file: Path | None, winners: dict[Shape, Winner]) -> None:
    """Keep them beside those that are there; where that cannot be, the next run races again."""
    if file is None:
        return
    rows = [
        {
            **shape._asdict(),
            "dtype": str(shape.dtype).removeprefix("torch."),
            "algorithm": None if winner.algorithm is None else winner.algorithm.hex(),
            "gain": round(winner.gain, 4),
        }
        for shape, winner in (read_winners(file) | winners).items()
    ]
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps({"v": FILE_VERSION, "products": rows}, indent=1) + "\n")
