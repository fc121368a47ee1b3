"""Runs collective schedules on tensors: the point-to-point messages of one rank, pipelined in segments.

The program of a rank comes from ``schedule.collective.segments``. Each message is split into segments.
Receives are posted ahead, so that the backend's threads transfer the next segments while this thread adds the
one that has arrived; a segment is passed on as soon as it is complete. All ranks of the group must pass the
same schedule, tensor size and segment size.

The calls are ``isend`` and ``irecv`` of a process group, so that the collective counter counts them and any
backend runs them. On NCCL the steps run one after the other, and the messages of a step are one batch: NCCL
runs the messages of a pair of ranks in the order of the calls, so a receive that is posted ahead would block
the rank's own sends.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.errors import CheckFailedError, Problem, require_argument
from meshwright.schedule.collective.proof import prove_collective
from meshwright.schedule.collective.segments import Segments, split_into_segments
from meshwright.schedule.collective.steps import CollectiveSchedule, Combine, Receive, Send

SEGMENT_BYTES = 8 << 20
"""A message costs about 0.1 ms of CPU time with the counter: smaller segments cost more than they overlap."""
IN_FLIGHT = 2
"""Receives that are posted per peer: one is transferred while the other one is added."""
TAG = 0x5C4E
"""Tag of all messages; other point-to-point calls on the group do not match them."""


class ScheduleRunner:
    """Runs one schedule over one process group. Keeps the staging buffer, and a program per tensor size."""

    def __init__(
        self,
        schedule: CollectiveSchedule,
        group: dist.ProcessGroup,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        in_flight: int = IN_FLIGHT,
        run_ahead: bool | None = None,
    ) -> None:
        """Prove the schedule.

        Args:
            schedule: Rank r of it is rank r of the group.
            group: Sends and receives all messages.
            segment_bytes: Most bytes of a segment; the same on all ranks.
            in_flight: Receives that are posted, per peer of a step.
            run_ahead: Whether segments run ahead of the steps, the same on all ranks; by default on CPUs.

        Raises:
            UserError: The group has another number of ranks, or a size is not positive.
            CheckFailedError: The schedule is not correct.
        """
        require_argument(segment_bytes > 0, "segment_bytes", segment_bytes, "must be positive")
        require_argument(in_flight > 0, "in_flight", in_flight, "must be positive")
        require_argument(
            schedule.ranks == group.size(),
            "schedule.ranks",
            schedule.ranks,
            f"must be the size of the process group, {group.size()}",
        )
        require_proof(schedule)
        self.schedule, self.group = schedule, group
        self._segment_bytes, self._in_flight = segment_bytes, in_flight
        self._run_ahead, self._is_connected = run_ahead, False
        self._programs: dict[tuple[int, int], Segments] = {}
        self._staging = torch.empty(0)

    def __call__(self, tensor: Tensor) -> None:
        """Run the schedule in place; see :func:`run_schedule`."""
        require_argument(tensor.is_contiguous(), "tensor", tuple(tensor.shape), "must be contiguous")
        flat = tensor.detach().view(-1)
        with torch.no_grad():
            if flat.is_cuda and not self._is_connected:
                # Batches use the communicator of the group: also ranks without messages must create it.
                dist.all_reduce(torch.zeros(1, device=flat.device), group=self.group)
                self._is_connected = True
            if self._run_ahead if self._run_ahead is not None else not flat.is_cuda:
                program = self._program(flat)
                _run(program, flat, self._staging_buffer(flat, program.staging_elements), self.group)
            else:
                _run_steps(self.schedule, flat, self._tensor_elements(flat), self.group)

    def _tensor_elements(self, flat: Tensor) -> int:
        """Elements of the tensor of the operation, of which an all-to-all has one per rank in its buffer."""
        tensors = self.schedule.buffer_elements(1)
        require_argument(
            flat.numel() % tensors == 0, "tensor.numel()", flat.numel(), f"must be a multiple of {tensors}"
        )
        return flat.numel() // tensors

    def _program(self, flat: Tensor) -> Segments:
        key = flat.numel(), flat.element_size()
        if key not in self._programs:
            segment = max(1, self._segment_bytes // flat.element_size())
            self._programs[key] = split_into_segments(
                self.schedule, self.group.rank(), self._tensor_elements(flat), segment, self._in_flight
            )
        return self._programs[key]

    def _staging_buffer(self, flat: Tensor, elements: int) -> Tensor:
        staging = self._staging
        if staging.dtype != flat.dtype or staging.device != flat.device or staging.numel() < elements:
            self._staging = staging = torch.empty(elements, dtype=flat.dtype, device=flat.device)
        return staging


def run_schedule(
    schedule: CollectiveSchedule,
    tensor: Tensor,
    group: dist.ProcessGroup,
    *,
    segment_bytes: int = SEGMENT_BYTES,
) -> None:
    """Run a schedule on a tensor, in place; every rank of the group must call it.

    The tensor is the buffer that the chunks of the schedule refer to (``CollectiveSchedule``). For scatter,
    gather, all-gather and reduce-scatter it has the size of the larger of input and output, on every rank.
    For all-to-all it has room for the inputs of all ranks: a rank fills in its own input and receives the
    parts that are for it. Use a :class:`ScheduleRunner` to keep buffers between calls.

    Args:
        schedule: Rank r of it is rank r of the group. It is proved at its first use.
        tensor: Contiguous; changed in place.
        group: Sends and receives all messages.
        segment_bytes: Most bytes of a segment; the same on all ranks.

    Raises:
        UserError: The schedule is for another number of ranks, or a size is not positive.
        CheckFailedError: The schedule is not correct.
    """
    ScheduleRunner(schedule, group, segment_bytes=segment_bytes)(tensor)


@functools.lru_cache(maxsize=64)
def require_proof(schedule: CollectiveSchedule) -> None:
    """Prove a schedule, once.

    Raises:
        CheckFailedError: It is not correct.
    """
    proof = prove_collective(schedule)
    if not proof.proved:
        raise CheckFailedError(*(Problem("collective-not-proved", str(found)) for found in proof.violations))


def _run(program: Segments, flat: Tensor, staging: Tensor, group: dist.ProcessGroup) -> None:
    """Start each message as early as its program allows; complete the receives in order."""
    sends, receives = program.sends, program.receives
    started = 0
    sending: dict[int, dist.Work] = {}
    posted: deque[tuple[dist.Work, Tensor]] = deque()

    def wait_for_sends(numbers: Iterable[int]) -> None:
        for number in numbers:
            sending.pop(number).wait()  # once: gloo would wait forever for a second completion

    for done in range(len(receives) + 1):
        while started < len(sends) and sends[started].after <= done:
            send = sends[started]
            sending[started] = group.send([flat[send.low : send.high]], send.peer, TAG)
            started += 1
        while (number := done + len(posted)) < len(receives) and receives[number].after <= done:
            receive = receives[number]
            if receive.staged_at is None:
                wait_for_sends(receive.after_sends)
                target = flat[receive.low : receive.high]
            else:
                target = staging[receive.staged_at : receive.staged_at + receive.high - receive.low]
            posted.append((group.recv([target], receive.peer, TAG), target))
        if done == len(receives):
            break
        receive, (work, arrived) = receives[done], posted.popleft()
        work.wait()
        if receive.staged_at is not None:
            wait_for_sends(receive.after_sends)
            flat[receive.low : receive.high].add_(arrived)
    wait_for_sends(list(sending))


def _run_steps(schedule: CollectiveSchedule, flat: Tensor, elements: int, group: dist.ProcessGroup) -> None:
    """Run the steps in order; the messages of a step are one batch. What is added arrives in a copy."""
    spans = schedule.spans(elements)

    def find(message: Send | Receive) -> Tensor:
        return flat[spans[message.start][0] : spans[message.stop - 1][1]]

    for step in schedule.rows[group.rank()]:
        messages: list[tuple[Callable[..., dist.Work | None], Tensor, int]]
        messages = [(dist.isend, find(send), send.peer) for send in step.sends]
        adds = []
        for receive in step.receives:
            target = arrived = find(receive)
            if receive.combine is Combine.REDUCE:
                arrived = torch.empty_like(target)
                adds.append((target, arrived))
            messages.append((dist.irecv, arrived, receive.peer))
        batch = [
            dist.P2POp(call, part, group=group, tag=TAG, group_peer=peer)
            for call, part, peer in messages
            if part.numel()
        ]
        for work in dist.batch_isend_irecv(batch) if batch else ():
            work.wait()
        for target, arrived in adds:
            target.add_(arrived)
