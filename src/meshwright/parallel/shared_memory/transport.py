"""The shared-memory transport: runs the collectives of process groups whose ranks share a host.

The collective counter calls it for every operator of ``c10d``. It takes the collectives of CPU tensors on its
groups; all others go on to the backend. Whether a call is taken depends on the operator, the dtype, the
reduction and the group, which are the same on all ranks of the group. A call with sizes that no backend
accepts goes on to the backend, which raises an error.
"""

from __future__ import annotations

import functools
import mmap
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

from meshwright.layout.shared_memory import Region
from meshwright.parallel.shared_memory import collectives
from meshwright.parallel.shared_memory.channel import Bytes, Channel, PeerLostError, Peers
from meshwright.parallel.shared_memory.reduction import Reduce, build_reduce, can_reduce
from meshwright.parallel.shared_memory.work import Lane, Observe

Answer = tuple[Callable[[Channel], None], Any, int]
"""What to run on the channel, the result tensors, and the signature of the call."""


class _Group:
    """One process group: its memory, and its calls in order."""

    def __init__(self, channel: Channel, lane: Lane) -> None:
        self.channel, self.lane = channel, lane


class SharedMemoryTransport:
    """The groups of one rank in one generation."""

    def __init__(
        self, memory: mmap.mmap, peers: Peers, timeout_s: float, observe: Observe, spin: bool
    ) -> None:
        """Open the transport.

        Args:
            memory: Memory of all groups.
            peers: The other processes.
            timeout_s: Timeout, in seconds, of a collective.
            observe: Called around what waits for other ranks.
            spin: Whether every rank has a core of its own.
        """
        self._memory: mmap.mmap | None = memory
        self._peers, self._timeout_s = peers, timeout_s
        self._observe, self._spin = observe, spin
        self._groups: dict[str, _Group] = {}
        self._failure: Exception | None = None
        """The first error, without its traceback, which would keep the process groups of the generation."""
        finished: torch.futures.Future[None] = torch.futures.Future()
        finished.set_result(None)
        self._finished = _distributed_c10d._create_work_from_future(finished)  # type: ignore[attr-defined]
        """The work of a call that has run."""
        self._reductions: dict[tuple[torch.dtype, int], Reduce] = {}

    def add_group(self, group: dist.ProcessGroup, region: Region) -> None:
        """Answer the collectives of a group."""
        assert self._memory is not None, "the transport is open"
        channel = Channel(self._memory, region, group.rank(), self._peers, self._timeout_s, self._spin)
        lane = Lane(f"shared memory {group.group_name}", self._observe)
        self._groups[group.group_name] = _Group(channel, lane)

    def abort(self) -> None:
        """Make all collectives raise, those that run and those to come; from any thread."""
        self._peers.aborted = True

    def close(self) -> None:
        """End all threads and free the memory."""
        self._peers.aborted = True
        for group in self._groups.values():
            group.lane.close()
        self._groups = {}
        self._memory = None
        self._peers.close()

    def answer(self, operator: str, group: dist.ProcessGroup, args: Sequence[Any], synchronous: bool) -> Any:
        """Run a collective.

        Args:
            operator: Operator of the ``c10d`` namespace.
            group: The process group.
            args: Arguments of the operator.
            synchronous: Whether the caller waits at once.

        Returns:
            What the operator returns, or None if the backend must run it.
        """
        found = self._groups.get(group.group_name)
        prepare = PREPARE.get(operator)
        answer = None if found is None or prepare is None else prepare(self, found.channel.size, *args)
        if found is None or answer is None:
            return None
        call, result, signature = answer
        channel, timeout_s = found.channel, _read_timeout(operator, args)

        def run() -> None:
            if self._failure is not None:
                raise type(self._failure)(*self._failure.args)
            try:
                channel.begin(signature, timeout_s)
                call(channel)
            except BaseException as error:
                # The ranks of a group do not agree any more: all later calls fail.
                interrupted = PeerLostError(f"a collective was interrupted by {type(error).__name__}")
                self._failure = type(error)(*error.args) if isinstance(error, Exception) else interrupted
                raise

        if synchronous and found.lane.run_now(run):
            work = self._finished
        else:
            work = found.lane.submit(run, _list_tensors(result))
        return work.boxed() if result is None else (result, work.boxed())

    def reduction(self, dtype: torch.dtype, op: int) -> Reduce:
        """The reduction of a dtype."""
        key = dtype, op
        if key not in self._reductions:
            self._reductions[key] = build_reduce(dtype, op)
        return self._reductions[key]


