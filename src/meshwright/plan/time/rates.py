"""Rates that a device and a software stack reach: the fitted part of the estimate, kept as data.

``calibration.toml`` has defaults, then what differs by device generation, by stack (a profile), and by both.
Everything else in the estimate is counted, not fitted.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from dataclasses import dataclass
from importlib import resources

from meshwright.plan.estimate.workload import Workload

CALIBRATION_FILE = "calibration.toml"
CPU = "cpu"
"""What calibrations of all CPUs go by."""


@dataclass(frozen=True)
class Rates:
    """What the formulas multiply with."""

    matmul: float
    """Share of the rate of one large 16-bit product that large products reach inside a step."""
    matmul_fp8: float
    """The same of the fp8 rate (as much higher as the data sheet's peak is), with scaling and casting."""
    matmul_fp4: float
    """The same of the fp4 rate."""
    block_scaled: float
    """Rate of fp8 with a scale for each block (mxfp8), of fp8 with one for each tensor."""
    row_scaled: float
    """Rate of fp8 with a scale for each row, of the same."""
    expert_matmul: float
    """Rate of grouped products of experts, of that of one product with as many rows."""
    attention: float
    """Share of that 16-bit rate that fused attention reaches, forward, over long sequences."""
    attention_ramp: float
    """Tokens of a sequence at which fused attention reaches half of that."""
    memory: float
    """Share of the memory bandwidth that passes over activations reach."""
    elementwise: float
    """Bytes that a block's norms, activations and sums move, over those of a stack that fuses each once."""
    compiled: float
    """Bytes of those that are left where blocks are compiled."""
    operand_bytes: float
    """Share of a product's operand and result traffic that its arithmetic does not hide."""
    launch_s: float
    """Time of one product or fused kernel, however small."""
    host_s: float
    """Time of Python for one pass through one block. A GPU that is faster waits for it; a CPU adds it."""
    expert_host_s: float
    """The same that a layer of experts adds."""
    link: float
    """Share of the link bandwidth inside a node that collectives reach."""
    link_latency_s: float
    """Time of a collective on two ranks inside a node that moves nothing."""
    nic: float
    """Share of the network bandwidth between nodes that collectives reach."""
    nic_latency_s: float
    """Time of a collective between nodes that moves nothing, for each doubling of the nodes."""
    overlap: float
    """Share of overlappable communication that is hidden while there is computation to hide it."""
    tp_overlap: float
    """Share of tensor-parallel collectives that is hidden where the stack cuts them up."""
    all_to_all: float
    """Share of the bandwidth that expert dispatch reaches, of what rings reach."""
    contention: float
    """Slow-down of computation while it shares the device with communication."""
    step_s: float
    """Time of a step that is in no block: data, logging, clipping."""


def calibrated_device(device_name: str) -> str:
    """The name that calibrations of a device go by: `A100`, `H100`, ... ; memory size and form left out."""
    head = device_name.split("-", maxsplit=1)[0]
    return {"H200": "H100", "H800": "H100", "A800": "A100", "GB200": "B200", "GB300": "B300"}.get(head, head)


def rates_of(workload: Workload) -> Rates:
    """The rates of a workload's device and stack; CPUs have one set, with the cluster's own latencies."""
    cluster = workload.cluster
    if cluster.device != "cpu":
        device = calibrated_device(cluster.device_name)
        return merge_rates(load_calibration(), workload.profile.calibrations, device)
    rates, far = merge_rates(load_calibration(), (), CPU), cluster.nic_latency_s or cluster.link_latency_s
    return dataclasses.replace(rates, link_latency_s=cluster.link_latency_s, nic_latency_s=far)


def merge_rates(tables: dict[str, dict[str, float]], stacks: tuple[str, ...], device: str) -> Rates:
    """Defaults, then the device's, then each stack's, then those of a stack on this device."""
    merged: dict[str, float] = dict(tables["default"])
    own = [name for stack in stacks for name in (f"stack.{stack}", f"stack.{stack}.{device}")]
    for section in (f"device.{device}", *own):
        merged |= tables.get(section, {})
    return Rates(**{field.name: float(merged[field.name]) for field in dataclasses.fields(Rates)})


@functools.lru_cache(maxsize=1)
def load_calibration() -> dict[str, dict[str, float]]:
    """The sections of the calibration, flat."""
    path = resources.files("meshwright.plan.time").joinpath(CALIBRATION_FILE)
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: values for name, values in tables.items() if isinstance(values, dict)}
