"""Fully sharded data parallel (ZeRO-2 and ZeRO-3) with torch's FSDP2. ZeRO-1 is in ``zero1``.

FSDP groups, innermost first (``layout.fsdp_groups.list_groups``): routed experts where they are sharded over
other ranks than the dense parameters, then each block, then the root with the rest (embedding, positions,
final norm, head). The root is one group because a tied head is the embedding, and because the loss reads the
head's weight without calling the head.

Every rank all-gathers a group before its forward pass: it sends its shard and gets all shards. ZeRO-3
reshards a block after the forward pass (``reshard_after_forward=True``) and gathers it again for the backward
pass. ZeRO-2 keeps it gathered until the last backward pass of the step (``False``); between steps both shard
parameters. The root stays gathered from forward to backward in both. With ``dp_replicate`` (hybrid sharding,
HSDP) gradients are reduce-scattered over the shard axis and all-reduced over the replicas.

Shards are float32 master weights (mixed precision). Blocks are gathered in the autocast dtype, the root in
float32, like the residual stream and the gradient of the head. Gradients are reduced in float32 or as
``compression.kind`` says. They are summed, not averaged: the loss is already divided by the global number of
target tokens.

The model is built on the meta device. A group gets its weights just before it is sharded, so a rank never
holds more than its shards and one full group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.layout.axes import EXPERT_SHARD_AXIS, dense_shard_axis, has_expert_axes
from meshwright.layout.fsdp_groups import list_groups
from meshwright.layout.stages import StageSpec
from meshwright.models.decoder import Decoder
from meshwright.models.dtypes import AUTOCAST_DTYPES
from meshwright.models.init import fill, tie_weights
from meshwright.models.weight_source import WeightSource
from meshwright.parallel.full_tensors import is_sharded
from meshwright.parallel.local_shards import LocalShards
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.rank_parameters import RowShardedParameters
from meshwright.spec.job import Job

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.tensor import DTensor


def apply_fsdp(decoder: Decoder, stage: StageSpec, job: Job, mesh: Mesh, weights: WeightSource) -> Decoder:
    """Initialize and shard a decoder or a pipeline stage, group by group, in place."""
    from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: PLC0415  (slow; only sharded layouts)

    meshes = {False: mesh.fsdp_mesh(dense_shard_axis(job.layout).name)}
    if has_expert_axes(job):
        meshes[True] = mesh.fsdp_mesh(EXPERT_SHARD_AXIS)
    offload = _offload_policy(job, mesh)
    for group in list_groups(stage):
        module = decoder.get_submodule(group.name) if group.block else decoder
        names = [parameter.name for parameter in group.parameters]
        # The rows of other ranks stay uninitialized: fully_shard drops them.
        shard = meshes[group.experts].get_local_rank(-1), meshes[group.experts].size(-1)
        fill(decoder, names, weights, mesh.device, *shard)
        if not group.block:
            tie_weights(decoder, job)
        # Inputs are not cast: the residual stream and the RoPE tables are float32 in every precision.
        policy = MixedPrecisionPolicy(
            param_dtype=AUTOCAST_DTYPES.get(job.train.precision) if group.block else None,
            reduce_dtype=AUTOCAST_DTYPES.get(job.compression.kind, torch.float32),
            cast_forward_inputs=False,
        )
        reshard_after_forward = group.block and job.layout.zero == 3
        _shard_group(module, meshes[group.experts], policy, offload, reshard_after_forward)
        if group.experts:
            decoder.find_block(group.name).checkpointing.exclude_hooks(module)
    if not is_sharded(decoder):  # a stage of blocks alone still needs a root
        _shard_group(decoder, meshes[False], policy, offload, reshard_after_forward=False)
    _set_prefetch(decoder, job.layout.prefetch)
    return decoder


def _set_prefetch(decoder: Decoder, depth: int) -> None:
    """All-gather the next ``depth`` blocks while a group computes, in forward and backward passes.

    On CPU, without streams, FSDP2 blocks on each all-gather unless it is asynchronous. With asynchronous
    ones a buffer is freed as soon as its block is copied out, on every device. Uses a private method
    (torch 2.11, 2.13).
    """
    root, blocks = cast("FSDPModule", decoder), [_list_units(block) for block in decoder.list_blocks()]
    root._set_unshard_async_op(True)
    for index, units in enumerate(([root], *blocks)):
        units[0].set_modules_to_forward_prefetch(_flatten(blocks[index : index + depth]))
    blocks.reverse()
    for index, units in enumerate(([root], *blocks)):
        # With an empty list FSDP2 would prefetch one block by itself; naming a gathered unit costs nothing.
        units[0].set_modules_to_backward_prefetch(_flatten(blocks[index : index + depth]) or [units[0]])
        for experts in units[1:]:
            experts.set_modules_to_backward_prefetch([experts])


def _flatten(blocks: list[list[FSDPModule]]) -> list[FSDPModule]:
    return [unit for units in blocks for unit in units]


def _list_units(block: nn.Module) -> list[FSDPModule]:
    """The FSDP modules of a block: itself and, where they are a separate group, its experts."""
    return [module for module in block.modules() if is_sharded(module)]


def _offload_policy(job: Job, mesh: Mesh) -> OffloadPolicy:
    """Where the shards are: on the device or, with ``layout.offload = "all"``, in (pinned) CPU memory."""
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
    """Make one FSDP group of everything in the module that is not in a group yet."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  (as above)

    sharded = fully_shard(
        module,
        mesh=mesh,
        mp_policy=policy,
        offload_policy=offload,
        reshard_after_forward=reshard_after_forward,
    )
    assert is_sharded(sharded), "fully_shard gives modules another class"
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)  # else FSDP2 asks for a reduction that gloo lacks


