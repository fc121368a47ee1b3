"""Observes the waits of functional collectives, which tensor and expert parallelism use.

They are calls of one operator, also in compiled code. A kernel just above the device kernels measures the
time and redispatches, as that of ``collective_counter``. On GPUs the operator only queues a wait: it takes no
time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WAIT = "wait_tensor"


def observe_functional_waits(begin: Callable[[], object], end: Callable[[], object]) -> torch.library.Library:
    """Call functions at the begin and at the end of each wait; returns what to destroy."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    overload = torch.ops._c10d_functional.wait_tensor.default
    keys = {
        device: torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.upper()))
        for device in ("cpu", "cuda")
    }
    keys["meta"] = keys["cpu"]  # the device that a kernel sees of a fake tensor, in a dry run

    def observed_wait(tensor: Tensor) -> Tensor:
        begin()
        try:
            result: Tensor = overload.redispatch(keys[tensor.device.type], tensor)
        finally:
            end()
        return result

    library.impl(WAIT, observed_wait, "BackendSelect")
    return library
