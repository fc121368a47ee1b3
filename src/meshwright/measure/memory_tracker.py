"""Measured memory: live tensor bytes, from torch, not from the operating system.

``state_bytes`` measures the tensors that persist. ``PeakTracker`` traces every operator of one step on CPU
and adds up the live storages. On GPUs the caching allocator has the figures.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

GLOO_RELEASE_S = 0.004
"""Time for gloo's thread to release the buffer of a finished all-gather of FSDP2. Under the tracker the
thread may not get to run, and the buffer would count as live for too long."""
GLOO_RELEASE_LIMIT_S = 2.0
"""Longest wait for gloo's thread to release the tensors of a finished functional collective."""

_COPY = torch.ops.aten.copy_.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default


_CALLS = (torch._ops.OpOverload.__call__.__code__, torch._ops.OpOverload.redispatch.__code__)
_PACKET_CALL = torch._ops.OpOverloadPacket.__call__.__code__


def count_calls(operator: Any) -> int:
    """How many calls of an operator are on the Python stack. Every dispatch mode inside the tracker adds one.

    Each call holds a reference to its arguments in C++. Selective activation checkpointing is such a mode.
    """
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _CALLS:
            count += frame.f_locals["self"] is operator
        elif frame.f_code is _PACKET_CALL:
            count += frame.f_locals["self"] is operator.overloadpacket
        frame = frame.f_back
    return count


def unique_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages of the tensors. A storage that several tensors share counts once, in full."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    # By torch's object, not by address: a fake tensor's storage has none.
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class References(NamedTuple):
    """How many owners a tensor and its storage have in C++; Python counts as one."""

    tensor: int
    storage: int

    @classmethod
    def of(cls, tensor: Tensor) -> References:
        """The present references to a tensor."""
        storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
        return cls(tensor._use_count(), storage)  # type: ignore[attr-defined]  # not in torch's stubs

    def plus(self, tensors: int) -> References:
        """With more owners of the tensor; the storage has the same."""
        return self._replace(tensor=self.tensor + tensors)

    def exceed(self, other: References) -> bool:
        """Whether the tensor or its storage has more owners than before."""
        return self.tensor > other.tensor or self.storage > other.storage


class LocalTensors(Protocol):
    """The tensors of a rank's parameters and gradients."""

    def local_parameters(self) -> Iterable[Tensor]:
        """Parameters."""

    def local_grads(self) -> Iterable[Tensor | None]:
        """Gradients."""


def state_bytes(rank_parameters: LocalTensors, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of this rank's parameters, gradients and optimizer state."""
    moments = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return {
        "parameters": unique_bytes(rank_parameters.local_parameters()),
        "gradients": unique_bytes(rank_parameters.local_grads()),
        "optimizer": unique_bytes(moments),
    }


class PeakTracker(TorchDispatchMode):
    """Peak of the live storage bytes while active, including the given tensors.

    FSDP2 keeps the tensors that it gathers into and resizes their storages. No operator shows that. The
    tracker finds these tensors in the arguments of FSDP2's operators: they grow just before an all-gather is
    copied out to them. It checks their size after every operator until they are freed. With one rank FSDP2
    gathers nothing and copies its shard: then ``list_all_gather_outputs`` names the tensors.
    """

    def __init__(
        self, alive: Iterable[Tensor | None], list_all_gather_outputs: Callable[[], Iterable[Tensor]] = list
    ) -> None:
        """Start from the live tensors.

        Args:
            alive: Tensors that are live already.
            list_all_gather_outputs: Those that FSDP2 gathers into.
        """
        super().__init__()
        self._list_gathered = list_all_gather_outputs
        self._live: dict[int, weakref.ref[Any]] = {}
        self._gathered: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._resizable: set[int] = set()
        self._inputs: list[tuple[Tensor, References]] = []
        self._argument: References | None = None
        self._calls = 0
        self.live_bytes = 0
        self.peak_bytes = 0
        self._initial = list(alive)  # keeps them alive, so that all are counted
        for tensor in self._initial:
            if tensor is not None:
                self._track(tensor)

    def __enter__(self) -> Self:
        """Start tracking."""
        super().__enter__()
        _WAIT(torch.empty(1))  # how many references an argument has without a collective
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then track its outputs. Views and in-place results are not new."""
        kwargs = kwargs or {}
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        given = {id(t.untyped_storage()) for t in tensors}
        if func.namespace == "_c10d_functional" and func is not _WAIT:
            real = (tensor for tensor in tensors if not isinstance(tensor, FakeTensor))
            modes = count_calls(func) - self._calls
            self._inputs += [(tensor, References.of(tensor).plus(-modes)) for tensor in real]
        result = func(*args, **kwargs)
        if self._gathered:
            self._update_gathered()  # first: the operator may have freed some before the result existed
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in given:
                self._track(leaf)
        if func.namespace == "fsdp" and "out" in kwargs and "split" in func.name():
            self._track_gathered(kwargs["out"])
            self._update_gathered()
            time.sleep(GLOO_RELEASE_S)
        elif func is _WAIT and not isinstance(result, FakeTensor):
            self._await_release(result)
        elif func is _COPY:
            self._track_gathered(self._list_gathered())
            self._update_gathered()
        return result

    def _await_release(self, output: Tensor) -> None:
        """Wait until gloo's thread has released the input and the output of a finished functional collective.

        ``wait_tensor`` returns when the result is there. The thread drops its references a little later.
        Until then a tensor without any other reference would count as live.
        """
        if self._argument is None:  # a tensor without a collective
            self._argument, self._calls = References.of(output), count_calls(_WAIT)
        on_stack = self._argument.tensor - 1
        awaited = [(tensor, found.plus(-on_stack)) for tensor, found in self._inputs]
        awaited.append((output, self._argument.plus(count_calls(_WAIT) - self._calls)))
        self._inputs = []
        deadline = time.monotonic() + GLOO_RELEASE_LIMIT_S
        for tensor, without_gloo in awaited:
            while References.of(tensor).exceed(without_gloo) and time.monotonic() < deadline:
                time.sleep(1e-4)  # releases the GIL, which the thread needs

    @property
    def gathered_bytes(self) -> int:
        """Bytes that FSDP2 has gathered and not freed."""
        return sum(size for _, size in self._gathered.values())

    def _track_gathered(self, tensors: Iterable[Tensor]) -> None:
        """Track all-gather outputs by size. In the first step they were created like any other tensor."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if self._live.pop(id(storage), None) is not None:
                self.live_bytes -= storage.nbytes()
            self._resizable.add(id(storage))
            self._gathered.setdefault(id(storage), (weakref.ref(storage), 0))

    def _update_gathered(self) -> None:
        for key, (reference, size) in list(self._gathered.items()):
            storage = reference()
            now = 0 if storage is None else storage.nbytes()
            if now != size:
                self.live_bytes += now - size
                self._gathered[key] = (reference, now)
            if not now:
                del self._gathered[key]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._live or key in self._resizable:
            return
        size = storage.nbytes()

        def leave(_: object) -> None:
            self.live_bytes -= size
            self._live.pop(key, None)

        self._live[key] = weakref.ref(storage, leave)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
