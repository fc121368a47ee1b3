"""Sharded data parallelism: torch's FSDP2 for ZeRO-2 and 3; ZeRO-1 is DDP with a cut optimizer.

The order of wrapping, innermost first, is that of ``plan.sharding.list_groups``: each block is a group, its
routed experts before it where they are cut over other ranks (``plan.axes``), and what lies around the blocks
(embedding, positions, final norm, head) is the last, the root. The root is one group because a tied head is
the embedding, and because the loss reads the head's weight without calling the head. A group is gathered
before its forward pass. Under ZeRO-3 a block is let go after it and gathered again for its backward pass;
under ZeRO-2 it stays until the last backward pass of the step. The root stays from forward to backward in
both.

Shards are float32 masters. Blocks are gathered in the precision of the products, the root in float32, as the
residual stream and the sums of the head's gradient are. Gradients are reduced in float32, or as
``compression.kind`` says; summed, not averaged: the loss is already divided by the global number of target
tokens.

The model comes on the meta device, and a group gets its weights just before it is cut: a rank never holds
more than its shards and one whole group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.layout.axes import EXPERT_SHARD_AXIS, dense_shard_axis, has_expert_axes
from meshwright.layout.fsdp_groups import list_groups
from meshwright.layout.stages import StageSpec
from meshwright.models.activation_checkpointing import exclude_hooks
from meshwright.models.decoder import Decoder
from meshwright.models.dtypes import AUTOCAST_DTYPES
from meshwright.models.init import WeightSource, fill, tie_weights
from meshwright.parallel.full_tensors import is_sharded
from meshwright.parallel.mesh import Mesh
from meshwright.spec.job import Job

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy


def apply_fsdp(network: Decoder, part: StageSpec, job: Job, mesh: Mesh, weights: WeightSource) -> Decoder:
    """Cut a model, or a stage of one, over the ranks of data, group by group, in place."""
    from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: PLC0415  (loaded where something is cut)

    meshes = {False: mesh.fsdp_mesh(dense_shard_axis(job.layout).name)}
    if has_expert_axes(job):
        meshes[True] = mesh.fsdp_mesh(EXPERT_SHARD_AXIS)
    low = AUTOCAST_DTYPES.get(job.train.precision)
    for group in list_groups(part):
        module = network.get_submodule(group.name) if group.block else network
        fill(network, [parameter.name for parameter in group.parameters], weights, mesh.device)
        if not group.block:
            tie_weights(network, job)
        again = group.block and job.layout.zero == 3
        # Inputs stay as they are: the residual stream and the rotary tables are float32 in every precision.
        policy = MixedPrecisionPolicy(
            param_dtype=low if group.block else None,
            reduce_dtype=AUTOCAST_DTYPES.get(job.compression.kind, torch.float32),
            cast_forward_inputs=False,
        )
        _shard_group(
            module, meshes[group.experts], policy, _offload_policy(job, mesh), reshard_after_forward=again
        )
        if group.experts:
            exclude_hooks(module)
    if not is_sharded(network):  # nothing lies around the blocks: it is their root all the same
        _shard_group(network, meshes[False], policy, _offload_policy(job, mesh), reshard_after_forward=False)
    _set_prefetch(network, job.layout.prefetch)
    return network


def _set_prefetch(network: Decoder, depth: int) -> None:
    """While a group is at work, the next ``depth`` blocks are on their way; forward and backward.

    Without asynchronous gathers FSDP2 waits for each where there are no streams. With them a buffer is freed
    as soon as its block is copied out of it, on every device. Uses one private method, which 2.11 has too.
    """
    root, blocks = cast("FSDPModule", network), [_list_units(block) for block in network.list_blocks()]
    root._set_unshard_async_op(True)
    for place, units in enumerate(([root], *blocks)):
        units[0].set_modules_to_forward_prefetch(
            [u for units in blocks[place : place + depth] for u in units]
        )
    blocks.reverse()
    for place, units in enumerate(([root], *blocks)):
        # No names at all would leave it to FSDP2, which then gathers one; what is gathered costs nothing.
        ahead = [u for units in blocks[place : place + depth] for u in units]
        units[0].set_modules_to_backward_prefetch(ahead or [units[0]])
        for experts in units[1:]:
            experts.set_modules_to_backward_prefetch([experts])


def _list_units(block: nn.Module) -> list[FSDPModule]:
    """A block and, where they are cut by themselves, its experts."""
    return [module for module in block.modules() if is_sharded(module)]


def _offload_policy(job: Job, mesh: Mesh) -> OffloadPolicy:
    """Shards on the host, in memory that a GPU copies from while it computes."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy  # noqa: PLC0415  (as above)

    if job.layout.offload != "all":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")


