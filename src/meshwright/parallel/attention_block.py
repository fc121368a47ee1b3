"""Attention of some queries to some keys with its log-sum-exp, forward and backward, on CPU and CUDA.

Shape suffixes: B batch, T tokens of a sequence on this rank, H query heads, K key heads, E head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.models.attention import additive_mask

_aten = torch.ops.aten
FLASH_HEAD_SIZE, FLASH_CAPABILITY = 256, (8, 0)
"""The largest head size of CUDA's flash kernel, and the lowest compute capability."""


class AttendedSlices(NamedTuple):
    """Which queries attend to which keys of a ring step, as slices of the tokens."""

    queries: slice
    keys: slice
    causal: bool


def find_slices(length: int, rank: int, source: int, causal: bool) -> AttendedSlices:
    """The slices of a ring step, for the keys of rank ``source``; see ``ring_attention`` for the zig-zag."""
    everything, half = slice(0, length), length // 2
    if not causal or source == rank:
        return AttendedSlices(everything, everything, causal)
    if source < rank:
        return AttendedSlices(everything, slice(0, half), causal=False)
    return AttendedSlices(slice(half, length), everything, causal=False)


class AttentionBlock:
    """Attention of some queries to some keys, by the device's kernel. A ring step has one or more."""

    def __init__(
        self,
        q_BHTE: Tensor,
        kv_2BKTE: Tensor,
        view: AttendedSlices,
        segments: tuple[Tensor, Tensor] | None = None,
        scale: float | None = None,
    ) -> None:
        self.view, self._scale = view, scale
        self._q = q_BHTE[:, :, view.queries]
        self._k, self._v = (part[:, :, view.keys] for part in kv_2BKTE)
        self._visible: Tensor | None = None
        if segments is not None:
            of_queries_BT, of_keys_BT = segments[0][:, view.queries], segments[1][:, view.keys]
            self._visible = of_queries_BT.unsqueeze(2) == of_keys_BT.unsqueeze(1)
            if view.causal:
                self._visible = self._visible.tril_(view.queries.start)
        self._groups = q_BHTE.shape[1] // kv_2BKTE.shape[2]

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp of the scores: minus infinity where a query sees no key."""
        out, lse = self._kernel()[:2]
        lse = lse[..., : self._q.shape[2]]  # one CUDA kernel pads it
        if self._visible is not None:
            lse = lse.masked_fill(~self._visible.any(-1).unsqueeze(1), float("-inf"))
        return out, lse

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values, from the output and log-sum-exp of **all** ring steps."""
        grad, out, lse = (
            grad[:, :, self.view.queries],
            out[:, :, self.view.queries],
            lse[..., self.view.queries],
        )
        causal = self.view.causal and self._visible is None
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
        return None if self._visible is None else additive_mask(self._visible, self._q.dtype)

    def _kernel(self) -> Any:
        causal = self.view.causal and self._visible is None
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
        """Whether the flash kernel applies: 16 bits, no mask, a supported head size and device."""
        takes = (
            self._visible is None and self._q.dtype != torch.float32 and self._q.shape[-1] <= FLASH_HEAD_SIZE
        )
        return takes and torch.cuda.get_device_capability(self._q.device) >= FLASH_CAPABILITY

    def _bias(self) -> Tensor | None:
        """The mask for all heads. The efficient kernel needs rows that start at multiples of 16 bytes."""
        mask = self._mask()
        if mask is None:
            return None
        length, wanted = mask.shape[-1], -(-mask.shape[-1] // 8) * 8
        if length != wanted:
            mask = torch.nn.functional.pad(mask, (0, wanted - length))[..., :length]
        return mask.expand(-1, self._q.shape[1], -1, -1)

    def _repeated(self) -> tuple[Tensor, Tensor]:
        """Keys and values, repeated for every query head: no kernel here supports grouped-query attention."""
        if self._groups == 1:
            return self._k, self._v
        return self._k.repeat_interleave(self._groups, 1), self._v.repeat_interleave(self._groups, 1)

    def _cuda_backward(
        self, grad: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The backward pass of the forward kernel. The efficient one needs outputs contiguous by token."""
        k, v = self._repeated()
        length, key_length = self._q.shape[2], k.shape[2]
        seed = torch.zeros((2,), dtype=torch.uint64, device="cuda")  # of dropout, which is off
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
