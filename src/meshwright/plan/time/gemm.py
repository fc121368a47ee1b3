"""Time of GEMMs by their shape: tiles, waves, operand traffic, alignment; on CPUs their FLOPs alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.estimate.grid import Floats
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.time.rates import Rates, calibrated_device

MULTIPROCESSORS = {"V100": 80, "A100": 108, "H100": 132, "B200": 148, "B300": 148}
DEFAULT_MULTIPROCESSORS = 132
TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.80), (64, 64, 0.60))
"""Rows and columns of a tile of the result and the rate that products cut into such tiles reach."""
SPLIT_K_AT = 4096
"""Depth from which a product with too few tiles is cut along its depth as well."""
ALIGNMENT = 8
"""Elements that the rows of an operand must be a multiple of."""
UNALIGNED = 0.14
"""What is left of the rate where they are not: 0.13 on an H200 for odd rows; heads of 108 and 150 cost
BLOOM's tuning runs 40% of their speed."""


@dataclass(frozen=True)
class Device:
    """One device as the formulas see it: what it reaches, not what is printed."""

    flops_per_s: float
    """Of the workload's products."""
    plain_flops_per_s: float
    """Of 16-bit products: attention, and what fp8 recipes leave in 16 bits."""
    bytes_per_s: float
    multiprocessors: int
    """Of a GPU; 0 of a CPU, where GEMMs have no waves of tiles."""
    rates: Rates
    operand_width: float
    """Bytes of an operand's element."""

    @classmethod
    def of(cls, workload: Workload, rates: Rates) -> Device:
        """The device of a workload."""
        cluster, device = workload.cluster, calibrated_device(workload.cluster.device_name)
        plain = cluster.bf16_flops_per_s * rates.matmul
        peak = cluster.peak_bf16_flops_per_s
        flops, width = plain, 2.0
        if workload.precision == "fp32":
            flops = plain = cluster.fp32_flops_per_s * rates.matmul
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
            plain_flops_per_s=plain,
            bytes_per_s=cluster.memory_bytes_per_s * rates.memory,
            multiprocessors=0
            if cluster.device == "cpu"
            else MULTIPROCESSORS.get(device, DEFAULT_MULTIPROCESSORS),
            rates=rates,
            operand_width=width,
        )


Sizes = Floats | float | int


def _scaling_factor(recipe: str, rates: Rates) -> float:
    """What finer scales leave of the rate."""
    if recipe.startswith("row"):
        return rates.row_scaled
    return rates.block_scaled if "mx" in recipe else 1.0


def gemm_s(
    device: Device, rows: Sizes, columns: Sizes, depth: Sizes, count: Sizes = 1, plain: bool = False
) -> Floats:
    """Seconds of ``count`` GEMMs (rows x depth) (depth x columns) that run as one kernel."""
    rows, columns, depth, count = np.broadcast_arrays(
        *(np.asarray(x, float) for x in (rows, columns, depth, count))
    )
    if not device.multiprocessors:
        return 2 * count * rows * columns * depth / device.flops_per_s
    share = (
        tile_share(device.multiprocessors, rows, columns, depth, count)
        * _alignment_factor(columns)
        * _alignment_factor(depth)
    )
    rate = share * (device.plain_flops_per_s if plain else device.flops_per_s)
    width = 2.0 if plain else device.operand_width
    moved = count * (width * (rows + columns) * depth + 2.0 * rows * columns)
    arithmetic = 2 * count * rows * columns * depth / rate
    traffic = moved / device.bytes_per_s
    return np.maximum(arithmetic + device.rates.operand_bytes * traffic, traffic) + device.rates.launch_s


def tile_share(multiprocessors: int, rows: Floats, columns: Floats, depth: Floats, count: Floats) -> Floats:
    """Share of the rate that is left after the last, partly filled wave of tiles; the best tile is taken."""
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