def _prepare_all_reduce(
    transport: SharedMemoryTransport, _: int, tensors: list[Tensor], __: Any, reduce_op: Any, *rest: Any
) -> Answer | None:
    tensor, op = tensors[0], reduce_op.op()
    if len(tensors) != 1 or not _is_dense(tensor) or not can_reduce(tensor.dtype, op):
        return None
    reduce, values = transport.reduction(tensor.dtype, op), _Flat(tensor)

    def call(channel: Channel) -> None:
        collectives.all_reduce(channel, values.bytes, reduce)
        values.write_back()

    return call, tensors, _sign("all_reduce", tensor.dtype, tensor.numel(), op)


def _prepare_reduce_scatter(
    transport: SharedMemoryTransport,
    size: int,
    output: Tensor,
    source: Tensor,
    _: Any,
    reduce_op: Any,
    *rest: Any,
) -> Answer | None:
    op = reduce_op.op()
    if not _are_dense_of_one_dtype(output, source) or not can_reduce(output.dtype, op):
        return None
    if source.numel() != output.numel() * size:
        return None
    reduce, out, parts = (
        transport.reduction(output.dtype, op),
        _Flat(output),
        _split(_Flat(source).bytes, size),
    )

    def call(channel: Channel) -> None:
        collectives.reduce_scatter(channel, out.bytes, parts, reduce)
        out.write_back()

    return call, output, _sign("reduce_scatter", output.dtype, output.numel(), op)


def _prepare_all_gather(
    _: SharedMemoryTransport, size: int, output: Tensor, source: Tensor, *rest: Any
) -> Answer | None:
    if not _are_dense_of_one_dtype(output, source) or output.numel() != source.numel() * size:
        return None
    out, values = _Flat(output), _Flat(source).bytes

    def call(channel: Channel) -> None:
        collectives.all_gather(channel, _split(out.bytes, size), values)
        out.write_back()

    return call, output, _sign("all_gather", source.dtype, source.numel())


def _prepare_all_gather_list(
    _: SharedMemoryTransport, size: int, outputs: list[list[Tensor]], sources: list[Tensor], *rest: Any
) -> Answer | None:
    if len(sources) != 1 or len(outputs) != 1 or not _are_dense_of_one_dtype(*sources, *outputs[0]):
        return None
    if len(outputs[0]) != size or any(output.numel() != sources[0].numel() for output in outputs[0]):
        return None
    outs, values = [_Flat(output) for output in outputs[0]], _Flat(sources[0]).bytes

    def call(channel: Channel) -> None:
        collectives.all_gather(channel, [out.bytes for out in outs], values)
        for out in outs:
            out.write_back()

    return call, outputs, _sign("all_gather", sources[0].dtype, sources[0].numel())


def _prepare_broadcast(
    _: SharedMemoryTransport,
    __: int,
    tensors: list[Tensor],
    ___: Any,
    root: int,
    root_tensor: int,
    *rest: Any,
) -> Answer | None:
    if len(tensors) != 1 or root_tensor or not _is_dense(tensors[0]):
        return None
    tensor, values = tensors[0], _Flat(tensors[0])

    def call(channel: Channel) -> None:
        collectives.broadcast(channel, values.bytes, root)
        values.write_back()

    return call, tensors, _sign("broadcast", tensor.dtype, tensor.numel(), root)


