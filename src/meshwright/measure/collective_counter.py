"""Counts every collective that reaches a process group, by axis, operation and phase.

Each collective of torch, whoever calls it (DDP's C++ reducer, a hook, functional collectives as DTensor
uses them, user code in inference mode), goes through torch's dispatcher as an operator of the ``c10d``
namespace. We put a kernel just above the devices' kernels (the key ``BackendSelect``, which no mode leaves
out): it counts and passes on. That costs microseconds a collective and nothing for other operations, so it
is always on; a dispatch mode would tax every operation of every step.

Passing on must release Python's global lock: gloo's threads take it while they hold the lock that enqueuing
needs. ``redispatch`` does; calling what ``torch.library.get_kernel`` gives does not, and hangs now and then.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

OPERATIONS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
"""Operators of the ``c10d`` namespace and the names that the audit uses; receives count at the sender."""

DEVICE_KEYS = {
    device: torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.upper()))
    for device in ("cpu", "cuda")
}
DEVICE_KEYS["meta"] = DEVICE_KEYS["cpu"]  # what torch shows a kernel of a fake tensor, in a dry run
"""Where a call goes on, by the device of its tensors."""


_declared: ContextVar[int | None] = ContextVar("declared", default=None)


@contextlib.contextmanager
def declare_bytes(size: int) -> Iterator[None]:
    """Calls inside count as so many bytes each, where what is sent depends on the data.

    What the dispatch of tokens to experts counts is a definition: all that leaves a rank if none is dropped.
    """
    token = _declared.set(size)
    try:
        yield
    finally:
        _declared.reset(token)


@dataclass
class Tally:
    """Calls and bytes of one kind."""

    calls: int = 0
    bytes: int = 0


class CollectiveCounter:
    """Counts from ``install`` until ``remove``; ``phase`` says what the process is doing."""

    def __init__(self) -> None:
        self.phase = "setup"
        self._axes: dict[str, tuple[str, int]] = {}
        self._tallies: defaultdict[tuple[str, str, str, int], Tally] = defaultdict(Tally)
        self._library: torch.library.Library | None = None

    def install(self) -> None:
        """Start counting."""
        self._library = torch.library.Library("c10d", "IMPL")
        for operator, name in OPERATIONS.items():
            if hasattr(torch.ops.c10d, operator):
                self._library.impl(operator, self._kernel(operator, name), "BackendSelect")

    def remove(self) -> None:
        """Stop counting."""
        if self._library is not None:
            self._library._destroy()
            self._library = None

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count what is called inside for another phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def name_axis(self, group: dist.ProcessGroup, axis: str) -> None:
        """Calls on ``group`` count for ``axis``; groups without a name count under their own."""
        self._axes[group.group_name] = (axis, group.size())

    def rows(self) -> list[dict[str, Any]]:
        """The counts, as the audit reads them."""
        return [
            {"axis": axis, "op": op, "phase": phase, "ranks": ranks, "calls": t.calls, "bytes": t.bytes}
            for (axis, op, phase, ranks), t in sorted(self._tallies.items())
        ]

    def _kernel(self, operator: str, name: str) -> Callable[..., Any]:
        overload = getattr(torch.ops.c10d, operator).default

        def count_and_pass(*args: Any, **kwargs: Any) -> Any:
            self._count(name, args)
            device = next(_tensors(args)).device.type
            return overload.redispatch(DEVICE_KEYS[device], *args, **kwargs)

        return count_and_pass

    def _count(self, op: str, args: tuple[Any, ...]) -> None:
        group = next(a for a in args if isinstance(a, torch.ScriptObject))
        unboxed = dist.ProcessGroup.unbox(group)
        axis, ranks = self._axes.get(unboxed.group_name, (f"group {unboxed.group_name}", unboxed.size()))
        tally = self._tallies[axis, op, self.phase, ranks]
        tally.calls += 1
        if op != "barrier":
            sizes = [_tensor_bytes(a) for a in args if isinstance(a, Tensor | list | tuple)]
            declared = _declared.get()
            tally.bytes += max(sizes) if declared is None else declared


def _tensor_bytes(argument: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(argument))


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from _tensors(part)
