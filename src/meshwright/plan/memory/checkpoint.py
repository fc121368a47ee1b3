"""Live tensors of a rank while a checkpoint is written.

All of the rank's state is live, with the bf16 weight copies and the cuBLAS workspace. Tensors are gathered
one at a time: first over the shards, then over ``tp`` or ``ep``; then each is checked for non-finite values
(``checkpoint.tensors``).
"""

from __future__ import annotations

import math

from meshwright.layout.axes import expert_axis, is_expert, state_axis
from meshwright.layout.parameters import FLOAT32_BYTES, Parameter
from meshwright.layout.stages import local_parameter_kinds
from meshwright.layout.tensor_parallel import is_tp_replicated, local_model
from meshwright.plan.memory.compiled import weight_copies_line
from meshwright.plan.memory.ledger import GPU_WORKSPACE_BYTES
from meshwright.spec.execution import uses_bf16_weight_copies
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


def predict_checkpoint(job: Job, pp_rank: int, state_on_device: int) -> int:
    """The peak of live tensors on the ranks of a pipeline stage.

    Args:
        job: With its layout settled.
        pp_rank: The stage's ranks.
        state_on_device: Parameters, gradients and optimizer state that are not offloaded.
    """
    gathered = (_gathered_bytes(job, parameter) for parameter in local_parameter_kinds(job, pp_rank))
    return state_on_device + _step_buffers(job) + max(gathered, default=0)


def _step_buffers(job: Job) -> int:
    """Buffers that live from step to step."""
    model, workspace = local_model(job), GPU_WORKSPACE_BYTES if job.cluster.device == "cuda" else 0
    if not isinstance(model, DecoderModel) or not uses_bf16_weight_copies(job):
        return workspace
    return workspace + weight_copies_line(job, model).bytes


def _gathered_bytes(job: Job, parameter: Parameter) -> int:
    """Temporary bytes while one tensor is gathered."""
    shards, parts = state_axis(job, parameter.name).size, _count_parts(job, parameter.name)
    count = math.prod(parameter.shape)
    held = count * FLOAT32_BYTES
    rows = held + held // shards if shards > 1 else 0
    joined = 2 * parts * held if parts > 1 else 0
    finite = parts * count  # one byte per element
    return rows + joined + finite


def _count_parts(job: Job, name: str) -> int:
    """Over how many ranks of ``tp`` or ``ep`` a tensor is sharded."""
    if is_expert(name):
        return expert_axis(job.layout).size
    return 1 if is_tp_replicated(name) else job.layout.tp
