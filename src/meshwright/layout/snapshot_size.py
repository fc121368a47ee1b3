"""Bytes of in-memory snapshots: the format that a rank writes, and the size that the plan predicts.

Each rank has memory for two snapshots, which are written in turn (``launch.snapshot_slots``,
``checkpoint.state_snapshots``)::

    header | slot 0: counters, tensors | slot 1: counters, tensors

Every tensor begins at a multiple of 64 bytes, every slot at a multiple of 4096. The tensors are the
parameters in the memory of the rank, the optimizer state of its shard, running means and variances of batch
norm, and the selection biases of experts. Their room is also reserved if ``train.balance_rate=0`` keeps them
fixed or the run has none: a checkpoint that is loaded later may have some. The planner calls
:func:`slot_bytes` and :func:`reserved_bytes` with the predicted sizes of the tensors, the rank with the real
ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from meshwright.layout.fsdp_groups import count_sharded
from meshwright.layout.optimizer_state import STEP_COUNT, rule_of, state_keys
from meshwright.layout.parameters import FLOAT32_BYTES, Parameter, selection_bias_shape
from meshwright.layout.resnet_shapes import list_convs
from meshwright.layout.stages import local_parameter_kinds, pp_rank_of
from meshwright.spec.job import Job
from meshwright.spec.model import ResNetModel

SLOTS = 2
HEADER_BYTES = 4096
"""In front of the slots: which step each of them holds."""
COUNTER_BYTES = 4096
"""At the start of a slot: counters and loss scale, as JSON."""
SLOT_ALIGNMENT = 4096
TENSOR_ALIGNMENT = 64


def align(size: int, alignment: int) -> int:
    """The next multiple of ``alignment``."""
    return -(-size // alignment) * alignment


def slot_bytes(tensor_bytes: Iterable[int]) -> int:
    """Bytes of one slot, from the bytes of each tensor."""
    tensors = sum(align(size, TENSOR_ALIGNMENT) for size in tensor_bytes)
    return align(COUNTER_BYTES + tensors, SLOT_ALIGNMENT)


def slot_start(slot: int, size: int) -> int:
    """Where a slot begins in the memory of a rank.

    Args:
        slot: Its number.
        size: Bytes of each slot.
    """
    return HEADER_BYTES + slot * size


def reserved_bytes(slot: int) -> int:
    """Bytes that a rank reserves for slots of this size."""
    return HEADER_BYTES + SLOTS * slot


def keeps_snapshots(job: Job) -> bool:
    """Whether the job asks for snapshots, and may use them."""
    return job.elastic.snapshot_every > 0 and job.elastic.restarts > 0


def predict_snapshot_bytes(job: Job, rank: int) -> int:
    """Bytes that a rank of a job with a complete layout reserves."""
    return reserved_bytes(slot_bytes(_list_tensor_bytes(job, rank)))


def _list_tensor_bytes(job: Job, rank: int) -> list[int]:
    sizes: list[int] = []
    for parameter in local_parameter_kinds(job, pp_rank_of(job, rank)):
        sizes += _list_state_bytes(job, parameter, rank) * parameter.repeats
    model = job.model
    if isinstance(model, ResNetModel) and model.norm == "batch":
        for conv in list_convs(model).convs:
            sizes += [conv.out_channels * FLOAT32_BYTES] * 2
    if (shape := selection_bias_shape(model)) is not None:
        sizes.append(math.prod(shape) * FLOAT32_BYTES)
    return sizes


def _list_state_bytes(job: Job, parameter: Parameter, rank: int) -> list[int]:
    """A parameter and its optimizer state, each as one tensor; of several identical ones, those of one."""
    own = count_sharded(job, parameter, rank) // parameter.repeats
    local = own if job.layout.zero >= 2 else parameter.count // parameter.repeats
    keys = state_keys(rule_of(parameter.name, len(parameter.shape), job.train), job.train)
    counts = [local, *(1 if key == STEP_COUNT else own for key in keys)]
    return [count * FLOAT32_BYTES for count in counts]
