"""Measured memory: live tensor bytes, by asking torch, not the operating system.

``state_bytes`` looks at the tensors that stay. ``PeakTracker`` watches every operation of one step on CPU
and adds up the storages that come and go; on GPUs the allocator already knows.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

GLOO_RELEASE_S = 0.004
"""What gloo's thread gets to let go of a gather or an exchange that has arrived: while every operation is
looked at, it may not come to run, and the buffer would outlive its use by as long."""

_COPY = torch.ops.aten.copy_.default


def unique_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the memory that the tensors keep: a buffer that several share counts once, and wholly."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    # Known by torch's own object: a fake tensor's storage has no address.
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class LocalState(Protocol):
    """The tensors of a rank's parameters and gradients."""

    def local_parameters(self) -> Iterable[Tensor]:
        """Parameters."""

    def local_grads(self) -> Iterable[Tensor | None]:
        """Gradients."""


def state_bytes(sharded_state: LocalState, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Parameters, gradients and optimizer state of this rank, to the byte."""
    moments = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return {
        "parameters": unique_bytes(sharded_state.local_parameters()),
        "gradients": unique_bytes(sharded_state.local_grads()),
        "optimizer": unique_bytes(moments),
    }


class PeakTracker(TorchDispatchMode):
    """Largest sum of live storages while active, the given ones included from the start.

    FSDP2 keeps the tensors that it gathers into and resizes their storages, which no operation shows. They
    are known from its operators' arguments: they grow just before a gather is copied out to them, and are
    looked at after every operation until they are let go. Where a rank is alone and has nothing to gather,
    its own part is copied, as anything might be: then whoever knows those tensors is asked.
    """

    def __init__(
        self, alive: Iterable[Tensor | None], list_all_gather_outputs: Callable[[], Iterable[Tensor]] = list
    ) -> None:
        """Begin with what lives.

        Args:
            alive: Tensors that live already.
            list_all_gather_outputs: Those that FSDP2 gathers into.
        """
        super().__init__()
        self._list_gathered = list_all_gather_outputs
        self._live: dict[int, weakref.ref[Any]] = {}
        self._gathered: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._resizable: set[int] = set()
        self._exchanging = False
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known = list(alive)  # held, so that none of them leaves uncounted
        for tensor in self._known:
            if tensor is not None:
                self._enter(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then count what it made; views and in-place results are not new."""
        kwargs = kwargs or {}
        given = {id(t.untyped_storage()) for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **kwargs)
        if self._gathered:
            self._look_at_gathered()  # first: what was let go meanwhile did not live beside the result
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in given:
                self._enter(leaf)
        if func.namespace == "fsdp" and "out" in kwargs and "split" in func.name():
            self._expect_resizing(kwargs["out"])
            self._look_at_gathered()
            time.sleep(GLOO_RELEASE_S)
        elif func.namespace == "_c10d_functional":
            arrived = self._exchanging and "wait_tensor" in func.name()
            self._exchanging = "all_to_all" in func.name()
            if arrived:
                time.sleep(GLOO_RELEASE_S)
        elif func is _COPY:
            self._expect_resizing(self._list_gathered())
            self._look_at_gathered()
        return result

    @property
    def gathered_bytes(self) -> int:
        """What FSDP2 has gathered and not let go."""
        return sum(size for _, size in self._gathered.values())

    def _expect_resizing(self, tensors: Iterable[Tensor]) -> None:
        """What a gather is copied out to; in the first step it has just been made, as any other tensor."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if self._live.pop(id(storage), None) is not None:
                self.live_bytes -= storage.nbytes()
            self._resizable.add(id(storage))
            self._gathered.setdefault(id(storage), (weakref.ref(storage), 0))

    def _look_at_gathered(self) -> None:
        for key, (reference, size) in list(self._gathered.items()):
            storage = reference()
            now = 0 if storage is None else storage.nbytes()
            if now != size:
                self.live_bytes += now - size
                self._gathered[key] = (reference, now)
            if not now:
                del self._gathered[key]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _enter(self, tensor: Tensor) -> None:
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
