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
from meshwright.layout.gemms import KINDS, is_fp8_gemm, list_linears
from meshwright.measure.elapsed import count_calls, elapsed_s
from meshwright.models.dtypes import AUTOCAST_DTYPES
from meshwright.models.kernels import gemm
from meshwright.models.kernels.cublas import (
    ALGORITHM_BYTES,
    CublasError,
    CublasLtGemm,
    GemmShape,
    library_version,
)
from meshwright.spec.execution import autotunes_gemms, keeps_bf16_grads
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

WARM_UP_S = 1.0
"""Until a GPU that did nothing has come to its power."""
SETTLE_S, MEASURE_S = 0.04, 0.08
"""How long an algorithm runs before it is timed, and while it is."""
SCREEN_S = 0.01
"""A first look, after which the slow ones are left out."""
SCREEN_FACTOR = 1.08
FINALISTS, ROUNDS = 2, 2
MIN_GAIN = 0.005
"""Less is noise, and torch's own stays: two heats of one algorithm are within 1% of each other."""
MAX_ERROR = 5e-3
"""Of a product, over its size: operands are of 16 bits, and sums are in another order."""
FILE_VERSION = 3
SKIPPED_REASON = "only 16-bit products between our own kernels race, on a GPU (docs/single-gpu.md)"

Candidate = TypeVar("Candidate")


@dataclass(frozen=True)
class TunedAlgorithm:
    """What is kept of a race."""

    algorithm: bytes | None
    """None for torch's own."""
    gain: float
    """Of torch's time, what it saves."""


def autotune_gemms(job: Job, device: torch.device, events: EventWriter) -> None:
    """Choose an algorithm for each 16-bit product of a job's step on a rank's GPU, where they race.

    Args:
        job: Of any kind.
        device: The rank's; a GPU is the current one.
        events: Told how a race went.
    """
    gemm.use_algorithms({}, device)  # not what another job has chosen
    if autotunes_gemms(job):
        _autotune_gemms(job, device, events)
    elif job.train.gemm_autotune:
        events.write("gemm_autotune_skipped", reason=SKIPPED_REASON)


def _autotune_gemms(job: Job, device: torch.device, events: EventWriter) -> None:
    started, file = time.perf_counter(), find_cache_file()
    shapes = count_gemm_shapes(job)
    kept = read_cache(file).items()
    known = {shape: tuned for shape, tuned in kept if shape in shapes and _is_still_correct(shape, tuned)}
    missing = [shape for shape in shapes if shape not in known]
    if missing:
        events.write("gemm_autotune_started", shapes=len(missing))
        _warm_up(missing[0])
    for shape in missing:
        try:
            known[shape] = _autotune_shape(shape)
            write_cache(file, {shape: known[shape]})  # an interrupted race goes on where it was
        except torch.OutOfMemoryError:  # torch's own needs less
            known[shape] = TunedAlgorithm(None, 0.0)
        torch.cuda.empty_cache()
    others = {shape: tuned.algorithm for shape, tuned in known.items() if tuned.algorithm is not None}
    gemm.use_algorithms({shape: _by(shape, algorithm) for shape, algorithm in others.items()}, device)
    events.write(
        "gemm_autotune",
        tuned=len(missing),
        cached=len(shapes) - len(missing),
        changed=len(others),
        gain=estimate_gain(known, shapes),
        seconds=time.perf_counter() - started,
        file=None if file is None else str(file),
    )


def count_gemm_shapes(job: Job) -> dict[GemmShape, int]:
    """The 16-bit products of a micro-batch, and how often it has each."""
    assert isinstance(job.model, DecoderModel), "our own kernels are a decoder's"
    low, found = AUTOCAST_DTYPES[job.train.precision], Counter[GemmShape]()
    for linear in list_linears(job, job.model, 1):
        for kind in KINDS:  # a head's gradient is a sum over chunks, in float32
            same_dtype_out = kind == "weight" and linear.in_block and keeps_bf16_grads(job)
            if not is_fp8_gemm(job, linear, kind):
                shape = GemmShape(kind, low, linear.rows, linear.depth, linear.columns, same_dtype_out)
                found[shape] += linear.times
    return dict(found)


def estimate_gain(tuned: dict[GemmShape, TunedAlgorithm], times: dict[GemmShape, int]) -> float:
    """What all winners save of the time of all products, if those take as long as they have FLOPs."""
    work = {s: count * s.tokens * s.inputs * s.outputs for s, count in times.items()}
    return sum(work[shape] * tuned[shape].gain for shape in work) / sum(work.values())


def _by(shape: GemmShape, algorithm: bytes) -> gemm.Algorithm:
    """Products of a shape by an algorithm."""
    return functools.partial(CublasLtGemm(shape).run, algorithm)