def set_gradient_sync(module: FSDPModule, job: Job, last: bool) -> None:
    """Set what the backward pass of a micro-batch reduces and reshards.

    Gradients are reduce-scattered in every backward pass. With ``accumulate = "deferred"`` they stay
    unsharded until the last one. The all-reduce over replicas (HSDP) runs in the last one, unless it is in
    16 bits: until then FSDP2 would accumulate in 16 bits, too. ZeRO-2 keeps parameters gathered until the
    last one.
    """
    module.set_requires_gradient_sync(last or job.layout.accumulate == "sharded")
    module.set_requires_all_reduce(last or job.compression.kind != "none")
    module.set_reshard_after_backward(last or job.layout.zero == 3)


class FsdpParameters(RowShardedParameters):
    """ZeRO-2 and ZeRO-3: the local shards of FSDP2's parameters."""

    def __init__(
        self, module: nn.Module, job: Job, mesh: Mesh, local_shards: LocalShards | None = None
    ) -> None:
        super().__init__(module, job, mesh, local_shards)
        self._dtensors = {name: cast("DTensor", p) for name, p in module.named_parameters()}
        self._row_shards = {name: nn.Parameter(_local(p)) for name, p in self._dtensors.items()}

    def local_parameters(self) -> list[Tensor]:
        """The shards."""
        return list(self._row_shards.values())

    def local_grads(self) -> list[Tensor]:
        """The gradient shards: views of the reduce-scatter outputs."""
        return [gradient for gradient in self._gradients().values() if gradient is not None]

    def _gradients(self) -> dict[str, Tensor | None]:
        return {name: None if p.grad is None else _local(p.grad) for name, p in self._dtensors.items()}

    def _max_rows(self, name: str) -> int:
        return -(-self._shapes[name][0] // self._shards(name))

    def assign_shard_grads(self) -> None:
        """Set the gradients of the shards."""
        gradients = self._gradients()
        for name, row_shard in self._row_shards.items():
            row_shard.grad = gradients[name]

    def zero_grads(self) -> None:
        """Drop all gradients."""
        for name, row_shard in self._row_shards.items():
            row_shard.grad = self._dtensors[name].grad = None

    def list_all_gather_outputs(self) -> Iterator[Tensor]:
        """The tensors that FSDP2 gathers into. Uses private attributes of torch 2.11 and 2.13."""
        for part in self.module.modules():
            if is_sharded(part) and (group := part._get_fsdp_state()._fsdp_param_group):
                for parameter in group.fsdp_params:
                    yield from parameter.all_gather_outputs

    def reshard_after_eval(self) -> None:
        """Reshard all parameters that an evaluation gathered."""
        for part in self.module.modules():
            if is_sharded(part):
                part.reshard()


@torch.no_grad()
def _local(tensor: Any) -> Tensor:
    local = tensor.to_local()
    assert isinstance(local, Tensor), "a shard that is not on this rank"
    return local
