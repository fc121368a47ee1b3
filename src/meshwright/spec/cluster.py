"""The cluster: the devices and links that a job runs on.

The figures of devices and links are data files under ``presets/clusters``. ``local`` is this machine: its
devices are its GPUs if it has any, otherwise its CPU cores with one rank and one thread per core.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from meshwright.spec.fields import SECTION_CONFIG, Count, Positive
from meshwright.spec.probed import Probed


@dataclass(frozen=True)
class Cluster:
    """Devices with their memory and rates, and the links between them."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    device: Literal["cpu", "cuda"]
    """Device type."""
    devices_per_node: Count
    """GPUs, or CPU cores, per node."""
    memory_bytes: Count
    """Memory per device."""
    memory_bytes_per_s: Positive
    """Bandwidth of a device's memory."""
    fp32_flops_per_s: Positive
    """Rate of a large float32 GEMM."""
    bf16_flops_per_s: Positive
    """Achieved rate of a large bf16 GEMM, not the peak of the data sheet."""
    link_bytes_per_s: Positive
    """Bandwidth per device to the others of its node, one direction."""
    link_latency_s: Positive
    """Latency of a collective within a node."""
    preset: str | None = None
    """Name of a cluster preset; `local` is this machine."""
    file: str | None = None
    """A TOML file with these fields, instead of a preset."""
    nodes: Count = 1
    """Number of nodes."""
    device_name: str = ""
    """Name of the device that the figures are for."""
    peak_bf16_flops_per_s: Positive | None = None
    """Dense bf16 peak of the data sheet; MFU is relative to it if it is set."""
    nic_bytes_per_s: Positive | None = None
    """Network bandwidth between nodes, per device."""
    nic_latency_s: Positive | None = None
    """Latency of a collective between nodes."""
    peak_fp8_flops_per_s: Positive | None = None
    """Dense fp8 peak of the data sheet."""
    peak_fp4_flops_per_s: Positive | None = None
    """Dense fp4 peak of the data sheet."""
    nodes_per_rack: Count | None = None
    """Nodes per full-bandwidth switch; all nodes if left out."""
    spine_oversubscription: Annotated[float, Field(ge=1, strict=True)] = 1.0
    """Oversubscription of the links between racks."""
    spine_latency_s: Positive | None = None
    """Latency of a collective between racks; nic_latency_s if left out."""
    host_bytes_per_s: Positive = 2.5e10
    """Bandwidth between a device and CPU memory, one direction."""
    host_memory_bytes: Count | None = None
    """CPU memory per device, for offloaded state and in-memory snapshots. Detected on a `local` GPU machine;
    that of a CPU device is its memory_bytes; unlimited elsewhere."""
    storage_bytes_per_s: Positive | None = None
    """Bandwidth of the cluster to its checkpoint storage."""
    failure_hours: Positive | None = None
    """Mean hours between failures per device, with its share of node and links."""
    cost_per_hour: Positive | None = None
    """Price per device and hour, in USD."""
    matmul_flops_per_s: Positive | None = None
    """Reference rate of MFU; measured at the start if left out on `local` without a probe."""
    basis: str = ""
    """Source of the figures."""
    probed: Probed | None = None
    """Measurements of `meshwright probe`; steps of the probed kind are predicted from them."""

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node


def chip_of(device_name: str) -> str:
    """The chip that a device has: the first word of its name with a digit.

    `H100` of the preset's `H100-80GB-SXM` and of the driver's `NVIDIA H100 80GB HBM3`; the whole name if no
    word has a digit.
    """
    words = re.split(r"[^A-Z0-9]+", device_name.upper())
    return next((word for word in words if re.search(r"\d", word)), device_name)


def count_cores() -> int:
    """CPU cores that this process may use: its affinity, capped by the cgroup quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _cgroup("cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _cgroup(name: str) -> str:
    """A cgroup v2 limit of this process, or an empty string."""
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return ""


def find_gpus() -> list[tuple[str, int]]:
    """Name and memory bytes of each visible NVIDIA GPU, found without torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", 1) for line in answer.splitlines() if "," in line]
    gpus = [(name.strip(), int(float(mib)) * 1024**2) for name, mib in rows]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    chosen = [int(part) for part in visible.split(",") if part.strip().isdigit()]
    return [gpus[index] for index in chosen if index < len(gpus)] or gpus[: len(visible.split(","))]


def machine_memory_bytes() -> int:
    """Available memory of this machine, capped by the cgroup limit."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 4 * 1024**3
    kib = {key: int(rest.split()[0]) for key, rest in (line.split(":", 1) for line in lines)}
    available = kib.get("MemAvailable", kib.get("MemTotal", 4 * 1024**2)) * 1024
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit.isdigit() and used.isdigit():
        available = min(available, max(1, int(limit) - int(used)))
    return available
