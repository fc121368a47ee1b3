"""Optimizer offload: the state is in CPU memory and is copied through the device during the update.

The state of a bucket of parameters is one flat buffer, pinned with a GPU. In the update a bucket is copied to
a staging buffer on the device, the optimizer updates its parameters with that state, and the buffer is copied
back. Two CUDA streams overlap the copies: while one bucket is updated, the next one is copied in and the last
one out. Optimizers work element by element or matrix by matrix, so buckets do not change the result.

On a CPU the same steps run one after the other, without a benefit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.layout.optimizer_offload import STAGING_BUFFERS, list_state_buckets, staging_sizes
from meshwright.measure.memory_tracker import unique_bytes
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.rank_parameters import RankParameters
from meshwright.spec.job import Job

State = dict[str, Tensor]


@dataclass
class _Bucket:
    """Parameters whose state is copied together."""

    host: Tensor
    """Their state in CPU memory, flat."""
    shapes: dict[nn.Parameter, dict[str, torch.Size]]

    def views(self, flat: Tensor) -> dict[nn.Parameter, State]:
        """The state of each parameter, as views of a flat buffer."""
        found: dict[nn.Parameter, State] = {}
        start = 0
        for parameter, shapes in self.shapes.items():
            found[parameter] = {}
            for key, shape in shapes.items():
                found[parameter][key] = flat[start : start + shape.numel()].view(shape)
                start += shape.numel()
        return found


class OffloadedOptimizerState:
    """Moves the state of an optimizer to CPU memory, and makes its ``step`` work bucket by bucket."""

    def __init__(
        self, optimizer: Optimizer, buckets: Sequence[Sequence[nn.Parameter]], device: torch.device
    ) -> None:
        """Take over the optimizer's state and its ``step``.

        Args:
            optimizer: With its state allocated.
            buckets: Every parameter once.
            device: Device of the parameters.
        """
        self._optimizer, self._optimizer_step = optimizer, optimizer.step
        self._gpu = device.type == "cuda"
        self._buckets = [self._move_to_host(parameters) for parameters in buckets]
        sizes = staging_sizes([bucket.host.numel() for bucket in self._buckets])
        self.staging = [torch.empty(size, device=device) for size in sizes]
        """Device buffers for the buckets in flight; kept, so that an update allocates nothing."""
        if self._gpu:
            self._h2d_stream, self._d2h_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._h2d_done = [torch.cuda.Event() for _ in self.staging]
            self._d2h_done = [torch.cuda.Event() for _ in self.staging]
        optimizer.step = self.step  # type: ignore[method-assign,assignment]

    @property
    def host_buffers(self) -> list[Tensor]:
        """All state in CPU memory."""
        return [bucket.host for bucket in self._buckets]

    @torch.no_grad()
    def step(self) -> None:
        """Step the optimizer bucket by bucket; CPU memory holds the new state when it returns."""
        if self._gpu:
            self._h2d_stream.wait_stream(torch.cuda.current_stream())
        self._copy_to_device(0)
        for index, bucket in enumerate(self._buckets):
            self._copy_to_device(index + 1)
            with self._state_on_device(index, bucket):
                self._optimizer_step()
            self._copy_to_host(index)
        if self._gpu:
            self._d2h_stream.synchronize()

    def _move_to_host(self, parameters: Sequence[nn.Parameter]) -> _Bucket:
        state = {p: dict(self._optimizer.state.get(p, {})) for p in parameters}
        parts = [value.reshape(-1) for values in state.values() for value in values.values()]
        host = torch.cat(parts).cpu() if parts else torch.empty(0)
        bucket = _Bucket(
            host.pin_memory() if self._gpu else host,
            {p: {key: value.shape for key, value in values.items()} for p, values in state.items()},
        )
        self._set_state(bucket.views(bucket.host))
        return bucket

    def _copy_to_device(self, index: int) -> None:
        """Start copying a bucket to its staging buffer, once the previous content was copied back."""
        if index >= len(self._buckets):
            return
        buffer, host = index % STAGING_BUFFERS, self._buckets[index].host
        with torch.cuda.stream(self._h2d_stream if self._gpu else None):
            if self._gpu and index >= STAGING_BUFFERS:
                self._h2d_stream.wait_event(self._d2h_done[buffer])
            self.staging[buffer][: host.numel()].copy_(host, non_blocking=True)
            if self._gpu:
                self._h2d_done[buffer].record()

    @contextmanager
    def _state_on_device(self, index: int, bucket: _Bucket) -> Iterator[None]:
        """Limit the optimizer to the parameters of a bucket, with their state in a staging buffer."""
        if self._gpu:
            torch.cuda.current_stream().wait_event(self._h2d_done[index % STAGING_BUFFERS])
        groups = self._optimizer.param_groups
        all_parameters = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [p for p in group["params"] if p in bucket.shapes]
        self._set_state(bucket.views(self.staging[index % STAGING_BUFFERS]))
        try:
            yield
        finally:
            self._set_state(bucket.views(bucket.host))
            for group, parameters in zip(groups, all_parameters, strict=True):
                group["params"] = parameters

    def _copy_to_host(self, index: int) -> None:
        buffer, host = index % STAGING_BUFFERS, self._buckets[index].host
        if self._gpu:
            self._d2h_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._d2h_stream if self._gpu else None):
            host.copy_(self.staging[buffer][: host.numel()], non_blocking=True)
            if self._gpu:
                self._d2h_done[buffer].record()

    def _set_state(self, state: dict[nn.Parameter, State]) -> None:
        for parameter, values in state.items():
            if values:
                self._optimizer.state[parameter] = values


def build_offloaded_state(
    optimizer: Optimizer, rank_parameters: RankParameters, job: Job, mesh: Mesh
) -> OffloadedOptimizerState | None:
    """Offload the optimizer state with ``layout.offload = "optimizer"``, if there is any state."""
    if job.layout.offload != "optimizer" or not optimizer.state:
        return None
    named = dict(rank_parameters.named_parameters())
    buckets = [[named[name] for name in names] for names in list_state_buckets(job, mesh.rank)]
    return OffloadedOptimizerState(optimizer, buckets, mesh.device)


def offloaded_bytes(
    rank_parameters: RankParameters,
    optimizer: Optimizer,
    offloaded: OffloadedOptimizerState | None,
    job: Job,
    device: torch.device,
) -> dict[str, int]:
    """Bytes of the state in CPU memory, by kind.

    On a CPU all state is in CPU memory. There the offloaded buffers count, or everything with
    ``offload = "all"``.
    """
    moments = [value for state in optimizer.state.values() for value in state.values()]
    kinds = {
        "parameters": rank_parameters.local_parameters(),
        "gradients": rank_parameters.local_grads(),
        "optimizer": moments,
    }
    if device.type == "cpu" and job.layout.offload != "all":
        kinds = {"parameters": [], "gradients": [], "optimizer": offloaded.host_buffers if offloaded else []}
    return {kind: unique_bytes(t for t in found if t.device.type == "cpu") for kind, found in kinds.items()}
