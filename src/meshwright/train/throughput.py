"""Throughput of a rank: tokens/s, MFU against the device's peak FLOP/s, and device utilisation."""

from __future__ import annotations

import functools
import os
import resource
import subprocess
import threading
import time

import torch

from meshwright.launch.environment import PEAK_VARIABLE
from meshwright.layout.flops import peak_rate
from meshwright.models.dtypes import AUTOCAST_DTYPES
from meshwright.plan.contract import PlanContract
from meshwright.spec.job import Job

PROBE_SECONDS = {"cpu": 0.1, "cuda": 1.0}
"""How long the peak is measured. A CPU runs many small GEMMs: on shared cores a large one would rarely run
without interruption. A GPU needs more time to raise its clock."""


def measure_matmul(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of a large GEMM on this device: the best of those that fit into ``seconds``."""
    size = 8192 if device.type == "cuda" else 64 * round(6 * torch.get_num_threads() ** (1 / 3))
    left = torch.rand((size, size), device=device).to(dtype)
    best = 0.0
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        started = time.perf_counter()
        torch.mm(left, left)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2.0 * size**3 / (time.perf_counter() - started))
    return best


@functools.cache
def measure_matmul_once(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """The rate of :func:`measure_matmul`, measured in the first generation only.

    A process keeps its result. A process that takes over a rank gets the result of the previous one.
    """
    given = os.environ.get(PEAK_VARIABLE)
    return measure_matmul(device, dtype, seconds) if given is None else float(given)


def find_peak_flops(job: Job, device: torch.device) -> tuple[float, str]:
    """The peak FLOP/s that MFU refers to, and a description of it."""
    cluster = job.cluster
    if cluster.preset == "local" and cluster.matmul_flops_per_s is None and cluster.probed is None:
        dtype, seconds = AUTOCAST_DTYPES.get(job.train.precision, torch.float32), PROBE_SECONDS[device.type]
        rate = measure_matmul_once(device, dtype, seconds)
        precision = "bf16" if job.train.precision == "fp8" else job.train.precision
        return rate, f"the {precision} matmul rate of this device, measured for {seconds:g} s"
    return peak_rate(cluster, job.train.precision)


class ThroughputMeter:
    """Computes the throughput fields of the ``step`` event."""

    def __init__(self, plan: PlanContract, device: torch.device) -> None:
        """Measure or look up the peak.

        Args:
            plan: Counts the FLOPs of a token.
            device: Device of this rank.
        """
        self.peak_flops_per_s, self.peak_basis = find_peak_flops(plan.job, device)
        self._mfu_of_rate = plan.flops_per_token / plan.world_size / self.peak_flops_per_s
        self._utilisation = Utilisation(device)
        self._device, self._on_gpu = device, device.type == "cuda"

    def read(self, tokens_per_s: float) -> dict[str, float | int | None]:
        """The fields of a step that has just ended."""
        return {
            "tokens_per_s": tokens_per_s,
            "mfu": tokens_per_s * self._mfu_of_rate,
            "utilisation": self._utilisation.read(),
            "memory_bytes": torch.cuda.max_memory_allocated(self._device) if self._on_gpu else None,
        }


class Utilisation:
    """How busy the device was since the last read: CPU time, or what nvidia-smi reports."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()
        self._gpu: float | None = None
        if device.type == "cuda":
            threading.Thread(target=self._poll_gpu, daemon=True).start()

    def read(self) -> float | None:
        """Between 0 and 1; None while it is unknown."""
        if self._device.type == "cuda":
            return self._gpu
        wall, cpu = time.perf_counter(), _cpu_seconds()
        spent, passed = cpu - self._cpu, wall - self._wall
        self._wall, self._cpu = wall, cpu
        return min(1.0, spent / passed / torch.get_num_threads()) if passed > 0 else None

    def _poll_gpu(self) -> None:
        query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        index = self._device.index or 0
        query += ["-i", visible[index] if index < len(visible) and visible[index] else str(index)]
        while True:
            time.sleep(2.0)  # nvidia-smi reports the past seconds: before the first step they say nothing
            try:
                answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
                self._gpu = float(answer.split()[0]) / 100
            except (OSError, subprocess.SubprocessError, ValueError, IndexError):
                return


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
