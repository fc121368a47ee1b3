"""Ring attention: ranks share a sequence, and keys and values go round until every query has seen all.

Each rank keeps its queries. In every round it attends to the keys and values that it has, while it sends them
to the next rank and receives the previous one's. Results of rounds are merged by their log-sum-exp, which
makes the sum exact. In the backward pass keys and values go round again, and behind them the float32 sums of
their gradients, which come home after the last round; what a rank's own queries add is there already.

Heads go round in up to eight lanes (``plan.context_traffic``), one after the other. All begin to send before
the first one computes, and a later round begins with the first lane that has arrived: so that transfers hide
behind the last round too, and of the gradients' way home only the last lane's is not hidden.

Positions lie in a zig-zag: the sequence is cut into twice as many pieces as there are ranks, and rank r has
piece r and the r-th from the end. So every rank has the same causal work in every round: of an earlier rank's
keys all queries see the first piece and none the second, of a later rank's the second half of the queries
sees both.

It is one operator to torch, forward and backward: the compiler does not look into it, and selective
recomputation keeps what it gave and sends nothing twice.

Shape suffixes: B batch, T tokens of a sequence on this rank, H query heads, K key heads, E head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from meshwright.layout.ring_chunks import list_head_chunks
from meshwright.models.attention import additive_mask

_aten = torch.ops.aten
FLASH_WIDTH, FLASH_CAPABILITY = 256, (8, 0)
"""The widest head of CUDA's fastest kernel, and the oldest device."""
HEAD_MULTIPLE = 8
"""What the width of a head must be a multiple of for CUDA's kernels."""
MASK_ELEMENTS = 2**24
"""Of the mask of documents that is made at once: 16 MB of truth values, and as many numbers to add."""


def zigzag_positions(length: int, rank: int, ranks: int) -> Tensor:
    """The positions of a rank in sequences of ``length``."""
    first, last = torch.arange(length).view(2 * ranks, -1)[[rank, 2 * ranks - 1 - rank]]
    return torch.cat((first, last))


def _find_group(name: str) -> dist.ProcessGroup:
    """A group by its name: operators take no objects."""
    return cast(Any, _resolve_process_group)(name)


class RingSendRecv:
    """A tensor on its way to the next rank, and the previous one's to here."""

    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        rank, ranks = group.rank(), group.size()
        self._sent, self._received = sent, torch.empty_like(sent)
        following = dist.get_global_rank(group, (rank + 1) % ranks)
        previous = dist.get_global_rank(group, (rank - 1) % ranks)
        # Both in one call: with NCCL two sends that wait for their receives would wait for ever.
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, following, group),
                dist.P2POp(dist.irecv, self._received, previous, group),
            ]
        )

    def wait(self) -> Tensor:
        """What has arrived."""
        for work in self._works:
            work.wait()
        return self._received


class _View(NamedTuple):
    """Which queries attend to which of the keys of a round, as slices of the tokens."""

    queries: slice
    keys: slice
    causal: bool


def _view(length: int, rank: int, source: int, causal: bool) -> _View:
    """Of the keys that came from ``source``."""
    everything, half = slice(0, length), length // 2
    if not causal or source == rank:
        return _View(everything, everything, causal)
    if source < rank:
        return _View(everything, slice(0, half), causal=False)
    return _View(slice(half, length), everything, causal=False)


