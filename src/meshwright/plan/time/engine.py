"""Estimates the parts of a step in seconds, for every layout of a grid."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.layout.parameters import FLOAT32_BYTES
from meshwright.plan.estimate.activations import Tokens, block_saved_bytes, sum_saved_bytes
from meshwright.plan.estimate.balance import count_balanced
from meshwright.plan.estimate.grid import ACCUMULATES, CONTEXTS, Floats, Grid, Ints
from meshwright.plan.estimate.sizes import ParameterCounts, count_rank_parameters, expert_shards
from meshwright.plan.estimate.stages import V_SHAPED
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.time.block import UNFUSED_SOFTMAX_KERNEL_RATIO, BlockModel, BlockTimes, Passes
from meshwright.plan.time.cpu_block import CpuBlockModel
from meshwright.plan.time.gemm import Device
from meshwright.plan.time.launches import cpu_launch_s
from meshwright.plan.time.network import Groups, Span, build_groups, find_overlap
from meshwright.plan.time.optimizer import OFFLOAD_ALL, optimizer_s, streamed_weight_bytes
from meshwright.plan.time.overlap import Overlap, PassParts, overlap_with
from meshwright.plan.time.probed import ProbedSteps, probe_steps
from meshwright.plan.time.rates import Rates, ranks_per_core, rates_of
from meshwright.plan.time.stage_layers import slowest_load
from meshwright.schedule.pipeline.closed_forms import pipeline_time
from meshwright.spec.layout import SCHEDULES

FULL, SELECTIVE = 2, 1
SHARDED = ACCUMULATES.index("sharded")
FP8_BYTES = 1.0
DUALPIPE, INTERLEAVED = SCHEDULES.index("dualpipe-v"), SCHEDULES.index("interleaved")
GATHER_COPY_BYTES = 8.0
"""Bytes per logit that are copied after an all-gather into a list of tensors: out of the buffer of the
collective, and into one tensor."""
ULYSSES = CONTEXTS.index("ulysses")
LEAST_EXPOSED_RING = 0.1
"""Share of ring attention's sends that is exposed at least."""
WORK_PARTS = (
    "compute",
    "tensor parallel",
    "context parallel",
    "expert parallel",
    "sharded data parallel",
)
"""Parts of a step that occur in every micro-batch."""


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of each layout's step."""

    step_s: Floats
    parts: dict[str, Floats]
    """The parts add up to the step; overlapped communication is not included."""
    hidden: dict[str, Floats]
    """Communication overlapped with compute."""
    passes: Passes
    """One micro-batch on an average rank, with exposed communication."""
    block: Passes
    """One micro-batch in an average block, with exposed communication."""
    head: Passes
    embedding: Passes
    send_s: Floats
    """One transfer between pipeline stages."""
    block_parts: PassParts
    """What the passes of a block consist of besides compute."""
    embedding_tp: Passes
    """Tensor-parallel collectives of the embedding."""
    head_tp: Passes
    """Tensor-parallel collectives of the head."""
    hidden_gather_s: Floats
    """The all-gather of ZeRO-1 and 2 in ``hidden``; the rest of it is gradient reduction."""
    launch_wait_s: Floats
    """Part of the compute in which devices wait for the CPU's kernel launches, on an average rank."""

    def times(self, factor: Floats) -> StepEstimate:
        """Every time, multiplied."""
        return StepEstimate(
            step_s=self.step_s * factor,
            parts={name: seconds * factor for name, seconds in self.parts.items()},
            hidden={name: seconds * factor for name, seconds in self.hidden.items()},
            passes=self.passes.times(factor),
            block=self.block.times(factor),
            head=self.head.times(factor),
            embedding=self.embedding.times(factor),
            send_s=self.send_s * factor,
            block_parts=self.block_parts.times(factor),
            embedding_tp=self.embedding_tp.times(factor),
            head_tp=self.head_tp.times(factor),
            hidden_gather_s=self.hidden_gather_s * factor,
            launch_wait_s=self.launch_wait_s * factor,
        )


