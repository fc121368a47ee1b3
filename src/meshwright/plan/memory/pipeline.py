"""What a rank of a pipeline holds at its fullest moment, found from what is in flight at each of its actions.

Between a stage's forward and backward pass of a micro-batch lives what ``decoder_memory`` says of its blocks,
for the last stage also the final norm's and the loss's part: the head's gradient, which is made with the
loss. So 1F1B holds up to ``pp`` micro-batches and GPipe all of them. To that comes the action at work, at its
widest point, and:

- gradients, from a stage's first backward pass on;
- what was **sent**: it lives until something arrives that its receiver made after it had used it, or the step
  ends; and what one stage hands to another of the same rank, until that begins;
- the next **receive**, posted ahead while another action is at work;
- where the backward pass is split, for every matrix product of a block its input and its output's gradient,
  from the gradient of the inputs (B) to that of the weights (W); what several products read is held once.

Assumed: a stage's output is not kept for its own backward pass; the batches of the whole step are there from
its start (on GPUs one is, and what is kept of it); a document mask is made by every stage for every
micro-batch; 16-bit copies of weights are made in every forward pass, and kept where nothing is split. With
replicas, gradients are views of buckets and there from the start.

Under ZeRO-2 and 3 ``sharded_memory`` adds to each moment of a stage, and ``split_gradients`` where the
backward pass is split. A stage reads no weights while another one of the rank works, and while it makes
weight gradients. Then its root group is gathered under ZeRO-3 if its last pass was a forward pass; under
ZeRO-2 all its groups are gathered until its last backward pass.

What is in flight depends on the schedule alone (``schedule.in_flight``), the moments of a stage on its kind
alone: both are cached.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.layout.axes import reduces_full_grads
from meshwright.layout.parameters import FLOAT32_BYTES, WIRE_BYTES, list_block, operand_bytes
from meshwright.layout.pipeline_schedules import in_flight_of
from meshwright.layout.stages import StageSpec, local_parameter_kinds, local_stages
from meshwright.plan.contract import Line
from meshwright.plan.memory.decoder import (
    BlockSizes,
    StageBlocks,
    embedding_bytes,
    list_buffers,
    loss_temp_bytes,
    mask_bytes,
    prefetch_window,
    sum_block_grads,
)
from meshwright.plan.memory.feed_forward import INT64_BYTES
from meshwright.plan.memory.fsdp import NORM_TENSORS, FSDPSizes, MicroBatchPass
from meshwright.plan.memory.snapshots import MemorySnapshot, PersistentGrads, find_persistent_grads
from meshwright.plan.memory.split_backward import SplitBackwardGrads
from meshwright.schedule.pipeline.actions import Kind
from meshwright.schedule.pipeline.in_flight import InFlight, RankState, StageState, WeightGrads
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


@dataclass(frozen=True)
class PipelineSnapshot:
    """A moment of a rank's step, with what lives there beside state and what always lives."""

    name: str
    activations: int
    """Of the micro-batch at work."""
    temporary: int
    gradients: int
    formula: str
    gathered: int = 0
    """ZeRO-2 and 3: parameters, and gradients on their way."""
    waiting: int = 0
    """Of the other micro-batches."""
    waiting_formula: str = "none"
    handed: int = 0
    """Sent, handed over, or about to arrive."""
    handed_formula: str = "none"

    @property
    def bytes(self) -> int:
        """All of it."""
        own = self.activations + self.temporary + self.gradients + self.gathered
        return own + self.waiting + self.handed


@dataclass(frozen=True)
class PipelineMemory:
    """A rank's step."""

    top: PipelineSnapshot
    """The fullest moment."""
    buffers: tuple[Line, ...]
    activation_bytes: int
    """The most that one stage keeps of one micro-batch from forward to backward."""
    touched_bytes: int
    """What one micro-batch makes in all stages of the rank, without recomputation."""


