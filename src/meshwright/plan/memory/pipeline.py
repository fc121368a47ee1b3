"""The peak of a pipeline rank: the peak of the running action plus everything in flight.

A rank saves the activations of every micro-batch between its forward and backward (``stage``). So 1F1B holds
up to ``pp`` micro-batches and GPipe all of them. In addition live:

- the running action at its peak, and the gradients of the rank's other stages;
- **sent** tensors: each lives until a tensor arrives that its receiver made after using it, or the step ends;
  a tensor passed to another stage of the same rank lives until that stage begins;
- the next **receive**, posted ahead while another action runs.

The batches of the whole step are live from its start (on GPUs one is, and the saved part of the others).

What is in flight depends on the schedule alone (``schedule.pipeline.in_flight``), the peak of an action on
the kind of its stage alone: both are cached.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from meshwright.layout.axes import reduces_full_grads
from meshwright.layout.parameters import FLOAT32_BYTES, WIRE_BYTES
from meshwright.layout.pipeline_schedules import in_flight_of
from meshwright.layout.stages import StageSpec, local_parameter_kinds, local_stages
from meshwright.plan.contract import Line
from meshwright.plan.memory.block import BlockSizes
from meshwright.plan.memory.decoder import list_buffers
from meshwright.plan.memory.snapshots import MemorySnapshot, StepMemory
from meshwright.plan.memory.stage import StageMemory
from meshwright.schedule.pipeline.in_flight import InFlight, RankState
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


def walk_pipeline(
    job: Job, pp_rank: int, micro_batch: int, micro_batches: int, rows: Sequence[int] | None = None
) -> StepMemory:
    """The step of a pipeline rank; its peak is the only snapshot.

    Args:
        job: With its layout settled.
        pp_rank: The rank's index on the axis ``pp``.
        micro_batch: Samples of one forward pass.
        micro_batches: Micro-batches of a step.
        rows: Rows that experts read in each of the rank's MoE layers; None for an even share.
    """
    in_flight = in_flight_of(job, micro_batches, pp_rank)
    parts, left, stages = local_stages(job, pp_rank), iter(rows or ()), []
    for part in parts:
        read = None if rows is None else tuple(itertools.islice(left, part.expert_layers))
        stages.append(_size_stage(job, part.representative, micro_batch, in_flight.split_backward, read))
    peak = _find_peak(in_flight, stages, [part.stage for part in parts])
    if reduces_full_grads(job) and job.compression.kind != "none":
        peak = max(peak, _reduction(job, pp_rank), key=lambda snapshot: snapshot.bytes)
    return StepMemory(
        snapshots=(peak,),
        buffers=tuple(_list_buffers(job, stages[0].model, stages[0].sizes, micro_batch, micro_batches)),
        activation_bytes=max(stage.saved for stage in stages),
        touched_bytes=sum(stage.touched for stage in stages),
    )


@functools.lru_cache(maxsize=256)
def _size_stage(
    job: Job, part: StageSpec, micro_batch: int, split: bool, rows: tuple[int, ...] | None
) -> StageMemory:
    """A kind of stage; most stages of a pipeline are identical."""
    return StageMemory(job, part, micro_batch, split, rows)


def _find_peak(in_flight: InFlight, stages: Sequence[StageMemory], numbers: Sequence[int]) -> MemorySnapshot:
    """The largest snapshot along a rank's actions; of equal ones the first.

    Args:
        in_flight: In-flight micro-batches of the rank.
        stages: Stages of the rank.
        numbers: Numbers of these stages in the model.
    """
    tensor, others = stages[0].sizes.residual, _list_others(in_flight.states, stages)
    peaks = [stages[state.stage].peak(state.kind, state.stages[state.stage]) for state in in_flight.states]
    alone = [peak.bytes + gradients + idle for peak, (gradients, idle) in zip(peaks, others, strict=True)]
    each = np.array([*(stage.saved for stage in stages), *(stage.deferred for stage in stages)])
    in_flight_bytes = in_flight.counts[:, :-3] @ each
    tensors = in_flight.counts[:, -3:].sum(axis=1)
    at = int(np.argmax(np.array(alone)[in_flight.state] + in_flight_bytes + tensors * tensor))
    state = int(in_flight.state[at])
    peak, (gradients, idle) = peaks[state], others[state]
    *passes, sent, local, receiving = in_flight.counts[at].tolist()
    number = numbers[in_flight.states[state].stage]
    return replace(
        peak,
        name=f"stage {number}, {peak.name}, micro-batch {in_flight.micro_batch[at]}",
        gradients=peak.gradients + gradients,
        gathered=peak.gathered + idle,
        in_flight=int(in_flight_bytes[at]),
        in_flight_formula=f"{sum(passes)} forward passes whose backward has not run",
        send_buffers=int(tensors[at]) * tensor,
        send_formula=f"({sent} sent + {local} to a local stage + {receiving} receiving) x {tensor}",
    )


def _list_others(states: Sequence[RankState], stages: Sequence[StageMemory]) -> list[tuple[int, int]]:
    """In each state, gradients and gathered parameters of the rank's stages that do not run."""
    shares_embedding = stages[-1].part.shares_embedding  # a tied head is the first stage's embedding
    found = []
    for _, running, stage_states in states:
        others = [(at, stages[at], state) for at, state in enumerate(stage_states) if at != running]
        gradients = sum(stage.idle_grads(state) for _, stage, state in others)
        idle = sum(stage.idle(state, shares_embedding and at == 0) for at, stage, state in others)
        found.append((gradients, idle))
    return found


def _list_buffers(
    job: Job, model: DecoderModel, sizes: BlockSizes, micro_batch: int, micro_batches: int
) -> Iterator[Line]:
    """Tables that the stages of a rank share, and the batches, which on CPU are all in the same memory."""
    batches = micro_batches if job.cluster.device == "cpu" else 1
    for line in list_buffers(job, model, sizes, micro_batch):
        if line.name == "batch":
            yield Line("batches", batches * line.bytes, f"{batches} micro-batches, {line.formula}")
        elif line.name != "document mask":  # every stage makes its own
            yield line


def _reduction(job: Job, pp_rank: int) -> MemorySnapshot:
    """The end of the step: all gradients, and all buckets in their compressed type."""
    count = sum(p.count for p in local_parameter_kinds(job, pp_rank))
    temporary = count * WIRE_BYTES[job.compression.kind]
    return MemorySnapshot("last bucket", 0, temporary, count * FLOAT32_BYTES, "none")
