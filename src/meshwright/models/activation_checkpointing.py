"""Recomputation: what a block keeps for its backward pass, and what it computes again there.

``none`` keeps everything, ``full`` only the block's input. ``selective`` keeps the outputs of the matrix
products and of attention, which are dear, and computes norms, rotations and activations again, which are
cheap; the last product of a block is not kept, as nothing in the block's backward pass reads its output.
Where ranks share matrices, a product whose sum over the ranks is wanted is not kept, but the sum is; what
was gathered is gathered again.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from meshwright.models.kernels.grouped_gemm import GROUPED_GEMM
from meshwright.spec.layout import Recompute

_aten = torch.ops.aten
GEMM_OPS = frozenset({_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default, GROUPED_GEMM})
ATTENTION_OPS = frozenset(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""Kernels that attention may become: on CPU, and the three of CUDA."""
RING_ATTENTION = "meshwright.ring_attention.default"
"""Ring attention is registered by ``parallel.ring_attention``, which is a layer above: known by its name."""
REDUCTION_OPS = frozenset(
    {torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.reduce_scatter_tensor.default}
)
"""What a split product becomes: the sum over the ranks."""


def apply_activation_checkpointing(model: nn.Module, recompute: Recompute) -> None:
    """Set the mode (``layout.recompute``) of every block of a model."""
    for module in model.modules():
        if hasattr(module, "recompute"):
            cast(Any, module).recompute = recompute


def checkpoint_block(
    compute: Callable[..., Tensor],
    recompute: Recompute,
    products: Sequence[bool],
    sums: Sequence[bool],
    *inputs: Any,
) -> Tensor:
    """Call a block's computation so that it keeps what the mode says.

    Args:
        compute: The block.
        recompute: The mode.
        products: For each matrix product of the block, in order, whether it is kept.
        sums: For each of those that become a sum over ranks, in order, whether the sum is kept.
        inputs: Of the block.
    """
    if recompute == "none" or not torch.is_grad_enabled():
        return compute(*inputs)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing is drawn
    if recompute == "selective":
        options["context_fn"] = functools.partial(_selective_contexts, products, sums)
    return checkpoint(compute, *inputs, **options)


def exclude_hooks(module: nn.Module) -> None:
    """Selective recomputation shall not look at the hooks of a module inside a block.

    It wants the same operations in the same order in both passes. Those that gather a module's parameters
    have more to do in one than in the other. Call it when the module has the hooks.
    """
    module.register_forward_pre_hook(_Pausable.pause, prepend=True)
    module.register_forward_pre_hook(_Pausable.go_on)
    module.register_forward_hook(_Pausable.pause, prepend=True)
    module.register_forward_hook(_Pausable.go_on)


class _Pausable:
    """A mode of selective recomputation that can be told to look away."""

    paused = False

    @classmethod
    def pause(cls, *_: Any) -> None:
        """A hook."""
        _Pausable.paused = True

    @classmethod
    def go_on(cls, *_: Any) -> None:
        """A hook."""
        _Pausable.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and look at it unless told otherwise."""
        if _Pausable.paused:
            return func(*args, **(kwargs or {}))
        return cast(Any, super()).__torch_dispatch__(func, types, args, kwargs or {})


def _selective_contexts(products: Sequence[bool], sums: Sequence[bool]) -> Any:
    modes = create_selective_checkpoint_contexts(functools.partial(_policy, products, sums, Counter()))
    for mode in modes:
        kind = type(mode)
        mode.__class__ = type(kind.__name__, (_Pausable, kind), {})
    return modes


def _policy(
    products: Sequence[bool],
    sums: Sequence[bool],
    seen: Counter[tuple[str, bool]],
    context: Any,
    operation: Any,
    *_: Any,
    **__: Any,
) -> CheckpointPolicy:
    """Keep attention and the products that are said to be kept, or the sums that they become.

    Forward pass and recomputation count alike.
    """
    kind = "product" if operation in GEMM_OPS else "sum" if operation in REDUCTION_OPS else ""
    if kind:
        number = seen[kind, context.is_recompute]
        seen[kind, context.is_recompute] += 1
        kept = (products if kind == "product" else sums)[number]
    else:
        kept = operation in ATTENTION_OPS or str(operation) == RING_ATTENTION
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
