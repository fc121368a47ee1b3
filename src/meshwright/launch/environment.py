"""What must be in the environment before torch is imported, so that a user never meets the traps.

Nothing here overrides a variable that the user has set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

SAFE_ISA = "AVX512_CORE_FP16"
STORE_VARIABLE = "MESHWRIGHT_STORE"
"""``host:port`` of a rendezvous store that lives outside the ranks."""
GENERATION_VARIABLE = "MESHWRIGHT_GENERATION"
"""The attempt; keys of the store are kept apart by it."""


def prepare_environment(threads: int, environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set what torch reads on import; returns a sentence for each thing that a user should know."""
    notices: list[str] = []
    if _advertises_amx() and "ONEDNN_MAX_CPU_ISA" not in environ:
        # Virtual machines may advertise AMX without its tile palette; oneDNN then dies with SIGILL in the
        # first bf16 product. Capping the instruction set costs nothing measurable in float32.
        environ["ONEDNN_MAX_CPU_ISA"] = SAFE_ISA
        notices.append(
            f"this processor advertises AMX, which crashes bf16 products on some virtual machines: "
            f"ONEDNN_MAX_CPU_ISA={SAFE_ISA} set for the ranks"
        )
    environ.setdefault("OMP_NUM_THREADS", str(threads))
    # Every rank compiles for itself: a pool of compilers in each would outnumber the cores.
    environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return notices


def loopback_interface() -> str:
    """Name of the loopback interface; gloo binds to it for ranks of one machine."""
    return "lo0" if sys.platform == "darwin" else "lo"


def _advertises_amx() -> bool:
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
