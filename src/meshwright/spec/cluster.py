"""The cluster: on what the model is trained.

Figures of devices and links are data files under ``presets/clusters``. ``local`` is this machine: its
devices are its GPUs if it has any, else its cores, one rank and one thread to a core.
"""

from __future__ import annotations

import os
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
    """Devices, their memory and rates, and the links between them."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    device: Literal["cpu", "cuda"]
    """Kind of device."""
    devices_per_node: Count
    """GPUs, or cores, in one machine."""
    memory_bytes: Count
    """Memory of one device."""
    memory_bytes_per_s: Positive
    """Bandwidth of a device's memory."""
    fp32_flops_per_s: Positive
    """Rate of a large float32 matrix product."""
    bf16_flops_per_s: Positive
    """Rate of a large bf16 matrix product: what is reached, not the peak in a data sheet."""
    link_bytes_per_s: Positive
    """Bandwidth of one device's link to others in its node, one direction."""
    link_latency_s: Positive
    """Time of a collective call that moves almost nothing, inside a node."""
    preset: str | None = None
    """Name of a cluster preset; `local` is this machine."""
    file: str | None = None
    """A TOML file with these fields, in place of a preset."""
    nodes: Count = 1
    """Machines."""
    device_name: str = ""
    """What the figures belong to."""
    peak_bf16_flops_per_s: Positive | None = None
    """Peak in the data sheet; MFU is counted against it where it is known."""
    nic_bytes_per_s: Positive | None = None
    """Bandwidth of one device's share of the network between nodes."""
    nic_latency_s: Positive | None = None
    """Time of a collective call that moves almost nothing, between nodes."""
    peak_fp8_flops_per_s: Positive | None = None
    """Dense fp8 peak in the data sheet."""
    peak_fp4_flops_per_s: Positive | None = None
    """Dense fp4 peak in the data sheet."""
    nodes_per_rack: Count | None = None
    """Nodes behind one switch of full bandwidth; all of them if left out."""
    spine_oversubscription: Annotated[float, Field(ge=1, strict=True)] = 1.0
    """How many times narrower the way between racks is than the links into it."""
    spine_latency_s: Positive | None = None
    """Time of a collective call that moves almost nothing, between racks; nic_latency_s if left out."""
    host_bytes_per_s: Positive = 2.5e10
    """Bandwidth between one device and its host's memory, one direction."""
    host_memory_bytes: Count | None = None
    """Host memory that one device can use for what is offloaded; not limited if left out."""
    storage_bytes_per_s: Positive | None = None
    """Bandwidth of the whole cluster to its checkpoint storage."""
    failure_hours: Positive | None = None
    """Mean hours between failures of one device, its share of host and links included."""
    cost_per_hour: Positive | None = None
    """Price of one device for an hour, in any currency."""
    matmul_flops_per_s: Positive | None = None
    """Peak that MFU is counted against; on `local`, unless probed, measured at the start if left out."""
    basis: str = ""
    """Where the figures come from."""
    probed: Probed | None = None
    """What `meshwright probe` measured on a device; steps of its kind are then predicted from that."""

    @property
    def world_size(self) -> int:
        """Devices in the whole cluster."""
        return self.nodes * self.devices_per_node


def count_cores() -> int:
    """Cores that this process may use: its affinity, within the limit of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _cgroup("cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _cgroup(name: str) -> str:
    """A limit of the container that this process runs in, if there is one (cgroup v2)."""
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
    """Memory that processes of this machine may still take."""
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
