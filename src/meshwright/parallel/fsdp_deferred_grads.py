"""Weight gradients that a split backward pass computes after FSDP2's backward hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from meshwright.models.decoder import Decoder
from meshwright.models.dtypes import AUTOCAST_DTYPES
from meshwright.parallel.fsdp import set_gradient_sync
from meshwright.spec.job import Job

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class DeferredShardGrads:
    """Accumulates and reduces the deferred weight gradients of a stage's FSDP-sharded linears.

    During the backward pass FSDP2 keeps the gradients of a block unsharded and reduces nothing. The deferred
    gradients are added here. Then the block's gradients are reduce-scattered, as at the end of a backward
    pass. No weight is gathered for it. Uses private parts of FSDP2 that 2.11 and 2.13 have.
    """

    def __init__(self, stage: Decoder) -> None:
        self._stage = cast("FSDPModule", stage)
        self._blocks = [cast("FSDPModule", block) for block in stage.list_blocks()]
        self._fsdp_param_of = {
            (fsdp_param._module_info.module, fsdp_param._module_info.param_name): fsdp_param
            for block in self._blocks
            for fsdp_param in _fsdp_params(block)
        }

    def defer_reduction(self) -> None:
        """Start a backward pass: blocks reduce nothing and keep gradients in float32."""
        for block in self._blocks:
            block.set_requires_gradient_sync(False, recurse=False)
        for fsdp_param in self._fsdp_param_of.values():
            fsdp_param.reduce_dtype = torch.float32

    def add(self, linear: nn.Module, name: str, gradient: Tensor) -> None:
        """Accumulate the gradient of one parameter of a linear."""
        fsdp_param = self._fsdp_param_of[linear, name]
        _accumulate_float32(fsdp_param)
        if fsdp_param.unsharded_accumulated_grad is None:
            fsdp_param.unsharded_accumulated_grad = gradient.float()
        else:
            fsdp_param.unsharded_accumulated_grad += gradient

    def reduce(self, job: Job, last: bool) -> None:
        """Reduce the blocks' gradients of a micro-batch, which are now complete.

        The root group was reduced in the backward pass.
        """
        set_gradient_sync(self._stage, job, last)
        self._stage.set_requires_gradient_sync(False, recurse=False)
        self._stage.set_reshard_after_backward(False)  # the root is resharded already, or still needed
        for block in self._blocks:
            # FSDP2 drops a reduce_dtype that equals the parameters' dtype; these gradients are float32.
            _param_group(block)._reduce_dtype = AUTOCAST_DTYPES.get(job.compression.kind, torch.float32)
            for fsdp_param in _fsdp_params(block):
                _accumulate_float32(fsdp_param)
                if (
                    fsdp_param.unsharded_accumulated_grad is None
                ):  # a norm, reduced with an earlier micro-batch
                    fsdp_param.unsharded_accumulated_grad = torch.zeros_like(
                        fsdp_param._unsharded_param, dtype=torch.float32
                    )
        self._stage._get_fsdp_state()._root_post_backward_final_callback()


def _fsdp_params(block: FSDPModule) -> list[Any]:
    return list(_param_group(block).fsdp_params)


def _param_group(block: FSDPModule) -> Any:
    group = block._get_fsdp_state()._fsdp_param_group
    assert group is not None, "a block has parameters"
    return group


def _accumulate_float32(fsdp_param: Any) -> None:
    """Move autograd's gradient to a float32 sum that outlives the gathered weight."""
    grad = fsdp_param._unsharded_param.grad
    if grad is not None:
        fsdp_param._unsharded_param.grad = None
        total = fsdp_param.unsharded_accumulated_grad
        fsdp_param.unsharded_accumulated_grad = grad.float() if total is None else total.float() + grad