def _shard_group(
    module: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    reshard_after_forward: bool,
) -> None:
    """One group: everything in the module that is not in a group yet."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  (as above)

    cut = fully_shard(
        module,
        mesh=mesh,
        mp_policy=policy,
        offload_policy=offload,
        reshard_after_forward=reshard_after_forward,
    )
    assert is_sharded(cut), "fully_shard gives modules another class"
    cut.set_gradient_divide_factor(1.0)
    cut.set_force_sum_reduction_for_comms(True)  # or gloo is asked for a reduction that it does not have


def set_gradient_sync(module: FSDPModule, job: Job, last: bool) -> None:
    """Say what this micro-batch's backward pass leaves: gradients are reduced and scattered in each.

    With ``accumulate = "deferred"`` they stay whole on the rank until the last one. Replicas of the shards
    are summed in the last one alone, unless they travel in 16 bits: what waits for the other replicas would
    be added up in 16 bits. ZeRO-2 keeps parameters gathered until the last one.
    """
    module.set_requires_gradient_sync(last or job.layout.accumulate == "sharded")
    module.set_requires_all_reduce(last or job.compression.kind != "none")
    module.set_reshard_after_backward(last or job.layout.zero == 3)


class DeferredShardGrads:
    """Gradients of a stage's products that come after its backward pass, which FSDP2 does not know of.

    In the backward pass FSDP2 keeps what a block has; here the rest is added, and the whole is reduced, as at
    the end of a backward pass. No weight is gathered for it. Uses private parts of FSDP2 that 2.11 and 2.13
    have.
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
        """A backward pass begins: nothing of a block is reduced in it, and what is kept stays float32."""
        for block in self._blocks:
            block.set_requires_gradient_sync(False, recurse=False)
        for fsdp_param in self._fsdp_param_of.values():
            fsdp_param.reduce_dtype = torch.float32

    def add(self, product: nn.Module, name: str, gradient: Tensor) -> None:
        """One more gradient."""
        fsdp_param = self._fsdp_param_of[product, name]
        _accumulate_float32(fsdp_param)
        if fsdp_param.unsharded_accumulated_grad is None:
            fsdp_param.unsharded_accumulated_grad = gradient.float()
        else:
            fsdp_param.unsharded_accumulated_grad += gradient

    def reduce(self, job: Job, last: bool) -> None:
        """All blocks have all gradients of a micro-batch: what their backward pass would now do.

        What lies around them had its turn in the backward pass.
        """
        set_gradient_sync(self._stage, job, last)
        self._stage.set_requires_gradient_sync(False, recurse=False)
        self._stage.set_reshard_after_backward(False)  # it was, or is still needed
        for block in self._blocks:
            # FSDP2 forgets a reduce_dtype that is the parameters' own; these gradients are float32.
            _group_of(block)._reduce_dtype = AUTOCAST_DTYPES.get(job.compression.kind, torch.float32)
            for fsdp_param in _fsdp_params(block):
                _accumulate_float32(fsdp_param)
                if (
                    fsdp_param.unsharded_accumulated_grad is None
                ):  # a norm's went with an earlier micro-batch's
                    fsdp_param.unsharded_accumulated_grad = torch.zeros_like(
                        fsdp_param._unsharded_param, dtype=torch.float32
                    )
        self._stage._get_fsdp_state()._root_post_backward_final_callback()


def _fsdp_params(block: FSDPModule) -> list[Any]:
    return list(_group_of(block).fsdp_params)


def _group_of(block: FSDPModule) -> Any:
    group = block._get_fsdp_state()._fsdp_param_group
    assert group is not None, "a block has parameters"
    return group


def _accumulate_float32(fsdp_param: Any) -> None:
    """What autograd has left of a gradient becomes a float32 sum, which outlives the gathered weight."""
    left = fsdp_param._unsharded_param.grad
    if left is not None:
        fsdp_param._unsharded_param.grad = None
        known = fsdp_param.unsharded_accumulated_grad
        fsdp_param.unsharded_accumulated_grad = left.float() if known is None else known.float() + left