def deferred_weight_grad_bytes(model: DecoderModel, sizes: BlockSizes) -> int:
    """Inputs and output gradients of a block's linears, which their weight gradients wait for."""
    elements = 2 * model.hidden_size + 2 * (model.query_size + model.kv_size)
    return sizes.tokens * elements * sizes.low + sizes.feed_forward.late


def _without_copies(sizes: BlockSizes, model: DecoderModel, kept: bool) -> BlockSizes:
    """A product that puts off its weight's gradient keeps the weight itself, and no 16-bit copy of it."""
    if not sizes.copies:
        return sizes
    half = model.hidden_size * (model.query_size + 2 * model.kv_size) * sizes.low
    waiting = sizes.waiting - (sizes.copies if kept else 0)
    return replace(
        sizes,
        copies=0,
        block=sizes.block - sizes.copies,
        waiting=waiting,
        saved_formula=f"{waiting} a block" if kept else sizes.saved_formula,
        attention=sizes.attention - half,
        turning=max(0, sizes.turning - half),
    )


class _Stage:
    """One stage: what it keeps, and the moments of its actions."""

    def __init__(
        self, job: Job, part: StageSpec, micro_batch: int, split: bool, rows: Sequence[int] | None
    ) -> None:
        """Of one stage.

        Args:
            job: With its layout settled.
            part: The stage.
            micro_batch: Samples of one forward pass.
            split: Whether the backward pass is.
            rows: That experts read in each of its layers with experts; None for an even share of all.
        """
        assert isinstance(part.model, DecoderModel), "the legality table cuts decoders only"
        self.job, self.part, self.model, self.split = job, part, part.model, split
        kept = job.layout.recompute == "none"
        self.stack = StageBlocks.of(job, self.model, part.layers, micro_batch, rows)
        self.copies = self.stack.copies if split or not kept else 0
        """16-bit copies of weights that live until a forward pass ends, and are not kept."""
        if split:
            self.stack = self.stack.replace(lambda block: _without_copies(block, self.model, kept))
        self.sizes = self.stack.last
        self.shards = FSDPSizes.of(job, part) if job.layout.zero >= 2 else None
        self.layers, self.persistent_grads = len(part.layers), find_persistent_grads(job)
        size = sum(p.count for p in part.parameter_kinds) * FLOAT32_BYTES
        self.gradients = self.shards.kept if self.shards else size
        """Of all its parameters."""
        self.start = self.persistent_grads.count_bytes(part.parameter_kinds)
        """Gradients that are there from the start of the step, in buckets."""
        self.half = self.gradients
        """Those that are there after the first half of a backward pass that is split."""
        self.split_grads = SplitBackwardGrads(self.shards) if self.shards and split else None
        self.words = self.model.vocab_size * self.model.hidden_size * FLOAT32_BYTES
        """The head, or the embedding; its gradient too."""
        self.width = self.sizes.tokens * self.model.hidden_size * self.sizes.low
        """What a product along the hidden size gives: T x D x e."""
        self.extra = self._tokens_kept(micro_batch)
        """What it keeps of a micro-batch beside blocks and loss."""
        self._widest: dict[tuple[Kind, StageState], PipelineSnapshot] = {}
        if split and self.shards is None:
            around = 0 if self.persistent_grads.dense else (part.first + part.last) * self.words
            self.half = min(self.gradients, self.start + around + sum(self._new_gradients.values()))
        self.kept = self._count_kept()
        """What waits between the passes."""
        self.pending = self.late(self.layers)
        """From the gradients of its inputs to those of its weights."""

    def _tokens_kept(self, micro_batch: int) -> int:
        """Copies of the batch on a GPU, the mask of its documents, and what the embedding keeps."""
        documents = self.job.data.mask == "document"
        on_gpu = self.job.cluster.device == "cuda"
        indices = self.part.first * self.sizes.tokens
        indices += micro_batch * self.job.data.seq_len if documents else 0
        looked_up = embedding_bytes(self.job, self.sizes) if self.part.first else 0
        return on_gpu * indices * INT64_BYTES + mask_bytes(self.job, self.sizes, micro_batch) + looked_up

    def _count_kept(self) -> int:
        loss = self.sizes.norm + self.width + self.words if self.part.last else 0
        return self.stack.waiting(self.layers) + loss + self.extra

    def late(self, count: int) -> int:
        """Inputs and output gradients of all products of the last blocks; 0 where nothing is split."""
        if not self.split or not count:
            return 0
        return sum(deferred_weight_grad_bytes(self.model, block) for block in self.stack.blocks[-count:])

    @property
    def touched(self) -> int:
        """What a micro-batch makes."""
        logits = self.sizes.tokens * self.model.vocab_size * FLOAT32_BYTES
        return self.stack.touched + (self.sizes.norm + logits if self.part.last else 0)

    def _snapshot(
        self,
        name: str,
        activations: int,
        temporary: int,
        there: StageState,
        formula: str,
        at: tuple[int | None, str] = (None, ""),
        made: int = 0,
    ) -> PipelineSnapshot:
        """A moment of a forward pass, or of a backward pass or its first half.

        Args:
            name: Of the moment.
            activations: Of the micro-batch, in the blocks and the loss.
            temporary: Other tensors of the action.
            there: What earlier passes have left with the stage.
            formula: Of the activations.
            at: The block at work, and where in its backward pass.
            made: Gradients that the pass has made so far, where they are not sharded.
        """
        gradients, gathered = self._made(there.grads, made), 0
        if self.shards is not None:
            snapshot, run = (
                MemorySnapshot(name, 0, 0, 0, "", 0, *at),
                MicroBatchPass(not there.grads, last=False),
            )
            if self.split_grads is not None:
                gradients, reduced = self.split_grads.input_grads(snapshot, there)
            else:
                gradients, reduced = self.shards.gradients(snapshot, run)
            gathered = sum(self.shards.gathered(snapshot, run)) + reduced
        return PipelineSnapshot(name, activations + self.extra, temporary, gradients, formula, gathered)

    def _made(self, there: WeightGrads, so_far: int) -> int:
        """Gradients: all that there are from the first backward pass on, in it what it has made so far."""
        if there is WeightGrads.NONE:
            return self.start + so_far
        return self.half if there is WeightGrads.HALF else self.gradients

    def forward(self, there: StageState) -> list[PipelineSnapshot]:
        """Of a forward pass; ``there``: what earlier passes have left."""
        sizes, before = self.sizes, self.stack.waiting(self.layers - 1)
        again, copies = self.job.layout.recompute != "none", self.copies
        blocks = f"{self.stack.formula(self.layers - 1)}, and the last one at work"
        at = (self.layers - 1, "")
        found = [self._snapshot("forward, attention", before + sizes.turning, copies, there, blocks, at)]
        if again:
            made = sizes.hidden + self.width + sizes.feed_forward.at_work
            found.append(
                self._snapshot(
                    "forward, feed-forward", before + sizes.waiting, made + copies, there, blocks, at
                )
            )
        else:
            made = self.width + sizes.hidden + copies
            found.append(self._snapshot("forward, output", before + sizes.block, made, there, blocks, at))
        if self.part.last:
            temporary = loss_temp_bytes(self.job, self.model, sizes) + copies
            formula = f"{self.stack.formula(self.layers)}, + {sizes.norm} (final norm)"
            stack = before + sizes.waiting + sizes.norm
            found.append(self._snapshot("loss, forward", stack, temporary, there, formula))
        return found

    def backward(self, there: StageState) -> list[PipelineSnapshot]:
        """Of a backward pass, or of its first half."""
        made = self.words if self.part.last and not self.persistent_grads.dense else 0
        found, each = self._head_snapshots(there), self._new_gradients
        listed = self.stack.find_extremes(prefetch_window(self.job) if self.shards else 0)
        for below in reversed(range(self.layers)):
            if below in listed:
                found += self._block_snapshots(below, made, there)
            made += each[self.part.layers[below]]
        if self.part.first:
            done = made + self.words if self.split else self.gradients - self.start
            last = 0 if self.shards or not there.grads else self.words  # shards have it among the gradients
            at = (None, "around")
            found.append(self._snapshot("embedding, backward", self.pending, last, there, "none", at, done))
        if self.shards is not None and (self.part.first or self.part.last):
            found.append(self._snapshot("ends, reduced", self.pending, 0, there, "none", (None, "reduced")))
        return found

    @functools.cached_property
    def _new_gradients(self) -> Mapping[int, int]:
        """Bytes of gradients that the first backward pass makes, by layer; a split one those of experts."""
        made = PersistentGrads(
            not self.persistent_grads.dense and not self.split, not self.persistent_grads.experts
        )
        return sum_block_grads(self.job, self.model, self.part.layers, made)

    def _block_snapshots(self, below: int, made: int, there: StageState) -> list[PipelineSnapshot]:
        """One block on the way back."""
        sizes = self.stack.blocks[below]
        stack = self.stack.waiting(below) + self.late(self.layers - 1 - below)
        waiting = self.stack.formula(below)
        temporary = sizes.backward(first=not there.grads and not self.persistent_grads.experts)
        if self.split:  # no gradient of a weight is made
            temporary = sizes.hidden + sizes.feed_forward.split_backward
        formula, alive = f"{waiting}, + {sizes.block} (this block)", stack + sizes.block
        found = [self._snapshot("backward", alive, temporary, there, formula, (below, "block"), made)]
        if self.shards is not None and sizes.feed_forward.after_experts:
            passed, after = sizes.hidden + sizes.feed_forward.passed, stack + sizes.after_experts
            if self.job.layout.recompute != "none":  # they are gathered when they are computed again
                alive, passed = after + sizes.waiting_products, sizes.hidden
            at = (below, "experts gathered")
            found.append(
                self._snapshot("backward, experts gathered", alive, passed, there, formula, at, made)
            )
            at = (below, "experts")
            found.append(self._snapshot("backward, experts", after, sizes.hidden, there, formula, at, made))
        formula, alive = f"{waiting}, + {sizes.attention} (half of this block)", stack + sizes.attention
        passed, at = sizes.hidden + sizes.attention_gradients, (below, "attention")
        found.append(self._snapshot("backward, attention", alive, passed, there, formula, at, made))
        if self.job.layout.recompute != "none":
            alive, at = stack + sizes.turning + sizes.waiting_products, (below, "again")
            found.append(self._snapshot("recompute", alive, sizes.hidden, there, formula, at, made))
        if self.shards is not None and below == self.layers - 1:
            at, alive = (below, "gathered"), self.stack.waiting(self.layers)
            found.append(self._snapshot("backward, gathered", alive, sizes.hidden, there, waiting, at, made))
        if self.shards is not None and not self.split:
            found += self._reduced_snapshots(below, stack, there)
        return found

    def _reduced_snapshots(self, layer: int, stack: int, there: StageState) -> list[PipelineSnapshot]:
        """A cut block's last gradient, its reduction, and the next block's gather."""
        hidden = self.sizes.hidden
        formula = self.stack.formula(layer)
        last = NORM_TENSORS * hidden
        found = [
            self._snapshot("backward, last gradient", stack, last, there, formula, (layer, "last")),
            self._snapshot("backward, reduced", stack, hidden, there, formula, (layer, "reduced")),
        ]
        if layer and self.job.layout.zero == 3:
            found.append(
                self._snapshot("backward, gathered", stack, hidden, there, formula, (layer - 1, "gathered"))
            )
        return found

    def _head_snapshots(self, there: StageState) -> list[PipelineSnapshot]:
        """The loss's and the final norm's way back."""
        if not self.part.last:
            return []
        stack = self.stack.waiting(self.layers)
        blocks = self.stack.formula(self.layers)
        found = [self._snapshot("loss, backward", self.kept - self.extra, 0, there, blocks)]
        if self.model.norm == "rms" and self.job.cluster.device == "cpu":
            inside = NORM_TENSORS * self.sizes.hidden
            if self.shards is not None:  # the head's gradient is not a shard yet
                inside += self.words
            found.append(
                self._snapshot("final norm, backward", stack, inside, there, blocks, made=self.words)
            )
        return found

    def weights(self, there: StageState) -> list[PipelineSnapshot]:
        """Of the second half of a backward pass that is split."""
        largest = max(p.count for p in list_block(self.model, self.part.layers[0]))
        name, formula = "weights, backward", "inputs and output gradients of products"
        if self.split_grads is not None:
            # The GEMM writes its own precision, which is then cast.
            low = operand_bytes(self.job.train.precision)
            made = largest * (FLOAT32_BYTES + (low if low < FLOAT32_BYTES else 0))
            gradients, reduced = self.split_grads.weight_grads(there)
            idle = self.idle(there)
            return [
                PipelineSnapshot(name, self.pending, made, self.split_grads.held(there), formula, idle),
                PipelineSnapshot("weights, reduced", 0, 0, gradients, "none", idle + reduced),
            ]
        made = min(max(self.half, self._made(there.grads, 0)), self.gradients)
        return [
            PipelineSnapshot(name, self.pending + self.extra, largest * FLOAT32_BYTES, made, formula),
            PipelineSnapshot(name, self.pending // self.layers + self.extra, 0, self.gradients, formula),
        ]

    def idle(self, there: StageState, lends: bool = False) -> int:
        """ZeRO-2 and 3: what it has gathered while it reads no weights."""
        return self.shards.idle(there, lends) if self.shards is not None else 0

    def _settle(self, there: StageState) -> StageState:
        """What is there in truth: all gradients from the start where all are in buckets."""
        if self.shards is not None:
            return there
        return StageState(WeightGrads.ALL if self.start == self.gradients else there.grads)

    def grad_bytes(self, there: StageState) -> int:
        """Gradients while another stage of the rank works."""
        if self.split_grads is not None:
            return self.split_grads.held(there)
        return (self.start, self.half, self.gradients)[self._settle(there).grads]

    def widest(self, kind: Kind, there: StageState) -> PipelineSnapshot:
        """The widest moment of an action, of equal ones the first."""
        key = kind, self._settle(there)
        if key not in self._widest:
            snapshots = {Kind.FORWARD: self.forward, Kind.BACKWARD: self.backward, Kind.WEIGHT: self.weights}
            self._widest[key] = max(snapshots[kind](key[1]), key=lambda snapshot: snapshot.bytes)
        return self._widest[key]


@functools.lru_cache(maxsize=256)
def _stage_of(
    job: Job, part: StageSpec, micro_batch: int, split: bool, rows: tuple[int, ...] | None
) -> _Stage:
    """The stage of a kind; most stages of a pipeline are alike."""
    return _Stage(job, part, micro_batch, split, rows)


def _find_peak(in_flight: InFlight, stages: Sequence[_Stage], numbers: Sequence[int]) -> PipelineSnapshot:
    """The fullest moment along a rank's actions; of equal ones the first.

    Args:
        in_flight: Of the rank.
        stages: That it holds.
        numbers: Their numbers in the model.
    """
    handed, others = stages[0].sizes.hidden, _list_others(in_flight.states, stages)
    widest = [stages[state.stage].widest(state.kind, state.stages[state.stage]) for state in in_flight.states]
    alone = [own.bytes + gradients + idle for own, (gradients, idle) in zip(widest, others, strict=True)]
    waiting = np.array([*(stage.kept for stage in stages), *(stage.pending for stage in stages)])
    waiting_bytes = in_flight.counts[:, :-3] @ waiting
    tensors = in_flight.counts[:, -3:].sum(axis=1)
    at = int(np.argmax(np.array(alone)[in_flight.state] + waiting_bytes + tensors * handed))
    state = int(in_flight.state[at])
    own, (gradients, idle) = widest[state], others[state]
    *passes, sent, inside, posted = in_flight.counts[at].tolist()
    number = numbers[in_flight.states[state].stage]
    return replace(
        own,
        name=f"stage {number}, {own.name}, micro-batch {in_flight.micro_batch[at]}",
        gradients=own.gradients + gradients,
        gathered=own.gathered + idle,
        waiting=int(waiting_bytes[at]),
        waiting_formula=f"{sum(passes)} passes of stages that wait for their backward pass",
        handed=int(tensors[at]) * handed,
        handed_formula=f"{sent} sent, {inside} handed over, {posted} to arrive, x {handed}",
    )


def _list_others(states: Sequence[RankState], stages: Sequence[_Stage]) -> list[tuple[int, int]]:
    """In each state, gradients of the rank's stages that do not work, and what they have gathered."""
    shares_embedding = stages[-1].part.shares_embedding  # a tied head is the first stage's embedding
    found = []
    for _, own, there in states:
        others = [(at, stages[at], state) for at, state in enumerate(there) if at != own]
        gradients = sum(stage.grad_bytes(state) for _, stage, state in others)
        idle = sum(stage.idle(state, lends=shares_embedding and at == 0) for at, stage, state in others)
        found.append((gradients, idle))
    return found


def trace_pipeline(
    job: Job, pp_rank: int, micro_batch: int, micro_batches: int, rows: Sequence[int] | None = None
) -> PipelineMemory:
    """The fullest moment of a rank at one place of the pipelines.

    Args:
        job: With its layout settled.
        pp_rank: The rank's index on the axis ``pp``.
        micro_batch: Samples of one forward pass.
        micro_batches: Of a step.
        rows: That experts read in each of the rank's layers with experts; None for an even share of all.
    """
    in_flight = in_flight_of(job, micro_batches, pp_rank)
    parts, left, stages = local_stages(job, pp_rank), iter(rows or ()), []
    for part in parts:
        read = None if rows is None else tuple(itertools.islice(left, part.expert_layers))
        stages.append(_stage_of(job, part.representative, micro_batch, in_flight.split_backward, read))
    top = _find_peak(in_flight, stages, [part.stage for part in parts])
    if reduces_full_grads(job) and job.compression.kind != "none":
        top = max(top, _reduction(job, pp_rank), key=lambda snapshot: snapshot.bytes)
    return PipelineMemory(
        top=top,
        buffers=tuple(_list_always(job, stages[0].model, stages[0].sizes, micro_batch, micro_batches)),
        activation_bytes=max(stage.kept for stage in stages),
        touched_bytes=sum(stage.touched for stage in stages),
    )


def _list_always(
    job: Job, model: DecoderModel, sizes: BlockSizes, micro_batch: int, micro_batches: int
) -> Iterator[Line]:
    """Tables that the stages of a rank share, and the batches, which on CPU lie where the rank computes."""
    batches = micro_batches if job.cluster.device == "cpu" else 1
    for line in list_buffers(job, model, sizes, micro_batch):
        if line.name == "batch":
            yield Line("batches", batches * line.bytes, f"{batches} micro-batches, {line.formula}")
        elif line.name != "document mask":  # each stage makes its own
            yield line


def _reduction(job: Job, pp_rank: int) -> PipelineSnapshot:
    """The end of the step: all gradients, and all buckets as they are sent in a smaller type."""
    count = sum(p.count for p in local_parameter_kinds(job, pp_rank))
    return PipelineSnapshot(
        name="last bucket",
        activations=0,
        temporary=count * WIRE_BYTES[job.compression.kind],
        gradients=count * FLOAT32_BYTES,
        formula="none",
    )
