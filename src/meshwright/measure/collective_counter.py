"""Counts every collective that reaches a process group, by axis, operation and phase.

Every collective of torch is dispatched as an operator of the ``c10d`` namespace, by any caller: DDP's C++
reducer, a hook, functional collectives (DTensor), user code in inference mode. The counter registers a kernel
just above the device kernels (dispatch key ``BackendSelect``, which no mode excludes). It counts and
redispatches. That costs microseconds per collective and nothing for other operators, so it is always on. A
dispatch mode would slow down every operator of every step. The same kernel writes the flight recorder,
and lets a transport run the collective in place of the backend (``parallel.shared_memory``).

The redispatch must release Python's GIL: gloo's threads take the GIL while they hold the lock that enqueuing
needs. ``redispatch`` releases it. A kernel from ``torch.library.get_kernel`` does not, and hangs sometimes.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.measure.flight_recorder import FlightRecorder

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
"""Operators of the ``c10d`` namespace and their names in the audit. Point-to-point counts at the sender."""
RECEIVES = {"recv_": "recv", "recv_any_source_": "recv"}
"""Operators that the flight recorder has and the audit does not count."""

DEVICE_KEYS = {
    device: torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.upper()))
    for device in ("cpu", "cuda")
}
DEVICE_KEYS["meta"] = DEVICE_KEYS["cpu"]  # the device that a kernel sees of a fake tensor, in a dry run
"""The dispatch key of the device kernel, by the device of the tensors."""


class Transport(Protocol):
    """Runs collectives in place of the backend."""

    def answer(
        self, operator: str, group: dist.ProcessGroup, args: tuple[Any, ...], synchronous: bool
    ) -> Any:
        """The return value of the operator, or None if the backend must run it."""

    def close(self) -> None:
        """Free its resources."""


@dataclass(frozen=True)
class RoutedRows:
    """An all-to-all of rows between tokens and experts, as the tokens' rank sees it."""

    side: Literal["input", "output"]
    """The tensor with the rows of the rank's own tokens. The size of the other one depends on the router."""
    dropped: int
    """Rows of its tokens that the router dropped: they are missing in both tensors."""


_routed: ContextVar[RoutedRows | None] = ContextVar("routed", default=None)


@contextlib.contextmanager
def count_routed_rows(rows: RoutedRows) -> Iterator[None]:
    """Count the tensor with the rows of the rank's own tokens for every all-to-all inside."""
    token = _routed.set(rows)
    try:
        yield
    finally:
        _routed.reset(token)


@dataclass
class Tally:
    """Calls and bytes of one axis, operation and phase."""

    calls: int = 0
    bytes: int = 0
    dropped_rows: int = 0
    """Rows of all calls that the router dropped."""


class CollectiveCounter:
    """Counts collectives from ``install`` until ``remove``, under the current ``phase``."""

    def __init__(self, flight: FlightRecorder | None = None) -> None:
        self.phase = "setup"
        self.flight = flight or FlightRecorder()
        self._axes: dict[str, tuple[str, int]] = {}
        self._tallies: defaultdict[tuple[str, str, str, int], Tally] = defaultdict(Tally)
        self._committed: dict[tuple[str, str, str, int], Tally] = {}
        self._occurrences: dict[str, int] | None = None
        self._library: torch.library.Library | None = None
        self.transport: Transport | None = None
        """Runs what it can of the collectives that are counted."""

    def install(self) -> None:
        """Start counting."""
        self._library = torch.library.Library("c10d", "IMPL")
        for operator, name in (OPERATIONS | RECEIVES).items():
            if hasattr(torch.ops.c10d, operator):
                self._library.impl(operator, self._kernel(operator, name), "BackendSelect")

    def remove(self) -> None:
        """Stop counting, and close the transport."""
        if self.transport is not None:
            self.transport.close()
            self.transport = None
        if self._library is not None:
            self._library._destroy()
            self._library = None

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the calls inside under another phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def name_axis(self, group: dist.ProcessGroup, axis: str) -> None:
        """Count calls on ``group`` under ``axis``. A group without an axis counts under its own name."""
        self._axes[group.group_name] = (axis, group.size())

    def rows(self) -> list[dict[str, Any]]:
        """The counts so far, in the audit's format."""
        return _list_rows(self._tallies)

    def commit(self, steps: int, evaluations: int, replica_checks: int = 0) -> None:
        """Keep the counts so far, which are those of whole steps, evaluations and replica checks.

        They can be audited even if the next step fails.
        """
        self._committed = {kind: replace(tally) for kind, tally in self._tallies.items()}
        self._occurrences = {
            "steps": steps,
            "evaluations": evaluations,
            "replica_checks": replica_checks,
        }

    def committed(self) -> dict[str, Any] | None:
        """The fields of the event ``collectives``, from the last ``commit``; None before the first."""
        if self._occurrences is None:
            return None
        return {"rows": _list_rows(self._committed), **self._occurrences}

    def _kernel(self, operator: str, name: str) -> Callable[..., Any]:
        overload = getattr(torch.ops.c10d, operator).default
        names = [argument.name for argument in overload._schema.arguments]
        peer_at = next(
            (i for i, n in enumerate(names) if n in ("src", "dst") and name in ("send", "recv")), -1
        )
        async_at = next((i for i, n in enumerate(names) if n in ("async_op", "asyncOp")), len(names))

        def count_and_redispatch(*args: Any, **kwargs: Any) -> Any:
            peer = args[peer_at] if peer_at >= 0 else -1
            synchronous = len(args) > async_at and not args[async_at]
            group = self._count(name, args, peer, synchronous)
            if self.transport is not None:
                answer = self.transport.answer(operator, group, args, synchronous)
                if answer is not None:
                    return answer
            device = next(_tensors(args)).device.type
            return overload.redispatch(DEVICE_KEYS[device], *args, **kwargs)

        return count_and_redispatch

    def _count(self, op: str, args: tuple[Any, ...], peer: int, synchronous: bool) -> dist.ProcessGroup:
        """Count and record a call; returns its group."""
        group = next(a for a in args if isinstance(a, torch.ScriptObject))
        unboxed = dist.ProcessGroup.unbox(group)
        axis, ranks = self._axes.get(unboxed.group_name, (f"group {unboxed.group_name}", unboxed.size()))
        arguments = [list(_tensors(a)) for a in args if isinstance(a, Tensor | list | tuple)]
        sizes = [sum(t.numel() * t.element_size() for t in tensors) for tensors in arguments]
        largest = max(sizes)
        self.flight.record(axis, unboxed, op, peer, arguments[sizes.index(largest)], synchronous)
        if op == "recv":
            return unboxed
        tally = self._tallies[axis, op, self.phase, ranks]
        tally.calls += 1
        if op == "barrier":
            return unboxed
        routed = _routed.get()
        if routed is None:
            tally.bytes += largest
        else:  # the first two arguments of an all-to-all are its output and its input
            tally.bytes += sizes[0 if routed.side == "output" else 1]
            tally.dropped_rows += routed.dropped
        return unboxed


def _list_rows(tallies: Mapping[tuple[str, str, str, int], Tally]) -> list[dict[str, Any]]:
    return [
        {"axis": axis, "op": op, "phase": phase, "ranks": ranks, **asdict(tally)}
        for (axis, op, phase, ranks), tally in sorted(tallies.items())
    ]


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from _tensors(part)