class AttentionBlock:
    """One round: some queries and some keys, through the kernel of the device."""

    def __init__(
        self,
        q_BHTE: Tensor,
        kv_2BKTE: Tensor,
        view: _View,
        segments: tuple[Tensor, Tensor] | None = None,
        scale: float | None = None,
    ) -> None:
        self.view, self._scale = view, scale
        self._q = q_BHTE[:, :, view.queries]
        self._k, self._v = (part[:, :, view.keys] for part in kv_2BKTE)
        self._mask_visible: Tensor | None = None
        if segments is not None:
            of_queries_BT, of_keys_BT = segments[0][:, view.queries], segments[1][:, view.keys]
            self._mask_visible = of_queries_BT.unsqueeze(2) == of_keys_BT.unsqueeze(1)
            if view.causal:
                self._mask_visible = self._mask_visible.tril_(view.queries.start)
        self._groups = q_BHTE.shape[1] // kv_2BKTE.shape[2]

    def forward(self) -> tuple[Tensor, Tensor]:
        """What the queries get, and the log-sum-exp of scores: minus infinity where they see nothing."""
        out, lse = self._kernel()[:2]
        lse = lse[..., : self._q.shape[2]]  # one kernel of CUDA fills it up
        if self._mask_visible is not None:
            lse = lse.masked_fill(~self._mask_visible.any(-1).unsqueeze(1), float("-inf"))
        return out, lse

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values, of the result of **all** rounds and its log-sum-exp."""
        grad, out, lse = (
            grad[:, :, self.view.queries],
            out[:, :, self.view.queries],
            lse[..., self.view.queries],
        )
        causal = self.view.causal and self._mask_visible is None
        if not self._q.is_cuda:
            return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad,
                self._q,
                self._k,
                self._v,
                out,
                lse.contiguous(),
                0.0,
                causal,
                attn_mask=self._mask(),
                scale=self._scale,
            )
        return self._cuda_backward(grad, out, lse.contiguous(), causal)

    def _mask(self) -> Tensor | None:
        return None if self._mask_visible is None else additive_mask(self._mask_visible, self._q.dtype)

    def _kernel(self) -> Any:
        causal = self.view.causal and self._mask_visible is None
        if not self._q.is_cuda:
            return _aten._scaled_dot_product_flash_attention_for_cpu(
                self._q, self._k, self._v, 0.0, causal, attn_mask=self._mask(), scale=self._scale
            )
        k, v = self._repeated()
        if self._is_flash():
            return _aten._scaled_dot_product_flash_attention(self._q, k, v, 0.0, causal, scale=self._scale)
        return _aten._scaled_dot_product_efficient_attention(
            self._q, k, v, self._bias(), True, 0.0, causal, scale=self._scale
        )

    def _is_flash(self) -> bool:
        """Whether CUDA's fastest kernel takes it: 16 bits, no mask, heads not too wide, a new device."""
        takes = (
            self._mask_visible is None and self._q.dtype != torch.float32 and self._q.shape[-1] <= FLASH_WIDTH
        )
        return takes and torch.cuda.get_device_capability(self._q.device) >= FLASH_CAPABILITY

    def _bias(self) -> Tensor | None:
        """The mask for all heads; its rows begin at multiples of 16 bytes, as the kernel wants them."""
        mask = self._mask()
        if mask is None:
            return None
        length, wanted = mask.shape[-1], -(-mask.shape[-1] // 8) * 8
        if length != wanted:
            mask = torch.nn.functional.pad(mask, (0, wanted - length))[..., :length]
        return mask.expand(-1, self._q.shape[1], -1, -1)

    def _repeated(self) -> tuple[Tensor, Tensor]:
        """Keys and values for every query head: these kernels know no groups."""
        if self._groups == 1:
            return self._k, self._v
        return self._k.repeat_interleave(self._groups, 1), self._v.repeat_interleave(self._groups, 1)

    def _cuda_backward(
        self, grad: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Through the same kernel; the one that takes masks reads the result as if packed by token."""
        k, v = self._repeated()
        length, key_length = self._q.shape[2], k.shape[2]
        seed = torch.zeros((2,), dtype=torch.uint64, device="cuda")  # of a dropout that there is not
        offset = torch.zeros((), dtype=torch.uint64, device="cuda")
        if self._is_flash():
            grads = _aten._scaled_dot_product_flash_attention_backward(
                grad,
                self._q,
                k,
                v,
                out,
                lse,
                None,
                None,
                length,
                key_length,
                0.0,
                causal,
                seed,
                offset,
                scale=self._scale,
            )
        else:
            padded = torch.nn.functional.pad(lse, (0, -length % 32), value=float("inf"))
            seed, offset = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))
            bias, wanted = self._bias(), (True, True, True, False)
            grad, out = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in (grad, out))
            grads = _aten._scaled_dot_product_efficient_attention_backward(
                grad,
                self._q,
                k,
                v,
                bias,
                out,
                padded,
                seed,
                offset,
                0.0,
                wanted,
                causal,
                scale=self._scale,
            )
        of_q, of_k, of_v = grads[:3]
        if self._groups > 1:
            of_k, of_v = (g.unflatten(1, (-1, self._groups)).sum(2) for g in (of_k, of_v))
        return of_q, of_k, of_v


class _Ring:
    """The rounds of one call, on one rank."""

    def __init__(
        self, segments_BT: Tensor | None, length: int, causal: bool, group: str, scale: float | None
    ) -> None:
        """Take one's place.

        Args:
            segments_BT: The document of each token, of whole sequences.
            length: Tokens of a sequence on this rank.
            causal: Whether positions see only earlier ones.
            group: Name of the ranks' group.
            scale: Of the scores; by the head size if left out.
        """
        self._scale = scale
        self.group = _find_group(group)
        self.rank, self.ranks = self.group.rank(), self.group.size()
        self._length, self._causal = length, causal
        self._segments: list[Tensor] | None = None
        if segments_BT is not None:
            pieces = segments_BT.chunk(2 * self.ranks, dim=1)
            self._segments = [torch.cat((pieces[r], pieces[-1 - r]), 1) for r in range(self.ranks)]

    def send_recv(self, tensor: Tensor) -> RingSendRecv:
        """Begin to send to the next rank, and to receive from the previous one."""
        return RingSendRecv(tensor, self.group)

    def open_head_groups(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> list[_HeadGroup]:
        """Begin to send the own keys and values, lane by lane."""
        heads, groups = k_BKTE.shape[1], q_BHTE.shape[1] // k_BKTE.shape[1]
        return [_HeadGroup(self, k_BKTE, v_BKTE, slice(*run), groups) for run in list_head_chunks(heads)]

    def blocks(self, q_BHTE: Tensor, kv_2BKTE: Tensor, round_: int) -> Iterator[AttentionBlock]:
        """The work of a round, of one lane: one block, or some where a mask of all would be large."""
        source = (self.rank - round_) % self.ranks
        view = _view(self._length, self.rank, source, self._causal)
        if self._segments is None:
            yield AttentionBlock(q_BHTE, kv_2BKTE, view, scale=self._scale)
            return
        segments = self._segments[self.rank], self._segments[source]
        rows = max(1, MASK_ELEMENTS // (len(q_BHTE) * (view.keys.stop - view.keys.start)))
        for first in reversed(
            range(view.queries.start, view.queries.stop, rows)
        ):  # those that see most first
            last = min(first + rows, view.queries.stop)
            keys = slice(0, last) if view.causal else view.keys
            yield AttentionBlock(
                q_BHTE, kv_2BKTE, _View(slice(first, last), keys, view.causal), segments, self._scale
            )


class _HeadGroup:
    """Some key heads, which go round together, and the query heads that look at them."""

    def __init__(self, ring: _Ring, k_BKTE: Tensor, v_BKTE: Tensor, keys: slice, groups: int) -> None:
        self.keys, self.queries = keys, slice(keys.start * groups, keys.stop * groups)
        self._ring = ring
        self._kv_2BKTE = torch.stack((k_BKTE[:, keys], v_BKTE[:, keys]))
        self._h2d_stream = self._send_recv(0)
        self._grads_in_flight: RingSendRecv | None = None

    def next_kv(self, round_: int) -> Tensor:
        """Keys and values of a round, each asked for once; meanwhile they go on to the next rank."""
        if round_:
            assert self._h2d_stream is not None, "there is a round for every rank"
            self._kv_2BKTE = self._h2d_stream.wait()
            self._h2d_stream = self._send_recv(round_)
        return self._kv_2BKTE

    def _send_recv(self, round_: int) -> RingSendRecv | None:
        return self._ring.send_recv(self._kv_2BKTE) if round_ < self._ring.ranks - 1 else None

    def send_grads(self, keys: slice, of_k: Tensor, of_v: Tensor) -> None:
        """Add gradients of a far round to the sums of the ranks before, and send them on."""
        # They came while this rank was at work.
        sums = (
            self.wait_grads()
            if self._grads_in_flight
            else torch.zeros_like(self._kv_2BKTE, dtype=torch.float32)
        )
        sums[0][:, :, keys] += of_k
        sums[1][:, :, keys] += of_v
        self._grads_in_flight = self._ring.send_recv(sums)

    def wait_grads(self) -> Tensor:
        """The sums that the previous rank has sent; after the last round those of the own keys."""
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
    """Attention of this rank's queries to all ranks' keys; every rank of the group calls it.

    Args:
        q: Queries (B, H, T, E).
        k: Keys (B, K, T, E) of the same positions; K divides H.
        v: Values.
        segments: The document of each token of whole sequences: (B, ranks x T); None if there is one.
        causal: Whether positions see only earlier ones.
        group: Name of the process group.
        scale: Of the scores; one over the root of the head size if left out.

    Returns:
        The mixed values, laid out as the queries are, and the log-sum-exp of the scores, (B, H, T).
    """
    ring = _Ring(segments, q.shape[2], causal, group, scale)
    out, lse = torch.empty_like(q, dtype=torch.float32), q.new_empty(q.shape[:3], dtype=torch.float32)
    head_groups = ring.open_head_groups(q, k, v)
    for round_ in range(ring.ranks):
        for head_group in head_groups:
            for block in ring.blocks(q[:, head_group.queries], head_group.next_kv(round_), round_):
                part, part_lse = block.forward()
                seen = block.view.queries
                group_out, group_lse = out[:, head_group.queries, seen], lse[:, head_group.queries, seen]
                if round_ == 0:  # the own keys come first, and every query sees itself
                    group_out.copy_(part)
                    group_lse.copy_(part_lse)
                else:
                    _merge(group_out, group_lse, part, part_lse)
                del part, part_lse, block
    return out.to(q.dtype), lse


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a round to what the rounds before gave, in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(part.float(), (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _accumulate(sums: list[Tensor], more: list[Tensor]) -> list[Tensor]:
    """Gradients of keys and values of several blocks: of which the first has seen most of them."""
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
    """Gradients of the queries, and of keys and values in one tensor; every rank of the group calls it."""
    ring = _Ring(segments, q.shape[2], causal, group, scale)
    head_groups = ring.open_head_groups(q, k, v)
    grad_q = torch.zeros_like(q, dtype=torch.float32)
    own_2BKTE = k.new_empty((2, *k.shape), dtype=torch.float32)
    for round_ in range(ring.ranks):
        for head_group in head_groups:
            made: list[Tensor] = []
            for block in ring.blocks(q[:, head_group.queries], head_group.next_kv(round_), round_):
                parts = (whole[:, head_group.queries] for whole in (grad, out, lse))
                of_q, *of_kv = block.backward(*parts)
                grad_q[:, head_group.queries, block.view.queries] += of_q
                made, keys = _accumulate(made, of_kv), block.view.keys  # of far rounds always the same
                del of_q, of_kv, block
            if round_ == 0:
                own_2BKTE[0, :, head_group.keys], own_2BKTE[1, :, head_group.keys] = made
            else:
                head_group.send_grads(keys, *made)
            del made
    for head_group in head_groups:
        own_2BKTE[:, :, head_group.keys] += head_group.wait_grads()
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
    way = (ctx.causal, ctx.group, ctx.scale)
    of_q, of_kv = ring_attention_backward(grad, q, k, v, segments, out, lse, *way)
    return of_q, of_kv[0], of_kv[1], None, None, None, None


ring_attention.register_autograd(_backward, setup_context=_setup_context)


def causal_ring_attention(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, group: str) -> Tensor:
    """Causal attention around a ring, with heads of any width: to some kernels zeros are added."""
    width = q.shape[-1]
    missing = -width % HEAD_MULTIPLE if q.is_cuda else 0
    if not missing:
        return ring_attention(q, k, v, segments, True, group)[0]
    q, k, v = (torch.nn.functional.pad(part, (0, missing)) for part in (q, k, v))
    return ring_attention(q, k, v, segments, True, group, width**-0.5)[0][..., :width]


def connect_ring(group: str, device: torch.device) -> None:
    """Send one number to the next rank, so that a backend which connects late does it now."""
    RingSendRecv(torch.zeros(1, device=device), _find_group(group)).wait()
