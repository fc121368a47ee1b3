"""GEMM autotuning: picks the cuBLASLt algorithm with the best sustained speed for each GEMM shape of a step.

A GPU under load is limited by power: an H200 lowers its clock from 1.98 to 1.5 GHz under sustained GEMMs. The
algorithm that is fastest in a short burst may need more energy than others. It is then slower under sustained
load. So the algorithms that cuBLASLt proposes for a shape run one after the other without a pause, each long
enough for the clock to settle; the best ones and torch's default run again in alternation. The results are
cached in a file per GPU model and library version, so that a later run with the same shapes starts at once.
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
from meshwright.models.kernels.cublas import (
    ALGORITHM_BYTES,
    CublasError,
    CublasLtGemm,
    GemmShape,
    library_version,
)
from meshwright.models.kernels.gemm import TORCH_GEMMS, Algorithm, Gemms, torch_gemm
from meshwright.spec.execution import autotunes_gemms, keeps_bf16_grads
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

WARM_UP_S = 1.0
"""Until an idle GPU has reached its power limit."""
SETTLE_S, MEASURE_S = 0.04, 0.08
"""How long an algorithm runs before it is timed, and while it is."""
SCREEN_S = 0.01
"""A first measurement, which screens out slow algorithms."""
SCREEN_FACTOR = 1.08
FINALISTS, ROUNDS = 2, 2
MIN_GAIN = 0.005
"""Less is noise, and torch's default stays: two measurements of one algorithm are within 1% of each other."""
MAX_ERROR = 5e-3
"""Relative error of a GEMM: operands have 16 bits, and the order of summation differs."""
FILE_VERSION = 3
SKIPPED_REASON = "only the 16-bit GEMMs of Triton blocks are autotuned, on a GPU (docs/single-gpu.md)"

Candidate = TypeVar("Candidate")


@dataclass(frozen=True)
class TunedAlgorithm:
    """Result of autotuning one shape."""

    algorithm: bytes | None
    """None for torch's default."""
    gain: float
    """Share of torch's time that it saves."""


def autotune_gemms(job: Job, device: torch.device, events: EventWriter) -> Gemms:
    """The GEMMs of a job's step on a rank's GPU; autotuned if ``train.gemm_autotune`` applies.

    Args:
        job: Job of any kind.
        device: The rank's; a GPU is the current one.
        events: Receives the results.
    """
    if autotunes_gemms(job):
        return _autotune_gemms(job, device, events)
    if job.train.gemm_autotune:
        events.write("gemm_autotune_skipped", reason=SKIPPED_REASON)
    return TORCH_GEMMS


def _autotune_gemms(job: Job, device: torch.device, events: EventWriter) -> Gemms:
    started, file = time.perf_counter(), find_cache_file()
    shapes = count_gemm_shapes(job)
    cached = read_cache(file).items()
    found = {shape: tuned for shape, tuned in cached if shape in shapes and _is_still_correct(shape, tuned)}
    missing = [shape for shape in shapes if shape not in found]
    if missing:
        events.write("gemm_autotune_started", shapes=len(missing))
        _warm_up(missing[0])
    for shape in missing:
        try:
            found[shape] = _autotune_shape(shape)
            write_cache(file, {shape: found[shape]})  # interrupted autotuning continues where it stopped
        except torch.OutOfMemoryError:  # torch's default needs less
            found[shape] = TunedAlgorithm(None, 0.0)
        torch.cuda.empty_cache()
    changed = {shape: tuned.algorithm for shape, tuned in found.items() if tuned.algorithm is not None}
    events.write(
        "gemm_autotune",
        tuned=len(missing),
        cached=len(shapes) - len(missing),
        changed=len(changed),
        gain=estimate_gain(found, shapes),
        seconds=time.perf_counter() - started,
        file=None if file is None else str(file),
    )
    return Gemms({shape: _bind(shape, algorithm) for shape, algorithm in changed.items()}, device)


