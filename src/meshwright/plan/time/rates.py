"""Fitted rates of kernel classes and links; everything else in the estimate is counted.

``calibration.toml`` has defaults and overrides by device generation. A device without its own section has
the defaults: fractions of its own data sheet. What frameworks differ in is in ``plan.profiles``.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from dataclasses import dataclass
from importlib import resources

import numpy as np

from meshwright.plan.estimate.grid import Floats, Ints
from meshwright.plan.estimate.workload import Workload
from meshwright.spec.cluster import Cluster, chip_of

Tables = dict[str, dict[str, float]]
"""Rates by section."""
CALIBRATION_FILE = "calibration.toml"
CPU = "cpu"
"""Calibration name of all CPUs."""


@dataclass(frozen=True)
class Rates:
    """The fitted rates."""

    matmul: float
    """Rate of large GEMMs in a step, over that of one large 16-bit GEMM."""
    headroom: float
    """Rate that GEMMs would reach without the power limit, over ``matmul``: hides partly filled waves."""
    matmul_fp8: float
    """The same for fp8, over the 16-bit rate scaled by the peaks; casts are counted separately."""
    matmul_fp4: float
    """The same for fp4."""
    block_scaled: float
    """Rate of fp8 with block scales (mxfp8), over fp8 with tensor scales."""
    row_scaled: float
    """Rate of fp8 with row scales, over fp8 with tensor scales."""
    expert_matmul: float
    """Rate of grouped expert GEMMs, over one GEMM with as many rows."""
    attention: float
    """Rate of fused attention (forward, long sequences), over one large 16-bit GEMM."""
    flash_2: float
    """Rate of FlashAttention-2, over the attention kernel of the device's generation."""
    flash_1: float
    """Rate of the first FlashAttention and of Triton's, over FlashAttention-2."""
    attention_ramp: float
    """Sequence length at which the forward pass of fused attention reaches half of its rate."""
    memory: float
    """Share of the memory bandwidth that elementwise kernels reach."""
    elementwise: float
    """Bytes that norms, activation functions and additions of a block move, over the counted ones."""
    operand_traffic: float
    """Factor on a GEMM's operand and result traffic t. With a, the time of its arithmetic, the GEMM takes
    sqrt(a² + (factor t)²)."""
    launch_s: float
    """Least time of a GEMM or fused kernel."""
    cpu_launch_s: float
    """CPU launch time of one pass through one block: hidden by a GPU unless longer, added on a CPU."""
    expert_cpu_launch_s: float
    """Extra CPU launch time of an expert layer."""
    link: float
    """Share of the intra-node link bandwidth that collectives reach."""
    link_latency: float
    """Latency of a collective on two ranks in a node, over ``cluster.link_latency_s``."""
    nic: float
    """Share of the network bandwidth that collectives reach."""
    nic_latency: float
    """Latency of a collective between nodes, per doubling of the nodes, over ``cluster.nic_latency_s``."""
    overlap: float
    """Share of overlappable communication that compute hides; FSDP has rates of its own."""
    fsdp_window: float
    """Share of a pass during which FSDP's collectives run beside compute."""
    fsdp_exposed: float
    """Share of FSDP's collectives that is exposed however long the pass is, such as the first all-gather."""
    tp_overlap: float
    """Share of tensor-parallel collectives that are hidden where the stack overlaps them with GEMMs."""
    ep_overlap: float
    """Share of expert dispatch and combine that compute of another micro-batch hides, where it does."""
    all_to_all: float
    """Bandwidth of expert dispatch, over that of rings."""
    contention: float
    """Slow-down of compute during communication."""


SAME_RATES_AS = {"H800": "H100", "A800": "A100", "GB300": "B300"}
"""Devices that share the rates of another."""


def calibrated_device(device_name: str) -> str:
    """The calibration name of a device: `A100`, `H100`, ...; that of a chip that shares its rates."""
    chip = chip_of(device_name)
    return SAME_RATES_AS.get(chip, chip)


def rates_of(workload: Workload) -> Rates:
    """The rates of a workload's device; all CPUs share one set."""
    if workload.cluster.device == "cpu":
        return merge_rates(load_calibration(), CPU)
    return merge_rates(load_calibration(), calibrated_device(workload.cluster.device_name))


def ranks_per_core(cluster: Cluster, ranks: Ints) -> Floats:
    """How many ranks share a CPU core; every part of their step takes that many times as long. 1 on GPUs."""
    if cluster.device != "cpu":
        return np.ones(len(ranks))
    return np.maximum(1.0, ranks / cluster.world_size)


def merge_rates(tables: Tables, device: str) -> Rates:
    """The defaults, with the device's rates over them."""
    merged = tables["default"] | tables.get(f"device.{device}", {})
    return Rates(**{field.name: merged[field.name] for field in dataclasses.fields(Rates)})


@functools.lru_cache(maxsize=1)
def load_calibration() -> Tables:
    """The sections of the calibration file."""
    path = resources.files("meshwright.plan.time").joinpath(CALIBRATION_FILE)
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        name: {rate: float(value) for rate, value in values.items()}
        for name, values in tables.items()
        if isinstance(values, dict)
    }