def estimate_step(
    workload: Workload, grid: Grid, rates: Rates | None = None, spans: Mapping[str, Span] | None = None
) -> StepEstimate:
    """Estimate the step of every layout.

    Args:
        workload: The job.
        grid: Its layouts.
        rates: Replace the calibrated ones during calibration.
        spans: Spans of ranks that are placed (``plan.time.spans``); by default ranks are placed in rank
            order.
    """
    step = _Step(workload, grid, rates or rates_of(workload), spans).estimate()
    shared = ranks_per_core(workload.cluster, grid.world_size)
    return step.times(shared) if shared.max(initial=1.0) > 1 else step


def _distinct(grid: Grid) -> tuple[Ints, Ints]:
    """Indices of layouts with distinct blocks, and for every layout its index among them."""
    key = grid.sequence_parallel.astype(np.int64) * len(CONTEXTS) + grid.context
    key = 2 * key + grid.has_unsharded_layers
    for column in (grid.tp, grid.cp, grid.ep, grid.etp, grid.micro_batch):
        key = key * (int(column.max(initial=1)) + 1) + column
    _, indices, back = np.unique(key, return_index=True, return_inverse=True)
    return indices, back


class _Step:
    """The quantities of one estimate, each computed once."""

    def __init__(
        self, workload: Workload, grid: Grid, rates: Rates, spans: Mapping[str, Span] | None
    ) -> None:
        self.workload, self.grid, self.rates = workload, grid, rates
        self.model, self.rules = workload.model, workload.profile.time
        self.device = Device.of(workload, rates)
        self.groups: Groups = build_groups(workload, rates, grid, spans)
        self.overlap: Floats = find_overlap(workload, rates, grid)
        self.micro_batches = grid.micro_batches(workload.global_batch).astype(float)
        self.layers = self.model.num_layers / grid.pp
        """Layers of an average rank."""
        # Few layouts have distinct blocks: estimate those, then copy to all layouts.
        # Rates that differ between layouts (during a fit) make every block distinct.
        every = np.arange(len(grid))
        indices, back = (every, every) if np.ndim(rates.matmul) else _distinct(grid)
        kind = BlockModel if self.device.multiprocessors else CpuBlockModel
        blocks = kind(workload, self.device, grid.take(indices))
        self.block: BlockTimes = blocks.times().take(back)
        self.head: Passes = blocks.head().take(back)
        self.embedding: Passes = blocks.embedding().take(back)
        self.logits_s: Floats = blocks.logits()[back]
        self.rows, self.tp, self.head_chunks = blocks.rows[back], blocks.tp[back], blocks.head_chunks[back]
        self.softmax_kernel_ratio: Floats = np.where(
            blocks.unfused_softmax, UNFUSED_SOFTMAX_KERNEL_RATIO, 1.0
        )[back]
        """Kernels per block, relative to the blocks that CPU launch time was calibrated with."""
        self.parameters: ParameterCounts = count_rank_parameters(self.model, grid)
        self.recompute_s: Floats = self._recompute_s()
        """Forward work that the backward pass of a block repeats."""
        work = self.block.work
        self.work = Passes(
            work.forward, work.backward_input + self.recompute_s, work.backward_weight + self._accumulate_s()
        )
        """An average block with activation checkpointing, without communication."""
        self.probed: ProbedSteps | None = probe_steps(workload, grid)
        if self.probed is not None:
            self._apply_probed(self.probed)

    def _recompute_s(self) -> Floats:
        """Activation checkpointing of an average block, without communication."""
        recompute_s = np.where(self.grid.recompute == FULL, self.block.work.forward, 0.0)
        return recompute_s + np.where(self.grid.recompute == SELECTIVE, self.block.selective_recompute_s, 0.0)

    def _accumulate_s(self) -> Floats:
        """Adding an average block's gradients to those of earlier micro-batches, per micro-batch."""
        if not self.device.multiprocessors:
            return np.zeros(len(self.grid))
        grid = self.grid
        scattered = (grid.zero >= 2) & (grid.accumulate == SHARDED)
        dense = self.parameters.block / np.where(scattered, grid.dp_shard * grid.cp, 1)
        experts = self.parameters.expert_block / np.where(scattered, expert_shards(grid), 1)
        moved = self.rules.accumulate_bytes * (dense + experts)
        return moved * (1 - 1 / self.micro_batches) / self.device.bytes_per_s

    def _apply_probed(self, probed: ProbedSteps) -> None:
        """Scale blocks, head and embedding of probed layouts to the compute time from probed operations."""
        counted = self.work.total * self.layers + self.head.total + self.embedding.total
        scale = np.where(probed.known, probed.compute_s / self.micro_batches / counted, 1.0)
        self.work, self.recompute_s = self.work.times(scale), self.recompute_s * scale
        self.head, self.embedding = self.head.times(scale), self.embedding.times(scale)

    def estimate(self) -> StepEstimate:
        """Add up."""
        passes, block_parts, launch_wait_s = self._block_passes()
        head, embedding, head_tp, embedding_tp = self._head_and_embedding()
        mean = passes.times(self.layers) + (head + embedding).times(1 / self.grid.pp)
        slow_s = self._slowest_s(passes, head, embedding, mean)
        send_s = self._send_s()
        bubble_s, p2p_s = self._pipeline(mean, slow_s, send_s)
        reduce_s, hidden_reduce_s, hidden_gather_s = self._data_parallel(passes)
        count = self.micro_batches * self.layers
        tp_s, cp_s, ep_s, fsdp_s = (
            block_parts.exposed[name].total * count for name in ("tp", "cp", "ep", "dp_shard")
        )
        tp_s = tp_s + (head_tp + embedding_tp).total * (self.micro_batches / self.grid.pp)
        parts = {
            "compute": self.micro_batches * mean.total - (tp_s + cp_s + ep_s + fsdp_s),
            "tensor parallel": tp_s,
            "context parallel": cp_s,
            "expert parallel": ep_s,
            "sharded data parallel": fsdp_s,
            "bubble": bubble_s,
            "uneven stages": self.micro_batches * (slow_s - mean.total),
            "pipeline transfers": p2p_s,
            "gradient reduction": reduce_s,
            "optimizer": self._optimizer_s(),
            "step overhead": self._overhead_s(),
        }
        total = sum(parts.values(), np.zeros(len(self.grid)))
        hidden = {"data parallel": hidden_reduce_s + hidden_gather_s}
        return StepEstimate(
            total, parts, hidden, mean, passes, head, embedding, send_s, block_parts, embedding_tp, head_tp,
            hidden_gather_s, launch_wait_s * count,
        )  # fmt: skip

    def _block_passes(self) -> tuple[Passes, PassParts, Floats]:
        """A block with exposed communication, what in it is not compute, and its wait for launches."""
        work, full = self.work, self.grid.recompute == FULL
        axes = {"tp": self._tensor_parallel(), "cp": self._context_parallel(), "ep": self._expert_parallel()}
        axes = {name: axis.repeated(full) for name, axis in axes.items()}
        tp, cp, ep = axes["tp"], axes["cp"], axes["ep"]
        cpu_launch_s = self._cpu_launch_s()
        with_launch = np.add if self.rules.blocking_launches else np.maximum
        ahead = work.forward + tp.forward + cp.forward + ep.forward
        forward = with_launch(ahead, cpu_launch_s)
        backward_cpu_launch_s = cpu_launch_s * np.where(full, 2.0, 1.0)
        back_input = work.backward_input + tp.backward + cp.backward + ep.backward
        back = with_launch(back_input + work.backward_weight, backward_cpu_launch_s)
        launch_wait_s = (forward - ahead) + (back - back_input - work.backward_weight)
        fsdp = self._fsdp_s(forward, back)
        # Offload and all-gather use different links at the same time: the slower one counts.
        fsdp = dataclasses.replace(
            fsdp,
            forward=np.maximum(fsdp.forward, self._streaming_s(forward)),
            backward=np.maximum(fsdp.backward, self._streaming_s(back)),
        )
        passes = Passes(
            forward + fsdp.forward, back - work.backward_weight + fsdp.backward, work.backward_weight
        )
        return passes, PassParts.of({**axes, "dp_shard": fsdp}, self.recompute_s), launch_wait_s

    def _cpu_launch_s(self) -> Floats:
        """CPU launch time per pass through a block; 0 where the pass already includes it (CPU, probed)."""
        if not self.device.multiprocessors:
            return np.zeros(len(self.grid))
        seconds = cpu_launch_s(self.workload, self.rates, self.grid, self.softmax_kernel_ratio)
        return seconds if self.probed is None else np.where(self.probed.known, 0.0, seconds)

    def _head_and_embedding(self) -> tuple[Passes, Passes, Passes, Passes]:
        """Head and embedding with their tensor-parallel collectives, and these collectives."""
        none = np.zeros(len(self.grid))
        head, embedding_tp, head_tp = self.head, Passes(none, none, none), Passes(none, none, none)
        moved, group = self.rows * self.model.hidden_size, self.groups.tp
        one = group.all_reduce_s(moved * self.workload.wire_bytes)
        if self.rules.counts_every_collective:
            embedding_tp = Passes(group.all_reduce_s(moved * FLOAT32_BYTES), none, none)
            loss = 2 * group.all_reduce_s(self.rows * FLOAT32_BYTES)
            head_tp = Passes(one + loss, none, none)
        elif self.rules.reduces_embedding_and_head:
            embedding_tp = Passes(one, none, none)
            head_tp = Passes(self._gather_logits_s(), one, none)
        if self.rules.checkpoints_head:
            is_recomputed = np.where(self.grid.recompute == FULL, 1.0, 0.0)
            head_tp = head_tp + Passes(none, is_recomputed * head_tp.forward, none)
            head = head + Passes(none, is_recomputed * self.logits_s, none)
        return head + head_tp, self.embedding + embedding_tp, head_tp, embedding_tp

    def _gather_logits_s(self) -> Floats:
        """The all-gather of logits over tp, if the loss needs them, and the copies that order them."""
        if not self.workload.profile.memory.gathers_logits:
            return np.zeros(len(self.grid))
        logits = self.rows * self.model.vocab_size
        copied = np.where(self.grid.tp > 1, GATHER_COPY_BYTES * logits / self.device.bytes_per_s, 0.0)
        return self.groups.tp.all_gather_s(logits * self.workload.wire_bytes) + copied

    def _tensor_parallel(self) -> Overlap:
        """Two all-reduces in each direction: of attention and the feed-forward.

        An expert layer has the second one only for shared experts.

        With separate gate and up projections a third one in the backward pass, if the rows are not sharded.
        """
        model, group = self.model, self.groups.tp
        routed = model.expert_layers / model.num_layers
        calls = 1 + (1 - routed) + bool(model.shared_experts) * routed
        moved = self.rows * model.hidden_size * self.workload.wire_bytes
        one = group.all_reduce_s(moved)
        if self.rules.counts_every_collective:  # sequence parallelism: an all-gather and a reduce-scatter
            one = np.where(self.grid.sequence_parallel, 2 * group.all_gather_s(moved), one)
        exposed = 1 - self.rates.tp_overlap if self.rules.overlap_tp else 1.0
        forward_s = calls * one
        has_gate_all_reduce = self.rules.separate_gate and model.activation == "swiglu"
        more_s = np.where(self.grid.sequence_parallel, 0.0, (calls - 1) * one * has_gate_all_reduce)
        backward_s = forward_s + more_s
        forward, backward = forward_s * exposed, backward_s * exposed
        if self.rules.hides_tp_backward:
            beside = self.rates.overlap * self.block.gemms.backward_weight
            backward = np.maximum(backward - beside, (1 - self.rates.overlap) * backward)
        return Overlap(forward, backward, forward_s - forward, backward_s - backward)

    def _context_parallel(self) -> Overlap:
        """Ring attention's sends, overlapped with attention; or the all-to-alls of Ulysses."""
        model, grid = self.model, self.grid
        wire = self.workload.wire_bytes
        width = model.kv_size if model.attention == "heads" else model.num_heads * model.head_size
        moved = self.rows * 2 * np.maximum(width / self.tp, model.head_size)
        ring, ring_back = self._ring_attention_s(moved * wire, moved * FLOAT32_BYTES)
        exchanged_bytes = self.rows * (2 * model.query_size + 2 * width) / self.tp * wire
        exchange = self.groups.cp.all_to_all_s(exchanged_bytes, self.rates.all_to_all)
        attention, hide = self.block.attention, self.rates.overlap
        exchanged = grid.context == ULYSSES
        forward = np.where(
            exchanged, exchange, np.maximum(ring - hide * attention.forward, LEAST_EXPOSED_RING * ring)
        )
        backward = np.where(
            exchanged,
            exchange,
            np.maximum(ring_back - hide * attention.backward_input, LEAST_EXPOSED_RING * ring_back),
        )
        return Overlap(
            forward,
            backward,
            np.where(exchanged, 0.0, ring - forward),
            np.where(exchanged, 0.0, ring_back - backward),
        )

    def _ring_attention_s(self, keys: Floats, gradients: Floats) -> tuple[Floats, Floats]:
        """Ring sends: keys and values forward; the same and their gradients backward."""
        group = self.groups.cp
        ring = group.all_gather_s(keys * self.grid.cp)
        if not self.rules.counts_every_collective:
            return ring, 2 * ring
        calls = self.head_chunks * (self.grid.cp - 1)
        return group.sends_s(keys, calls), group.sends_s(keys, calls) + group.sends_s(gradients, calls)

    def _expert_parallel(self) -> Overlap:
        """Dispatch and combine in each direction, averaged over all layers."""
        model, rules, none = self.model, self.rules, np.zeros(len(self.grid))
        if not model.expert_layers:
            return Overlap(none, none, none, none)
        copies = model.experts_per_token or 1
        sent = self.rows / self.tp * copies * model.hidden_size
        combined = sent * self.workload.wire_bytes
        dispatched = sent * (FP8_BYTES if rules.fp8_dispatch else self.workload.wire_bytes)
        copies_per_node = copies if rules.one_copy_per_node else 1
        group, rate = self.groups.ep, self.rates.all_to_all
        dispatch_s, combine_s = (
            group.all_to_all_s(moved, rate, copies_per_node, rules.max_nodes_per_token)
            for moved in (dispatched, combined)
        )
        # etp ranks all-gather the tokens of an expert before it and reduce-scatter its outputs.
        shared = 2 * self.groups.etp.all_gather_s(combined * self.grid.etp)
        share = model.expert_layers / model.num_layers
        # Gradients are dispatched in 16 bits.
        forward, backward = (dispatch_s + combine_s + shared) * share, (2 * combine_s + shared) * share
        hides = (self.grid.schedule == DUALPIPE) | rules.overlap_ep
        hidden_share, contention = self.rates.ep_overlap, self.rates.contention
        exposed, exposed_back = (
            np.where(
                hides,
                overlap_with(communication_s, compute_s, hidden_share, 1 - hidden_share, contention)[0],
                communication_s,
            )
            for communication_s, compute_s in (
                (forward, self.work.forward),
                (backward, self._backward_work_s()),
            )
        )
        hidden, hidden_back = np.maximum(forward - exposed, 0.0), np.maximum(backward - exposed_back, 0.0)
        return Overlap(exposed, exposed_back, hidden, hidden_back)

    def _backward_work_s(self) -> Floats:
        return self.work.backward_input + self.work.backward_weight

    def _fsdp_s(self, forward: Floats, backward: Floats) -> Overlap:
        """ZeRO-3: parameter all-gathers in both directions and gradient reduce-scatters."""
        grid, rules, none = self.grid, self.rules, np.zeros(len(self.grid))
        on = grid.zero == 3
        if not on.any():
            return Overlap(none, none, none, none)
        block, experts = self.parameters.block, self.parameters.expert_block
        wire = self.workload.wire_bytes
        gather = self._shards_s(block, experts, wire, rules.gather_calls) / rules.gather_share
        across = self._replicate_reduce_s(block, experts) / self.micro_batches
        gather_and_reduce = gather + self._scatter_s(block, experts) + across
        # The stages of a pipeline have few blocks per pass: more of their collectives is exposed.
        prefetches = (grid.pp == 1) & (self.overlap > 0) & rules.prefetches_parameters
        window = np.where(prefetches, self.rates.fsdp_window, self.overlap)
        least = np.where(prefetches, self.rates.fsdp_exposed, 1 - self.rates.overlap)
        rates = window, least, self.rates.contention
        exposed, hidden = overlap_with(gather, forward, *rates)
        exposed_back, hidden_back = overlap_with(gather_and_reduce, backward, *rates)
        # Copies of gathered parameters out of a buffer, and of gradients into one, run between the kernels.
        copies = rules.copies_shards and self.device.multiprocessors > 0
        copied_s = copies * self.parameters.gathered_block(grid) / self.device.bytes_per_s
        out, into = 2 * wire * copied_s, (wire + rules.reduce_bytes) * copied_s
        times = (exposed + out, exposed_back + out + into, hidden, hidden_back)
        return Overlap(*(np.where(on, seconds, 0.0) for seconds in times))

    def _shards_s(
        self, dense: Floats, experts: Floats, element_bytes: float, calls: Floats | float = 1.0
    ) -> Floats:
        """All-gather over the shards of dense and expert parameters."""
        shared = self.groups.shard.all_gather_s(dense * element_bytes, calls)
        return shared + self.groups.expert_shard.all_gather_s(experts * element_bytes, calls)

    def _scatter_s(self, dense: Floats, experts: Floats, calls: Floats | float = 1.0) -> Floats:
        """Reduce-scatter of gradients over the shards of dense and expert parameters."""
        width, groups = self.rules.reduce_bytes, self.groups
        shared = groups.shard.reduce_scatter_s(dense * width, calls)
        return shared + groups.expert_shard.reduce_scatter_s(experts * width, calls)

    def _replicate_reduce_s(self, dense: Floats, experts: Floats) -> Floats:
        """Hybrid sharding: all-reduce of gradient shards over dp_replicate."""
        left = dense / (self.grid.dp_shard * self.grid.cp) + experts / expert_shards(self.grid)
        return self.groups.replicate.all_reduce_s(left * self.rules.reduce_bytes)

    def _streaming_s(self, pass_s: Floats) -> Floats:
        """Exposed copies over the CPU link per pass: offloaded parameters, and offloaded activations."""
        grid, link = self.grid, self.workload.cluster.host_bytes_per_s
        kept = np.where(grid.zero == 3, grid.dp_shard * grid.cp, 1)
        width = streamed_weight_bytes(self.workload)
        moved = (self.parameters.block + self.parameters.expert_block) / kept * width
        moved = np.where(grid.offload == OFFLOAD_ALL, moved, 0.0)
        if self.workload.profile.memory.offloads_activations:
            moved = moved + self._saved_bytes()
        return np.maximum(moved / link - self.rates.overlap * pass_s, 0.0)

    def _saved_bytes(self) -> Floats:
        """Activations that an average block saves."""
        share = self.model.expert_layers / self.model.num_layers
        tokens = Tokens.of(self.workload, self.grid)
        kinds = (block_saved_bytes(self.workload, expert=expert) for expert in (False, True))
        dense, routed = (sum_saved_bytes(kind, self.grid, tokens).bytes for kind in kinds)
        return np.asarray((1 - share) * dense + share * routed)

    def _slowest_s(self, block: Passes, head: Passes, embedding: Passes, mean: Passes) -> Floats:
        """Work of the slowest pipeline rank on one micro-batch."""
        grid, layers = self.grid, self.model.num_layers
        if not (grid.pp > 1).any():
            return mean.total
        if self.rules.balances_stages_by_time:
            units = slowest_load(grid, layers, embedding.total / block.total, head.total / block.total)
            return np.where(grid.pp == 1, mean.total, np.maximum(units * block.total, mean.total))
        if self.rules.balances_stages_by_parameters:
            first, middle, final = count_balanced(self.model, grid.pp)
            inner = np.where(grid.pp > 2, middle, 0) * block.total
            ends = np.maximum(first * block.total + embedding.total, final * block.total + head.total)
            return np.where(grid.pp == 1, mean.total, np.maximum(ends, inner))
        # The last rank has the head; it may have fewer layers.
        even = layers % (grid.pp * grid.virtual_stages) == 0
        slow = np.ceil(layers / (grid.pp * grid.virtual_stages)) * grid.virtual_stages
        left = layers - slow * (grid.pp - 1.0)
        last = block.total * np.where(even, self.layers, np.clip(left, 0, slow)) + head.total
        return np.where(grid.pp == 1, mean.total, np.maximum(last, block.total * slow))

    def _send_s(self) -> Floats:
        """One transfer to the next stage."""
        moved = self.rows * self.model.hidden_size * self.workload.residual_bytes
        split = self.tp if self.rules.splits_sends else np.where(self.grid.sequence_parallel, self.tp, 1.0)
        return self.groups.pp.send_s(moved / split)

    def _pipeline(self, mean: Passes, slow_s: Floats, send_s: Floats) -> tuple[Floats, Floats]:
        """The bubble, and the exposed transfers between stages."""
        grid, staged = self.grid, self.grid.pp > 1
        if not staged.any():
            return np.zeros(len(grid)), np.zeros(len(grid))
        stages = np.where(np.isin(grid.schedule, V_SHAPED), 2, grid.virtual_stages)
        chunk = mean.times(1 / stages)

        def makespan(transfer: Floats | float) -> Floats:
            return pipeline_time(
                grid.schedule, grid.pp, stages, self.micro_batches, chunk.forward, chunk.backward_input,
                chunk.backward_weight, transfer, self.rules.overlap_p2p, slow_s,
            )  # fmt: skip

        makespan_without_transfers = makespan(0.0)
        bubble = np.where(staged, makespan_without_transfers - self.micro_batches * slow_s, 0.0)
        return bubble, np.where(staged, makespan(send_s) - makespan_without_transfers, 0.0)

    def _data_parallel(self, block: Passes) -> tuple[Floats, Floats, Floats]:
        """Gradient reduction at the end of a step, and the all-gather of ZeRO-1 and 2.

        Returns the exposed time of both, and the overlapped time of each.
        """
        grid, rules, groups = self.grid, self.rules, self.groups
        dense, experts = self.parameters.rank, self.parameters.expert_rank
        wire = rules.reduce_bytes
        both = dense + experts
        if self.workload.hierarchical_all_reduce:
            over_replicas = groups.replicate.hierarchical_all_reduce_s(both * wire, self._buckets(both))
        else:
            over_replicas = groups.replicate.all_reduce_s(both * wire, self._buckets(both))
        # Expert parallelism without ZeRO: experts have fewer replicas than dense parameters.
        replicated = (
            groups.shard.all_reduce_s(dense * wire, self._buckets(dense))
            + groups.expert_shard.all_reduce_s(experts * wire, self._buckets(experts))
            + over_replicas
        )
        calls = self._buckets(both)
        scatter = self._scatter_s(dense, experts, calls) * (2 if rules.all_reduces_shards else 1)
        gather = self._shards_s(dense, experts, self.workload.wire_bytes, calls)
        across = self._replicate_reduce_s(dense, experts)
        sharded = (grid.zero == 1) | (grid.zero == 2)
        # ZeRO-2 keeps no full gradients: each micro-batch is reduce-scattered.
        each = (grid.accumulate == SHARDED) | rules.reduce_scatters_each_micro_batch
        times = np.where((grid.zero == 2) & each, self.micro_batches, 1.0)
        reduce = np.where(sharded, scatter * times + across, np.where(grid.zero == 0, replicated, 0.0))
        gather = np.where(sharded, gather, 0.0)
        layers = self.layers
        last = self._last_passes()
        window_back = (block.backward_input + block.backward_weight) * layers * np.maximum(times, last)
        window_forward = block.forward * layers * last
        hide = self.overlap
        hidden_reduce = np.minimum(hide * reduce, window_back) if rules.overlap_grad_reduce else 0 * reduce
        if rules.exposes_pipeline_reduction:
            hidden_reduce = np.where(grid.pp > 1, 0.0, hidden_reduce)
        hidden_reduce = np.where(grid.backup_replicas > 0, 0.0, hidden_reduce)  # after the backward pass
        hidden_gather = (
            np.minimum(hide * gather, window_forward) if rules.overlap_param_gather else 0 * gather
        )
        hidden = hidden_reduce + hidden_gather
        exposed = reduce + gather - hidden + self.rates.contention * hidden
        return exposed + self._tied_embedding_s(), hidden_reduce, hidden_gather

    def _last_passes(self) -> Floats:
        """Passes of a micro-batch that run while gradients are reduced, or parameters gathered.

        One; with interleaved stages a chunk is done with all micro-batches while the others still have the
        last ``pp`` of them to process.
        """
        grid = self.grid
        others = 1 - 1 / grid.virtual_stages
        interleaved = grid.schedule == INTERLEAVED
        return np.where(interleaved, 1 + (np.minimum(grid.pp, self.micro_batches) - 1) * others, 1.0)

    def _buckets(self, parameters: Floats) -> Floats:
        """Calls that reduce or gather all parameters of a rank once per step."""
        rules, grid = self.rules, self.grid
        if rules.counts_every_collective:
            size: Floats | float = self.workload.bucket_bytes / rules.reduce_bytes
        else:
            ranks = grid.dp_shard * grid.cp * grid.dp_replicate
            size = np.maximum(rules.bucket_parameters, rules.bucket_parameters_per_rank * ranks)
        calls: Floats = np.ceil(np.maximum(parameters / size, 1.0))
        return calls

    def _tied_embedding_s(self) -> Floats | float:
        """All-reduce of a tied embedding's gradient over the first and the last stage."""
        if not (self.rules.counts_every_collective and self.model.tied_embeddings):
            return 0.0
        apart = (self.grid.pp > 1) & ~np.isin(self.grid.schedule, V_SHAPED)
        moved = self.model.vocab_size * self.model.hidden_size / self.tp * FLOAT32_BYTES
        return np.where(apart, self.groups.pp.send_s(moved), 0.0)

    def _optimizer_s(self) -> Floats:
        """The optimizer step, on the device or with offloaded state."""
        updated = self.parameters.updated(self.grid)
        seconds = optimizer_s(self.workload, self.device, self.grid, updated)
        if self.probed is None:
            return seconds
        over = np.where(self.grid.zero > 0, self.grid.dp_shard * self.grid.cp, 1)
        return np.where(self.probed.known, self.probed.update_s / over, seconds)

    def _overhead_s(self) -> Floats:
        """Step overhead outside the blocks: data, logging, clipping, control all-reduce."""
        on_device = bool(self.device.multiprocessors)
        seconds: Floats = np.full(len(self.grid), self.rules.step_s if on_device else 0.0)
        if self.probed is not None:
            seconds = np.where(self.probed.known, self.probed.step_s, seconds)
        if not self.rules.counts_every_collective:
            return seconds
        world = self.grid.world_size
        return seconds + np.where(world > 1, self.groups.world.control_s(), 0.0)