def _prepare_all_to_all(
    _: SharedMemoryTransport,
    size: int,
    output: Tensor,
    source: Tensor,
    __: Any,
    received: list[int],
    sent: list[int],
    *rest: Any,
) -> Answer | None:
    if not _are_dense_of_one_dtype(output, source) or output.dim() == 0:
        return None
    if (received and sum(received) != len(output)) or (sent and sum(sent) != len(source)):
        return None  # the backend raises an error
    out, values = _Flat(output), _Flat(source).bytes

    def call(channel: Channel) -> None:
        collectives.all_to_all(
            channel, _split(out.bytes, size, output, received), _split(values, size, source, sent)
        )
        out.write_back()

    return call, None, _sign("all_to_all", output.dtype, 0)


def _prepare_barrier(_: SharedMemoryTransport, __: int, *rest: Any) -> Answer | None:
    return collectives.barrier, None, _sign("barrier", torch.uint8, 0)


PREPARE: Mapping[str, Callable[..., Answer | None]] = {
    "allreduce_": _prepare_all_reduce,
    "_reduce_scatter_base_": _prepare_reduce_scatter,
    "_allgather_base_": _prepare_all_gather,
    "allgather_": _prepare_all_gather_list,
    "broadcast_": _prepare_broadcast,
    "alltoall_base_": _prepare_all_to_all,
    "barrier": _prepare_barrier,
}
"""The operators that the transport answers."""


class _Flat:
    """The memory of a tensor as a flat array of bytes.

    numpy shares the memory: threads of the transport neither count as uses by autograd nor need its modes.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        flat = self._tensor.contiguous()
        self._is_copy = flat.data_ptr() != self._tensor.data_ptr()
        self.bytes: Bytes = flat.view(-1).view(torch.uint8).numpy()

    def write_back(self) -> None:
        """Write the result to a tensor that is not contiguous."""
        if self._is_copy:
            with torch.inference_mode(self._tensor.is_inference()), torch.no_grad():
                values = torch.from_numpy(self.bytes).view(self._tensor.dtype)
                self._tensor.copy_(values.view(self._tensor.shape))


def _is_dense(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_complex()


def _are_dense_of_one_dtype(*tensors: Tensor) -> bool:
    return all(_is_dense(tensor) and tensor.dtype == tensors[0].dtype for tensor in tensors)


def _split(values: Bytes, size: int, tensor: Tensor | None = None, rows: Sequence[int] = ()) -> list[Bytes]:
    """Parts for each rank: as many rows of the tensor as given, or all equal."""
    if tensor is None or not rows:
        each = len(values) // size
        return [values[i * each : (i + 1) * each] for i in range(size)]
    row_bytes = len(values) // tensor.shape[0] if tensor.shape[0] else 0
    parts, begin = [], 0
    for count in rows:
        parts.append(values[begin : begin + count * row_bytes])
        begin += count * row_bytes
    return parts


@functools.cache
def _find_timeout(operator: str) -> int:
    """The place of the argument ``timeout`` of an operator."""
    arguments = getattr(torch.ops.c10d, operator).default._schema.arguments
    return [argument.name for argument in arguments].index("timeout")


def _read_timeout(operator: str, args: Sequence[Any]) -> float | None:
    """The timeout of a call in seconds; None if it has none. Arguments with default values may be missing."""
    place = _find_timeout(operator)
    milliseconds = args[place] if place < len(args) else -1
    return milliseconds / 1000 if milliseconds > 0 else None


def _sign(op: str, dtype: torch.dtype, numel: int, detail: int = 0) -> int:
    """A checksum of what all ranks of a group must agree on."""
    return zlib.crc32(f"{op} {dtype} {numel} {detail}".encode())


def _list_tensors(result: Any) -> list[Tensor]:
    """The value of the future of a call."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, list) and result and isinstance(result[0], list):
        return result[0]
    return result or []
