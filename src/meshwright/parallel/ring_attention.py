"""Ring attention (context parallel): ranks share a sequence, and keys and values are passed around a ring.

Each rank keeps its queries. In every ring step it attends to the keys and values that it has, while it sends
them to the next rank and receives those of the previous rank. Outputs of the steps are merged by their
log-sum-exp, which makes the sum exact. In the backward pass keys and values go around the ring again. The
float32 sums of their gradients follow them and are back on their own rank after the last step. The gradients
from a rank's own queries are added there.

Heads go around in up to eight chunks (``layout.ring_chunks``), one after the other. All chunks start to send
before the first one computes, and a later step starts with the first chunk that has arrived. So transfers
overlap with the last step, too, and only the gradients of the last chunk return without overlap.

Positions are in zig-zag order: the sequence is split into twice as many chunks as there are ranks, and rank r
has chunk r and the r-th chunk from the end. Every rank then has the same causal work in every step: all its
queries attend to the first chunk of an earlier rank's keys and none to the second; the second half of its
queries attends to both chunks of a later rank's keys.

Forward and backward are one custom op each: torch.compile does not trace into it, and selective activation
checkpointing saves its output and sends nothing twice.

Shape suffixes: B batch, T tokens of a sequence on this rank, H query heads, K key heads, E head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from meshwright.layout.ring_chunks import list_head_chunks
from meshwright.parallel.attention_block import AttendedSlices, AttentionBlock, find_slices
from meshwright.parallel.context import ContextParallel
from meshwright.parallel.mesh import Mesh
from meshwright.spec.job import Job

HEAD_MULTIPLE = 8
"""CUDA's kernels need a multiple of it as head size."""
MASK_ELEMENTS = 2**24
"""Elements of the document mask that are built at once: 16 MB of booleans, and as many floats."""


def zigzag_positions(length: int, rank: int, ranks: int) -> Tensor:
    """The zig-zag positions of a rank in sequences of ``length``."""
    first, last = torch.arange(length).view(2 * ranks, -1)[[rank, 2 * ranks - 1 - rank]]
    return torch.cat((first, last))


def _find_group(name: str) -> dist.ProcessGroup:
    """A group by its name: custom ops take no objects."""
    return cast(Any, _resolve_process_group)(name)


class RingSendRecv:
    """Sends a tensor to the next rank of the ring and receives one from the previous rank."""

    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        rank, ranks = group.rank(), group.size()
        self._sent, self._received = sent, torch.empty_like(sent)
        following = dist.get_global_rank(group, (rank + 1) % ranks)
        previous = dist.get_global_rank(group, (rank - 1) % ranks)
        # In one call: with NCCL two sends that wait for their receives would deadlock.
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, following, group),
                dist.P2POp(dist.irecv, self._received, previous, group),
            ]
        )

    def wait(self) -> Tensor:
        """The received tensor."""
        for work in self._works:
            work.wait()
        return self._received


