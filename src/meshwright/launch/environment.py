"""Environment variables that must be set before torch is imported.

Variables that the user has set are not changed.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

SAFE_ISA = "AVX512_CORE_FP16"
STORE_VARIABLE = "MESHWRIGHT_STORE"
"""File of the rendezvous store; every generation has its own."""
RELAYED_STORE = "relayed"
"""In place of the file: the store of a run on several nodes, which the supervisor holds."""
COLLECTIVE_MEMORY_VARIABLE = "MESHWRIGHT_COLLECTIVE_MEMORY"
"""Generation, and path of the memory for the collectives of the ranks of this host, after a colon."""
NODE_VARIABLE, DEVICE_VARIABLE = "GROUP_RANK", "LOCAL_RANK"
"""Number of the node, and of the device on it; torchrun has the same names."""
TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Set by torchrun alone."""
PEAK_VARIABLE = "MESHWRIGHT_PEAK_FLOPS"
"""The peak FLOP/s of a rank's device, for a process that takes over the rank."""
CALLER_VARIABLES = ("HOME", "XDG_CACHE_HOME")
STORE_PREFIX = "AWS_"
"""Prefix of variables with the address of an object store and its credentials; they never leave their
node."""


def describe_place(environ: Mapping[str, str] = os.environ) -> dict[str, str | int | None]:
    """Host, node and device of this rank; None for what its launcher does not tell, or chooses by itself."""
    chosen = {} if TORCHRUN_VARIABLE in environ else environ  # torchrun does not read the plan
    node, device = chosen.get(NODE_VARIABLE), chosen.get(DEVICE_VARIABLE)
    return {
        "host": socket.gethostname(),
        "node": None if node is None else int(node),
        "device": None if device is None else int(device),
    }


def prepare_environment(threads: int, environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set the variables that torch reads on import; returns notices for the user."""
    notices: list[str] = []
    if _advertises_amx() and "ONEDNN_MAX_CPU_ISA" not in environ:
        # Virtual machines may advertise AMX without its tile palette; oneDNN then fails with SIGILL in the
        # first bf16 GEMM. Capping the instruction set has no measurable cost in float32.
        environ["ONEDNN_MAX_CPU_ISA"] = SAFE_ISA
        notices.append(
            f"this processor advertises AMX, which crashes bf16 GEMMs on some virtual machines: "
            f"ONEDNN_MAX_CPU_ISA={SAFE_ISA} set for the ranks"
        )
    environ.setdefault("OMP_NUM_THREADS", str(threads))
    # Every rank compiles on its own: a compiler pool per rank would oversubscribe the cores.
    environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return notices


def is_of_caller(name: str) -> bool:
    """Whether a variable is that of the node that starts a rank."""
    return name in CALLER_VARIABLES or name.startswith(STORE_PREFIX)


def caller_environment() -> dict[str, str]:
    """Variables that ranks get from the caller: the fork server has the environment of its start."""
    return {name: value for name, value in os.environ.items() if is_of_caller(name)}


def loopback_interface() -> str:
    """Name of the loopback interface, for gloo on one machine."""
    return "lo0" if sys.platform == "darwin" else "lo"


def _advertises_amx() -> bool:
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