def count_gemm_shapes(job: Job) -> dict[GemmShape, int]:
    """The shapes of a micro-batch's 16-bit GEMMs, and how often each occurs."""
    assert isinstance(job.model, DecoderModel), "only decoders have Triton blocks"
    dtype, found = AUTOCAST_DTYPES[job.train.precision], Counter[GemmShape]()
    for linear in list_linears(job, job.model, 1):
        for kind in KINDS:  # the head's weight gradient is summed over chunks, in float32
            same_dtype_out = kind == "weight" and linear.in_block and keeps_bf16_grads(job)
            if not is_fp8_gemm(job, linear, kind):
                shape = GemmShape(kind, dtype, linear.rows, linear.depth, linear.columns, same_dtype_out)
                found[shape] += linear.times
    return dict(found)


def estimate_gain(found: dict[GemmShape, TunedAlgorithm], times: dict[GemmShape, int]) -> float:
    """Share of all GEMMs' time that is saved, if their time is proportional to their FLOPs."""
    work = {s: count * s.tokens * s.inputs * s.outputs for s, count in times.items()}
    return sum(work[shape] * found[shape].gain for shape in work) / sum(work.values())


def _bind(shape: GemmShape, algorithm: bytes) -> Algorithm:
    """GEMMs of a shape by an algorithm."""
    return functools.partial(CublasLtGemm(shape).run, algorithm)


def _torch_gemm(shape: GemmShape, left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    return torch_gemm(shape.kind, left, right, shape.out_dtype, out)


def _warm_up(shape: GemmShape) -> None:
    left, right, out = _random_operands(shape)
    _time_sustained(lambda: _torch_gemm(shape, left, right, out), WARM_UP_S, 0.0)


def _is_still_correct(shape: GemmShape, tuned: TunedAlgorithm) -> bool:
    """Whether a cached algorithm gives the right result on this GPU."""
    if tuned.algorithm is None:
        return True
    try:
        left, right, out = _random_operands(shape)
        expected, run = _torch_gemm(shape, left, right, out).clone(), _bind(shape, tuned.algorithm)
        return is_correct(lambda: run(left, right, out, False), out, expected)
    except torch.OutOfMemoryError:
        return False


def _autotune_shape(shape: GemmShape) -> TunedAlgorithm:
    """The best of all proposed algorithms and torch's default."""
    gemm, (left, right, out) = CublasLtGemm(shape), _random_operands(shape)

    def call_of(algorithm: bytes | None) -> Callable[[], object]:
        if algorithm is None:
            return lambda: _torch_gemm(shape, left, right, out)
        return lambda: gemm.run(algorithm, left, right, out)

    expected = _torch_gemm(shape, left, right, out).clone()
    usable = [a for a in gemm.query_algorithms() if is_correct(call_of(a), out, expected)]
    del expected
    best, gain = pick_fastest(
        None,
        usable,
        lambda algorithm, settle_s, measure_s: _time_sustained(call_of(algorithm), settle_s, measure_s),
    )
    return TunedAlgorithm(best, gain)


def is_correct(call: Callable[[], object], out: Tensor, expected: Tensor) -> bool:
    """Whether an algorithm fills all of ``out`` with the right result."""
    out.fill_(float("nan"))
    try:
        call()
    except CublasError:
        return False
    error, size = (torch.linalg.vector_norm(x, dtype=torch.float32) for x in (out - expected, expected))
    return bool(error <= MAX_ERROR * size)


def pick_fastest(
    default: Candidate, others: Sequence[Candidate], sustained_s: Callable[[Candidate, float, float], float]
) -> tuple[Candidate, float]:
    """The candidate with the best sustained speed, and the share of the default's time that it saves.

    Among equal candidates, noise decides which one is best. So the best one is timed once more against the
    default, and only that measurement counts.

    Args:
        default: Torch's.
        others: May replace it.
        sustained_s: Seconds per call of a candidate, given seconds to settle and seconds to measure.
    """
    slowest = SCREEN_FACTOR * sustained_s(default, SETTLE_S, MEASURE_S)
    left = [candidate for candidate in others if sustained_s(candidate, 0.0, SCREEN_S) <= slowest]
    left = _fastest(left, FINALISTS, _sum_times(left, 1, sustained_s))
    left = _fastest(left, 1, _sum_times(left, ROUNDS, sustained_s))
    if not left:
        return default, 0.0
    default_s, best_s = _sum_times((default, *left), ROUNDS, sustained_s)
    gain = 1.0 - best_s / default_s
    return (default, 0.0) if gain < MIN_GAIN else (left[0], gain)


def _sum_times(
    candidates: Sequence[Candidate], rounds: int, sustained_s: Callable[[Candidate, float, float], float]
) -> list[float]:
    """The time of each candidate, summed over rounds; in a round each is timed once."""
    times = [[sustained_s(candidate, SETTLE_S, MEASURE_S) for candidate in candidates] for _ in range(rounds)]
    return [sum(of_one) for of_one in zip(*times, strict=True)]


def _fastest(candidates: Sequence[Candidate], count: int, times: Sequence[float]) -> list[Candidate]:
    """The fastest ones, fastest first."""
    return [candidates[index] for index in sorted(range(len(candidates)), key=times.__getitem__)[:count]]


def _time_sustained(call: Callable[[], object], settle_s: float, measure_s: float) -> float:
    """Seconds per call at the clock that the GPU sustains."""
    one_s = elapsed_s(call, 1)
    elapsed_s(call, count_calls(settle_s, one_s, 1))
    return elapsed_s(call, count_calls(measure_s, one_s, 2))


def _random_operands(shape: GemmShape) -> tuple[Tensor, Tensor, Tensor]:
    """Both operands and the output; random operands, as zeros draw less power."""
    generator = torch.Generator("cuda").manual_seed(0)  # the run's random state stays as it is
    left, right = (
        torch.randn(size, dtype=shape.dtype, device="cuda", generator=generator)
        for size in (shape.left, shape.right)
    )
    return left, right, torch.empty(shape.out, dtype=shape.out_dtype, device="cuda")


def find_cache_file() -> Path | None:
    """The cache file for this GPU model; None for a user without a home folder."""
    gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower())
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return cache / "meshwright" / f"gemm-autotune-{gpu}-cublaslt-{library_version()}.json"