class _Ring:
    """The ring steps of one call, on one rank."""

    def __init__(
        self, segments_BT: Tensor | None, length: int, causal: bool, group: str, scale: float | None
    ) -> None:
        """Find the group and the documents of every rank's tokens.

        Args:
            segments_BT: The document of each token of whole sequences.
            length: Tokens of a sequence on this rank.
            causal: Whether positions attend only to earlier ones.
            group: Name of the process group.
            scale: Scale of the scores; by default from the head size.
        """
        self._scale = scale
        self.group = _find_group(group)
        self.rank, self.ranks = self.group.rank(), self.group.size()
        self._length, self._causal = length, causal
        self._segments: list[Tensor] | None = None
        if segments_BT is not None:
            chunks = segments_BT.chunk(2 * self.ranks, dim=1)
            self._segments = [torch.cat((chunks[r], chunks[-1 - r]), 1) for r in range(self.ranks)]

    def send_recv(self, tensor: Tensor) -> RingSendRecv:
        """Start to send to the next rank and to receive from the previous one."""
        return RingSendRecv(tensor, self.group)

    def send_head_chunks(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> list[_HeadChunk]:
        """Start to send this rank's keys and values, one head chunk after the other."""
        heads, groups = k_BKTE.shape[1], q_BHTE.shape[1] // k_BKTE.shape[1]
        return [_HeadChunk(self, k_BKTE, v_BKTE, slice(*run), groups) for run in list_head_chunks(heads)]

    def blocks(self, q_BHTE: Tensor, kv_2BKTE: Tensor, step: int) -> Iterator[AttentionBlock]:
        """The attention of a step for one head chunk: one block, or several where the mask would be large."""
        source = (self.rank - step) % self.ranks
        view = find_slices(self._length, self.rank, source, self._causal)
        if self._segments is None:
            yield AttentionBlock(q_BHTE, kv_2BKTE, view, scale=self._scale)
            return
        segments = self._segments[self.rank], self._segments[source]
        rows = max(1, MASK_ELEMENTS // (len(q_BHTE) * (view.keys.stop - view.keys.start)))
        for first in reversed(range(view.queries.start, view.queries.stop, rows)):  # the longest rows first
            last = min(first + rows, view.queries.stop)
            keys = slice(0, last) if view.causal else view.keys
            part = AttendedSlices(slice(first, last), keys, view.causal)
            yield AttentionBlock(q_BHTE, kv_2BKTE, part, segments, self._scale)


class _HeadChunk:
    """Some key heads, which are sent together, and the query heads that attend to them."""

    def __init__(self, ring: _Ring, k_BKTE: Tensor, v_BKTE: Tensor, keys: slice, groups: int) -> None:
        self.keys, self.queries = keys, slice(keys.start * groups, keys.stop * groups)
        self._ring = ring
        self._kv_2BKTE = torch.stack((k_BKTE[:, keys], v_BKTE[:, keys]))
        self._kv_in_flight = self._send_recv(0)
        self._grads_in_flight: RingSendRecv | None = None

    def next_kv(self, step: int) -> Tensor:
        """The keys and values of a step, each called once. The next rank gets them at the same time."""
        if step:
            assert self._kv_in_flight is not None, "there is a step for every rank"
            self._kv_2BKTE = self._kv_in_flight.wait()
            self._kv_in_flight = self._send_recv(step)
        return self._kv_2BKTE

    def _send_recv(self, step: int) -> RingSendRecv | None:
        return self._ring.send_recv(self._kv_2BKTE) if step < self._ring.ranks - 1 else None

    def send_grads(self, keys: slice, of_k: Tensor, of_v: Tensor) -> None:
        """Add gradients to the sums of the previous ranks, and send the sums on."""
        # They were received while this rank computed.
        is_first = self._grads_in_flight is None
        sums = torch.zeros_like(self._kv_2BKTE, dtype=torch.float32) if is_first else self.wait_grads()
        sums[0][:, :, keys] += of_k
        sums[1][:, :, keys] += of_v
        self._grads_in_flight = self._ring.send_recv(sums)

    def wait_grads(self) -> Tensor:
        """The sums that the previous rank has sent: after the last step those of this rank's keys."""
        assert self._grads_in_flight is not None, "a ring has another rank"
        return self._grads_in_flight.wait()


@torch.library.custom_op("meshwright::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    causal: bool,
    group: str,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries to all ranks' keys. Every rank of the group calls it.

    In each step every rank sends the keys and values that it has to the next rank of the ring.

    Args:
        q: Queries (B, H, T, E).
        k: Keys (B, K, T, E) of the same positions; K divides H.
        v: Values.
        segments: The document of each token of whole sequences, (B, ranks x T); None for one document.
        causal: Whether positions attend only to earlier ones.
        group: Name of the process group.
        scale: Scale of the scores; by default one over the root of the head size.

    Returns:
        The output, with the strides of the queries, and the log-sum-exp of the scores, (B, H, T).
    """
    ring = _Ring(segments, q.shape[2], causal, group, scale)
    out, lse = torch.empty_like(q, dtype=torch.float32), q.new_empty(q.shape[:3], dtype=torch.float32)
    chunks = ring.send_head_chunks(q, k, v)
    for step in range(ring.ranks):
        for chunk in chunks:
            for block in ring.blocks(q[:, chunk.queries], chunk.next_kv(step), step):
                part, part_lse = block.forward()
                seen = block.view.queries
                chunk_out, chunk_lse = out[:, chunk.queries, seen], lse[:, chunk.queries, seen]
                if step == 0:  # this rank's keys come first, and every query sees itself
                    chunk_out.copy_(part)
                    chunk_lse.copy_(part_lse)
                else:
                    _merge(chunk_out, chunk_lse, part, part_lse)
                del part, part_lse, block
    return out.to(q.dtype), lse


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the output of a step into that of the previous steps, in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(part.float(), (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _accumulate(sums: list[Tensor], more: list[Tensor]) -> list[Tensor]:
    """Sum the key and value gradients of several blocks, of which the first has the most keys."""
    if not sums:
        return more
    sums = [one.float() for one in sums]
    for one, other in zip(sums, more, strict=True):
        one[:, :, : other.shape[2]] += other
    return sums


@torch.library.custom_op("meshwright::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    group: str,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of the queries, and of keys and values in one tensor. Every rank of the group calls it.

    In each step every rank sends keys and values, and the float32 sums of their gradients, to the next rank.
    """
    ring = _Ring(segments, q.shape[2], causal, group, scale)
    chunks = ring.send_head_chunks(q, k, v)
    grad_q = torch.zeros_like(q, dtype=torch.float32)
    own_2BKTE = k.new_empty((2, *k.shape), dtype=torch.float32)
    for step in range(ring.ranks):
        for chunk in chunks:
            kv_grads: list[Tensor] = []
            for block in ring.blocks(q[:, chunk.queries], chunk.next_kv(step), step):
                parts = (whole[:, chunk.queries] for whole in (grad, out, lse))
                of_q, *of_kv = block.backward(*parts)
                grad_q[:, chunk.queries, block.view.queries] += of_q
                kv_grads = _accumulate(kv_grads, of_kv)
                keys = block.view.keys  # the same for all blocks of a step > 0
                del of_q, of_kv, block
            if step == 0:
                own_2BKTE[0, :, chunk.keys], own_2BKTE[1, :, chunk.keys] = kv_grads
            else:
                chunk.send_grads(keys, *kv_grads)
            del kv_grads
    for chunk in chunks:
        own_2BKTE[:, :, chunk.keys] += chunk.wait_grads()
    return grad_q.to(q.dtype), own_2BKTE.to(k.dtype)


@ring_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@ring_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), k.new_empty((2, *k.shape))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, segments, ctx.causal, ctx.group, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, segments, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, segments, out, lse = ctx.saved_tensors
    how = (ctx.causal, ctx.group, ctx.scale)
    of_q, of_kv = ring_attention_backward(grad, q, k, v, segments, out, lse, *how)
    return of_q, of_kv[0], of_kv[1], None, None, None, None


ring_attention.register_autograd(_backward, setup_context=_setup_context)


def causal_ring_attention(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, group: str) -> Tensor:
    """Causal ring attention with any head size: CUDA's kernels get heads padded with zeros."""
    width = q.shape[-1]
    missing = -width % HEAD_MULTIPLE if q.is_cuda else 0
    if not missing:
        return ring_attention(q, k, v, segments, True, group)[0]
    q, k, v = (torch.nn.functional.pad(part, (0, missing)) for part in (q, k, v))
    return ring_attention(q, k, v, segments, True, group, width**-0.5)[0][..., :width]


def connect_ring(group: str, device: torch.device) -> None:
    """Send one number to the next rank, so that NCCL connects the ring now."""
    RingSendRecv(torch.zeros(1, device=device), _find_group(group)).wait()


class RingContextParallel(ContextParallel):
    """Zig-zag positions; attention over the ring."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        super().__init__(job, mesh)
        connect_ring(self.name, mesh.device)

    def positions_of(self, rank: int) -> Tensor:
        """Two runs: one from the start and one from the end of the sequence."""
        return zigzag_positions(self.length, rank, self.size)

    def build_mask(self, segments_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """The documents themselves: each ring step builds its own mask."""
        return segments_BT

    def attend(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks."""
        return causal_ring_attention(q_BHTE, k_BKTE, v_BKTE, mask, self.name)
