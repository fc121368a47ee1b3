"""Activation checkpointing (``layout.recompute``): what a block saves for its backward pass.

Other names: gradient checkpointing (Hugging Face), recompute (Megatron).

``none`` saves everything, ``full`` only the block's input. ``selective`` saves the outputs of GEMMs and of
attention, which are expensive to recompute, and recomputes norms, RoPE and activation functions, which are
cheap. The output of a block's last GEMM is not saved: nothing in the block's backward pass reads it. With
tensor parallelism the reduced output of a row-parallel GEMM is saved instead of the partial one; gathered
inputs are gathered again.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
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
"""Backends of scaled dot-product attention: one on CPUs, three on CUDA."""
RING_ATTENTION = "meshwright.ring_attention.default"
"""Registered by ``parallel.ring_attention``, a layer above: known here by name only."""
REDUCTION_OPS = frozenset(
    {torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.reduce_scatter_tensor.default}
)
"""Reductions that follow a row-parallel GEMM."""


class _HookPause:
    """Whether checkpointing currently ignores operations, because an excluded hook runs."""

    active = False


class ActivationCheckpointing:
    """Activation checkpointing of one block."""

    def __init__(self, mode: Recompute, saved_gemms: Sequence[bool] = ()) -> None:
        """Set the mode.

        Args:
            mode: ``layout.recompute``.
            saved_gemms: For each GEMM of the block, in order, whether ``selective`` saves its output.
        """
        self.mode = mode
        self.saved_gemms = list(saved_gemms)
        self.saved_reductions: list[bool] = []
        """The same for the reductions of row-parallel GEMMs."""
        self._hook_pause: _HookPause | None = None

    def run(self, compute: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Call a block's computation; save for its backward pass what the mode says."""
        if self.mode == "none" or not torch.is_grad_enabled():
            return compute(*inputs)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # no random numbers
        if self.mode == "selective":
            options["context_fn"] = functools.partial(
                _selective_contexts, self.saved_gemms, self.saved_reductions, self._hook_pause
            )
        elif torch.compiler.is_compiling():
            options["context_fn"] = functools.partial(_full_contexts, self._hook_pause)
        return checkpoint(compute, *inputs, **options)

    def exclude_hooks(self, module: nn.Module) -> None:
        """Hide the forward hooks of a module inside the block from the modes of checkpointing.

        Selective checkpointing, and full checkpointing of compiled blocks, need the same operations in the
        same order in the forward pass and in the recomputation. FSDP hooks that gather parameters run more
        operations in one than in the other. Call this after the hooks are registered.
        """
        pause = self._hook_pause = self._hook_pause or _HookPause()

        def begin(*_: Any) -> None:
            pause.active = True

        def end(*_: Any) -> None:
            pause.active = False

        module.register_forward_pre_hook(begin, prepend=True)
        module.register_forward_pre_hook(end)
        module.register_forward_hook(begin, prepend=True)
        module.register_forward_hook(end)


def apply_activation_checkpointing(model: nn.Module, recompute: Recompute) -> None:
    """Set the mode (``layout.recompute``) of every block of a model."""
    for module in model.modules():
        checkpointing = getattr(module, "checkpointing", None)
        if isinstance(checkpointing, ActivationCheckpointing):
            checkpointing.mode = recompute


class _PausableMode(TorchDispatchMode):
    """A mode of checkpointing that ignores operations inside excluded hooks."""

    def __init__(self, mode: Any, pause: _HookPause) -> None:
        super().__init__()
        self._mode, self._pause = mode, pause

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether torch.compile ignores this mode; it also ignores the modes of selective checkpointing."""
        return True

    @property
    def ac_graph_id(self) -> Any:
        """Set by torch.compile (2.13) on the mode of the forward pass."""
        return self._mode.ac_graph_id

    @ac_graph_id.setter
    def ac_graph_id(self, number: Any) -> None:
        self._mode.ac_graph_id = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation: through the mode, or as it is while paused."""
        if self._pause.active:
            return func(*args, **(kwargs or {}))
        return self._mode.__torch_dispatch__(func, types, args, kwargs or {})


def _selective_contexts(
    saved_gemms: Sequence[bool], saved_reductions: Sequence[bool], pause: _HookPause | None
) -> Any:
    policy = functools.partial(_policy, saved_gemms, saved_reductions, Counter())
    return _pausable(create_selective_checkpoint_contexts(policy), pause)


def _full_contexts(pause: _HookPause | None) -> Any:
    """Contexts of full checkpointing in compiled blocks: nothing is saved.

    Without a policy, torch 2.11 does not mark the operations inside autograd functions for recomputation. It
    then saves the outputs of tensor-parallel collectives and of GEMMs on weight copies.
    """
    return _pausable(create_selective_checkpoint_contexts(_recompute_everything), pause)


def _pausable(modes: Any, pause: _HookPause | None) -> Any:
    return modes if pause is None else tuple(_PausableMode(mode, pause) for mode in modes)


def _recompute_everything(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def _policy(
    saved_gemms: Sequence[bool],
    saved_reductions: Sequence[bool],
    seen: Counter[tuple[str, bool]],
    context: Any,
    operation: Any,
    *_: Any,
    **__: Any,
) -> CheckpointPolicy:
    """Save attention, and GEMMs and reductions by index; forward and recomputation count the same way."""
    kind = "gemm" if operation in GEMM_OPS else "reduction" if operation in REDUCTION_OPS else ""
    if kind:
        number = seen[kind, context.is_recompute]
        seen[kind, context.is_recompute] += 1
        saved = (saved_gemms if kind == "gemm" else saved_reductions)[number]
    else:
        saved = operation in ATTENTION_OPS or str(operation) == RING_ATTENTION
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