def read_cache(file: Path | None) -> dict[GemmShape, TunedAlgorithm]:
    """The cached results; a missing or damaged file has none, and damaged rows are skipped."""
    found: dict[GemmShape, TunedAlgorithm] = {}
    try:
        cached = {} if file is None else json.loads(file.read_text())
        rows = list(cached["gemms"]) if cached.get("v") == FILE_VERSION else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return found
    for row in rows:
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            shape, tuned = _parse_row(row)
            found[shape] = tuned
    return found


def _parse_row(row: dict[str, Any]) -> tuple[GemmShape, TunedAlgorithm]:
    tokens, inputs, outputs = (int(row[name]) for name in ("tokens", "inputs", "outputs"))
    text = row["algorithm"]
    algorithm = None if text is None else bytes.fromhex(text)
    if algorithm is not None and len(algorithm) != ALGORITHM_BYTES:
        raise ValueError(text)
    dtype, same_dtype_out = getattr(torch, row["dtype"]), bool(row["same_dtype_out"])
    shape = GemmShape(row["kind"], dtype, tokens, inputs, outputs, same_dtype_out)
    return shape, TunedAlgorithm(algorithm, float(row["gain"]))


def write_cache(file: Path | None, found: dict[GemmShape, TunedAlgorithm]) -> None:
    """Add results to the cache file; if it cannot be written, the next run autotunes again."""
    if file is None:
        return
    rows = [
        {
            **shape._asdict(),
            "dtype": str(shape.dtype).removeprefix("torch."),
            "algorithm": None if tuned.algorithm is None else tuned.algorithm.hex(),
            "gain": round(tuned.gain, 4),
        }
        for shape, tuned in (read_cache(file) | found).items()
    ]
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps({"v": FILE_VERSION, "gemms": rows}, indent=1) + "\n")