def _torch_gemm(shape: GemmShape, left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    return gemm.torch_gemm(shape.kind, left, right, shape.out_dtype, out)


def _warm_up(shape: GemmShape) -> None:
    left, right, out = _random_operands(shape)
    _time_sustained(lambda: _torch_gemm(shape, left, right, out), WARM_UP_S, 0.0)


def _is_still_correct(shape: GemmShape, tuned: TunedAlgorithm) -> bool:
    """Whether an algorithm that was kept gives the product here, too."""
    if tuned.algorithm is None:
        return True
    try:
        left, right, out = _random_operands(shape)
        wanted, run = _torch_gemm(shape, left, right, out).clone(), _by(shape, tuned.algorithm)
        return is_correct(lambda: run(left, right, out, False), out, wanted)
    except torch.OutOfMemoryError:
        return False


def _autotune_shape(shape: GemmShape) -> TunedAlgorithm:
    """All proposals for a shape, and torch's own."""
    multiplier, (left, right, out) = CublasLtGemm(shape), _random_operands(shape)

    def call_of(algorithm: bytes | None) -> Callable[[], object]:
        if algorithm is None:
            return lambda: _torch_gemm(shape, left, right, out)
        return lambda: multiplier.run(algorithm, left, right, out)

    wanted = _torch_gemm(shape, left, right, out).clone()
    usable = [a for a in multiplier.query_algorithms() if is_correct(call_of(a), out, wanted)]
    del wanted
    best, gain = pick_fastest(
        None, usable, lambda algorithm, settle, heat: _time_sustained(call_of(algorithm), settle, heat)
    )
    return TunedAlgorithm(best, gain)


def is_correct(call: Callable[[], object], out: Tensor, wanted: Tensor) -> bool:
    """Whether an algorithm fills all of ``out`` with the product."""
    out.fill_(float("nan"))
    try:
        call()
    except CublasError:
        return False
    error, size = (torch.linalg.vector_norm(x, dtype=torch.float32) for x in (out - wanted, wanted))
    return bool(error <= MAX_ERROR * size)


def pick_fastest(
    own: Candidate, others: Sequence[Candidate], sustained_s: Callable[[Candidate, float, float], float]
) -> tuple[Candidate, float]:
    """The one that lasts best, and what it saves of the time of our own.

    Of some that are equal, one is the best by chance. So it is timed once more against our own, and only
    that counts.

    Args:
        own: What is there anyway.
        others: What may take its place.
        sustained_s: Seconds that one takes, after so many that do not count, over so many that do.
    """
    slowest = SCREEN_FACTOR * sustained_s(own, SETTLE_S, MEASURE_S)
    left = [racer for racer in others if sustained_s(racer, 0.0, SCREEN_S) <= slowest]
    left = _fastest(left, FINALISTS, _sum_times(left, 1, sustained_s))
    left = _fastest(left, 1, _sum_times(left, ROUNDS, sustained_s))
    if not left:
        return own, 0.0
    own_s, best_s = _sum_times((own, *left), ROUNDS, sustained_s)
    gain = 1.0 - best_s / own_s
    return (own, 0.0) if gain < MIN_GAIN else (left[0], gain)


def _sum_times(
    racers: Sequence[Candidate], rounds: int, sustained_s: Callable[[Candidate, float, float], float]
) -> list[float]:
    """What each takes in some rounds together, in which they take turns."""
    turns = [[sustained_s(racer, SETTLE_S, MEASURE_S) for racer in racers] for _ in range(rounds)]
    return [sum(times) for times in zip(*turns, strict=True)]


def _fastest(racers: Sequence[Candidate], count: int, times: Sequence[float]) -> list[Candidate]:
    """So many of them, the fastest first."""
    return [racers[index] for index in sorted(range(len(racers)), key=times.__getitem__)[:count]]


def _time_sustained(call: Callable[[], object], settle_s: float, measure_s: float) -> float:
    """Seconds of a call, among so many that the clock has followed."""
    one_s = elapsed_s(call, 1)
    elapsed_s(call, count_calls(settle_s, one_s, 1))
    return elapsed_s(call, count_calls(measure_s, one_s, 2))


def _random_operands(shape: GemmShape) -> tuple[Tensor, Tensor, Tensor]:
    """Both operands, random, as zeros take less power; and where the product goes."""
    own = torch.Generator("cuda").manual_seed(0)  # a run draws the same whether products race or not
    left, right = (
        torch.randn(size, dtype=shape.dtype, device="cuda", generator=own)
        for size in (shape.left, shape.right)
    )
    return left, right, torch.empty(shape.out, dtype=shape.out_dtype, device="cuda")


def find_cache_file() -> Path | None:
    """Where the winners on GPUs of this kind are kept; None for a user without a home."""
    kind = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower())
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return cache / "meshwright" / f"gemm-autotune-{kind}-cublaslt-{library_version()}.json"


def read_cache(file: Path | None) -> dict[GemmShape, TunedAlgorithm]:
    """What was kept; nothing, if it is not there or is not what was written, and no row that is not."""
    found: dict[GemmShape, TunedAlgorithm] = {}
    try:
        kept = {} if file is None else json.loads(file.read_text())
        rows = list(kept["gemms"]) if kept.get("v") == FILE_VERSION else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return found
    for row in rows:
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            shape, tuned = _parse_row(row)
            found[shape] = tuned
    return found


def _parse_row(row: dict[str, Any]) -> tuple[GemmShape, TunedAlgorithm]:
    tokens, inputs, outputs = (int(row[name]) for name in ("tokens", "inputs", "outputs"))
    kept = row["algorithm"]
    algorithm = None if kept is None else bytes.fromhex(kept)
    if algorithm is not None and len(algorithm) != ALGORITHM_BYTES:
        raise ValueError(kept)
    shape = GemmShape(
        row["kind"], getattr(torch, row["dtype"]), tokens, inputs, outputs, bool(row["same_dtype_out"])
    )
    return shape, TunedAlgorithm(algorithm, float(row["gain"]))


def write_cache(file: Path | None, tuned: dict[GemmShape, TunedAlgorithm]) -> None:
    """Keep them beside those that are there; where that cannot be, the next run races again."""
    if file is None:
        return
    rows = [
        {
            **shape._asdict(),
            "dtype": str(shape.dtype).removeprefix("torch."),
            "algorithm": None if tuned.algorithm is None else tuned.algorithm.hex(),
            "gain": round(tuned.gain, 4),
        }
        for shape, tuned in (read_cache(file) | tuned).items()
    ]
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps({"v": FILE_VERSION, "gemms": rows}, indent=1) + "\n")
