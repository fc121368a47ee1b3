"""GEMM time by shape: tiles, waves, operand traffic, alignment; on CPUs by FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.estimate.grid import Floats
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.time.rates import Rates, calibrated_device

MULTIPROCESSORS = {
    "V100": 80,
    "A100": 108,
    "H100": 132,
    "H200": 132,
    "B200": 148,
    "GB200": 148,
    "B300": 148,
    "A10": 72,
    "A10G": 80,
    "A40": 84,
    "A6000": 84,
    "3090": 82,
    "L4": 58,
    "L40": 142,
    "L40S": 142,
    "4090": 128,
    "5090": 170,
    "MI250X": 110,
    "MI300X": 304,
    "MI325X": 304,
    "MI350X": 256,
    "MI355X": 256,
    "H20": 78,
}
"""By chip."""
DEFAULT_MULTIPROCESSORS = 132
TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.80), (64, 64, 0.60))
"""Rows and columns of an output tile, and the relative rate of GEMMs with such tiles."""
SPLIT_K_AT = 4096
"""Depth (K) from which a GEMM with too few tiles uses split-K."""
ALIGNMENT = 8
"""Row lengths of operands must be a multiple of this."""
DEPTH_RAMP = 64.0
"""Depth (K) at which a tile's prologue and epilogue take as long as its arithmetic. From grouped GEMMs on an
H200: 61% of the rate at a depth of 128, 87% at 512, 96% at 2048."""
UNALIGNED = 0.14
"""Relative rate of unaligned GEMMs: 0.13 on an H200 for odd row lengths; head dims of 108 and 150 cost
BLOOM's tuning runs 40% of their speed."""


@dataclass(frozen=True)
class Device:
    """Achievable rates of one device."""

    flops_per_s: float
    """GEMM rate in the workload's precision."""
    unquantized_flops_per_s: float
    """GEMM rate without fp8 or fp4: for attention, and for what fp8 recipes keep in 16 bits."""
    float32_flops_per_s: float
    """GEMM rate in float32."""
    bytes_per_s: float
    multiprocessors: int
    """0 for a CPU, whose GEMMs have no tile waves."""
    rates: Rates
    operand_width: float
    """Bytes per operand element."""

    @classmethod
    def of(cls, workload: Workload, rates: Rates) -> Device:
        """The device of a workload."""
        cluster, device = workload.cluster, calibrated_device(workload.cluster.device_name)
        unquantized = cluster.bf16_flops_per_s * rates.matmul
        peak = cluster.peak_bf16_flops_per_s
        flops, width = unquantized, 2.0
        if workload.precision == "fp32":
            flops = unquantized = cluster.fp32_flops_per_s * rates.matmul
            width = 4.0
        elif workload.precision == "fp8" and peak and cluster.peak_fp8_flops_per_s:
            flops = cluster.bf16_flops_per_s * cluster.peak_fp8_flops_per_s / peak * rates.matmul_fp8
            flops *= _scaling_factor(workload.recipe, rates)
            width = 1.0
        elif workload.precision == "fp4" and peak and cluster.peak_fp4_flops_per_s:
            flops = cluster.bf16_flops_per_s * cluster.peak_fp4_flops_per_s / peak * rates.matmul_fp4
            width = 0.5
        return cls(
            flops_per_s=flops,
            unquantized_flops_per_s=unquantized,
            float32_flops_per_s=cluster.fp32_flops_per_s * rates.matmul,
            bytes_per_s=cluster.memory_bytes_per_s * rates.memory,
            multiprocessors=0
            if cluster.device == "cpu"
            else MULTIPROCESSORS.get(device, DEFAULT_MULTIPROCESSORS),
            rates=rates,
            operand_width=width,
        )


Sizes = Floats | float | int


def _scaling_factor(recipe: str, rates: Rates) -> float:
    """Relative rate of an fp8 scaling recipe."""
    if recipe.startswith("row"):
        return rates.row_scaled
    return rates.block_scaled if "mx" in recipe else 1.0


def gemm_s(
    device: Device, rows: Sizes, columns: Sizes, depth: Sizes, count: Sizes = 1, unquantized: bool = False
) -> Floats:
    """Seconds of ``count`` GEMMs (rows x depth) @ (depth x columns) in one kernel.

    ``unquantized``: without fp8 or fp4, whatever the precision of the workload is.
    """
    rows, columns, depth, count = np.broadcast_arrays(
        *(np.asarray(x, float) for x in (rows, columns, depth, count))
    )
    if not device.multiprocessors:
        return 2 * count * rows * columns * depth / device.flops_per_s
    # A device at its power limit raises its clock while some of its multiprocessors are idle.
    tiles = np.minimum(
        device.rates.headroom * tile_share(device.multiprocessors, rows, columns, depth, count), 1
    )
    share = tiles * _alignment_factor(columns) * _alignment_factor(depth) * depth / (depth + DEPTH_RAMP)
    rate = share * (device.unquantized_flops_per_s if unquantized else device.flops_per_s)
    width = 2.0 if unquantized else device.operand_width
    moved = count * (width * (rows + columns) * depth + 2.0 * rows * columns)
    arithmetic = 2 * count * rows * columns * depth / rate
    traffic = moved / device.bytes_per_s
    return np.hypot(arithmetic, device.rates.operand_traffic * traffic) + device.rates.launch_s


def tile_share(multiprocessors: int, rows: Floats, columns: Floats, depth: Floats, count: Floats) -> Floats:
    """Relative rate after wave quantization (the last, partly filled wave of tiles), with the best tile."""
    best = np.zeros_like(rows)
    for height, width, rate in TILES:
        tiles = np.ceil(rows / height) * np.ceil(columns / width) * count
        pieces = np.where(tiles < multiprocessors, np.clip(depth // SPLIT_K_AT, 1, 4), 1)
        waves = np.ceil(tiles * pieces / multiprocessors)
        used = rows * columns * count * pieces / (waves * multiprocessors * height * width)
        best = np.maximum(best, rate * np.minimum(used, 1.0))
    return best


def _alignment_factor(width: Floats) -> Floats:
    return np.where(width % ALIGNMENT == 0, 1.0, UNALIGNED)
