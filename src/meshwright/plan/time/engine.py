"""Time of a step, part by part, for every layout of a grid."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.estimate.grid import ACCUMULATES, OFFLOADS, Floats, Grid, Ints
from meshwright.plan.estimate.in_flight import V_SHAPED
from meshwright.plan.estimate.sizes import Shares, expert_shards, share_parameters
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.time.block import SINGLE_KERNELS, BlockModel, BlockTimes, Passes
from meshwright.plan.time.gemm import Device
from meshwright.plan.time.network import Groups, build_groups
from meshwright.plan.time.rates import Rates, rates_of
from meshwright.schedule.closed_forms import pipeline_time

FULL, SELECTIVE = 2, 1
SHARDED = ACCUMULATES.index("sharded")
OFFLOAD_ALL = OFFLOADS.index("all")
WIRE_BYTES = 2.0
"""Bytes of an activation on the wire."""


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of each layout's step."""

    step_s: Floats
    parts: dict[str, Floats]
    """What the step consists of; the parts add up to it. Hidden communication is not in here."""
    hidden: dict[str, Floats]
    """Communication that computation hides."""
    passes: Passes
    """Of one micro-batch through an average rank, with everything that delays it."""


def estimate_step(workload: Workload, grid: Grid, rates: Rates | None = None) -> StepEstimate:
    """The step of every layout; ``rates`` other than the calibrated ones are for calibration."""
    return _Step(workload, grid, rates or rates_of(workload)).estimate()


def _distinct(grid: Grid) -> tuple[Ints, Ints]:
    """Places of layouts that differ in what a block sees, and for every layout which of them is its like."""
    key = grid.sequence_parallel.astype(np.int64)
    for column in (grid.tp, grid.cp, grid.ep, grid.etp, grid.micro_batch):
        key = key * (int(column.max(initial=1)) + 1) + column
    _, places, back = np.unique(key, return_index=True, return_inverse=True)
    return places, back


class _Step:
    """The quantities of one estimate, each computed once."""

    def __init__(self, workload: Workload, grid: Grid, rates: Rates) -> None:
        self.workload, self.grid, self.rates = workload, grid, rates
        self.model, self.rules = workload.model, workload.profile.time
        self.device = Device.of(workload, rates)
        self.groups: Groups = build_groups(workload, rates, grid)
        # Few layouts differ in what a block sees of them: those are counted, then spread over the grid.
        places, back = _distinct(grid)
        blocks = BlockModel(workload, self.device, grid.take(places))
        self.block: BlockTimes = blocks.times().take(back)
        self.head: Passes = blocks.head().take(back)
        self.rows, self.tp = blocks.rows[back], blocks.tp[back]
        self.kernels: Floats = np.where(blocks.single, SINGLE_KERNELS, 1.0)[back]
        """Of a block, over those that the host's time was measured with."""
        self.shares: Shares = share_parameters(self.model, grid)
        self.micro_batches = grid.micro_batches(workload.global_batch).astype(float)
        chunks = grid.pp * grid.virtual_stages
        self.layers = self.model.num_layers / grid.pp
        """Layers of an average rank."""
        self.slow_layers: Floats = np.ceil(self.model.num_layers / chunks) * grid.virtual_stages.astype(float)

    def estimate(self) -> StepEstimate:
        """Add up."""
        passes, exposed = self._block_passes()
        mean = passes.times(self.layers) + self.head.times(1 / self.grid.pp)
        slow = self._slowest(passes, mean)
        send_s = self._send_s()
        pipeline_s, bubble_s = self._pipeline(mean, slow, send_s)
        reduce_s, hidden_s = self._data_parallel(passes)
        optimizer_s = self._optimizer_s()
        count = self.micro_batches * self.layers
        tp_s, cp_s, ep_s = (exposed[name] * count for name in ("tp", "cp", "ep"))
        fsdp_s = exposed["dp_shard"] * count
        p2p_s = pipeline_s - self.micro_batches * slow.total - bubble_s
        uneven_s = self.micro_batches * (slow.total - mean.total)
        total = pipeline_s + reduce_s + optimizer_s + self.rates.step_s
        named = tp_s + cp_s + ep_s + fsdp_s
        parts = {
            "compute": self.micro_batches * mean.total - named,
            "tensor parallel": tp_s,
            "context parallel": cp_s,
            "expert parallel": ep_s,
            "sharded data parallel": fsdp_s,
            "bubble": bubble_s,
            "uneven stages": uneven_s,
            "pipeline transfers": p2p_s,
            "gradient reduction": reduce_s,
            "optimizer": optimizer_s,
            "step overhead": np.full(len(self.grid), self.rates.step_s),
        }
        return StepEstimate(total, parts, {"data parallel": hidden_s}, mean)

    def _block_passes(self) -> tuple[Passes, dict[str, Floats]]:
        """An average block with everything that delays it, and what each axis adds to it."""
        block, grid = self.block, self.grid
        work = block.products + block.attention + block.elementwise + block.expert_products
        full, selective = grid.recompute == FULL, grid.recompute == SELECTIVE
        again = np.where(full, work.forward, 0.0) + np.where(selective, self._selective_s(), 0.0)
        tp_forward, tp_backward = self._tensor_parallel()
        cp_forward, cp_backward = self._context_parallel()
        ep_s = self._expert_parallel()
        repeated = np.where(full, tp_forward + ep_s + cp_forward, 0.0)
        routed = self.model.expert_layers / self.model.num_layers
        host = (self.rates.host_s + self.rates.expert_host_s * routed) * self.kernels
        forward = np.maximum(work.forward + tp_forward + cp_forward + ep_s, host)
        backward_host = host * np.where(full, 2.0, 1.0)
        back_input = work.backward_input + again + tp_backward + cp_backward + ep_s + repeated
        back = np.maximum(back_input + work.backward_weight, backward_host)
        late_forward, late_backward = self._sharded(forward, back)
        # From the host and from other ranks at the same time, on links of their own: the later one counts.
        late_forward = np.maximum(late_forward, self._streamed(forward))
        late_backward = np.maximum(late_backward, self._streamed(back))
        passes = Passes(
            forward + late_forward, back - work.backward_weight + late_backward, work.backward_weight
        )
        return passes, {
            "tp": tp_forward + tp_backward + np.where(full, tp_forward, 0.0),
            "cp": cp_forward + cp_backward + np.where(full, cp_forward, 0.0),
            "ep": 2 * ep_s + np.where(full, ep_s, 0.0),
            "dp_shard": late_forward + late_backward,
        }

    def _selective_s(self) -> Floats:
        """What selective recomputation runs again in a block."""
        if self.rules.selective == "attention":
            return self.block.attention.forward
        elementwise = self.block.elementwise.forward
        if self.rules.selective == "half":
            return elementwise + 0.5 * self.block.products.forward
        return elementwise

    def _tensor_parallel(self) -> tuple[Floats, Floats]:
        """Two reductions in each direction; in layers of experts only attention's."""
        model = self.model
        calls = (
            1
            + (1 - model.expert_layers / model.num_layers)
            + bool(model.shared_experts) * (model.expert_layers / model.num_layers)
        )
        moved = self.rows * model.hidden_size * WIRE_BYTES
        one = self.groups.tp.all_reduce_s(moved)
        shown = 1 - self.rates.tp_overlap if self.rules.overlap_tp else 1.0
        shown_s = calls * one * shown
        if not self.rules.hides_tp_backward:
            return shown_s, shown_s
        beside = self.rates.overlap * self.block.products.backward_weight
        return shown_s, np.maximum(shown_s - beside, (1 - self.rates.overlap) * shown_s)

    def _context_parallel(self) -> tuple[Floats, Floats]:
        """Keys and values around the ring, hidden behind attention where it lasts long enough."""
        model, grid = self.model, self.grid
        width = model.kv_size if model.attention == "heads" else model.num_heads * model.head_size
        moved = self.rows * 2 * np.maximum(width / self.tp, model.head_size) * WIRE_BYTES
        ring = self.groups.cp.gather_s(moved * grid.cp)
        asked = self.rows * (2 * model.query_size + 2 * width) / self.tp * WIRE_BYTES
        exchange = self.groups.cp.all_to_all_s(asked, self.rates.all_to_all)
        attention, hide = self.block.attention, self.rates.overlap
        forward = np.where(
            grid.context == 1, exchange, np.maximum(ring - hide * attention.forward, 0.1 * ring)
        )
        backward = np.where(
            grid.context == 1, exchange, np.maximum(2 * ring - hide * attention.backward_input, 0.2 * ring)
        )
        return forward, backward

    def _expert_parallel(self) -> Floats:
        """Dispatch and combine of one direction, averaged over all layers."""
        model = self.model
        if not model.expert_layers:
            return np.zeros(len(self.grid))
        sent = self.rows / self.tp * (model.experts_per_token or 1) * model.hidden_size * WIRE_BYTES
        copies = (model.experts_per_token or 1) if self.rules.one_copy_a_node else 1
        once = self.groups.ep.all_to_all_s(sent, self.rates.all_to_all, copies)
        # Ranks that share an expert's matrices gather its tokens before it and scatter the sums after it.
        once = once + self.groups.etp.gather_s(sent * self.grid.etp)
        return 2 * once * model.expert_layers / model.num_layers

    def _sharded(self, forward: Floats, backward: Floats) -> tuple[Floats, Floats]:
        """ZeRO-3: each block's parameters are gathered in both directions, its gradients scattered."""
        grid, rules = self.grid, self.rules
        on = grid.zero == 3
        if not on.any():
            return np.zeros(len(grid)), np.zeros(len(grid))
        block, experts = self.shares.block, self.shares.expert_block
        gather = self._shards_s(block, experts, WIRE_BYTES)
        scatter = self._shards_s(block, experts, rules.reduce_bytes)
        wanted_back = gather + scatter + self._across_s(block, experts) / self.micro_batches
        late_forward, late_backward = self._late_s(gather, forward), self._late_s(wanted_back, backward)
        return np.where(on, late_forward, 0.0), np.where(on, late_backward, 0.0)

    def _late_s(self, wanted: Floats, passed: Floats) -> Floats:
        """What a pass does not hide of the communication beside it, and what that slows down."""
        hide, slow = self.rates.overlap, self.rates.contention
        return np.maximum(wanted - hide * passed, (1 - hide) * wanted) + slow * np.minimum(wanted, passed)

    def _shards_s(self, dense: Floats, experts: Floats, element_bytes: float) -> Floats:
        """Gathering from, or scattering to, the ranks that share dense state and experts."""
        shared = self.groups.shard.gather_s(dense * element_bytes)
        return shared + self.groups.expert_shard.gather_s(experts * element_bytes)

    def _across_s(self, dense: Floats, experts: Floats) -> Floats:
        """Gradients that one group of shards has summed, over the groups that hold the same shards."""
        left = dense / (self.grid.dp_shard * self.grid.cp) + experts / expert_shards(self.grid)
        return self.groups.replicate.all_reduce_s(left * self.rules.reduce_bytes)

    def _streamed(self, passed: Floats) -> Floats:
        """Parameters that lie on the host come in once a pass; what the pass does not hide."""
        grid = self.grid
        kept = np.where(grid.zero == 3, grid.dp_shard * grid.cp, 1)
        moved = (self.shares.block + self.shares.expert_block) / kept * WIRE_BYTES
        arriving = moved / self.workload.cluster.host_bytes_per_s
        return np.where(grid.offload == OFFLOAD_ALL, np.maximum(arriving - self.rates.overlap * passed, 0), 0)

    def _slowest(self, block: Passes, mean: Passes) -> Passes:
        """The stage that the others wait for: the last one has the head, unless it has fewer layers."""
        grid = self.grid
        even = self.model.num_layers % (grid.pp * grid.virtual_stages) == 0
        left = self.model.num_layers - self.slow_layers * (grid.pp - 1.0)
        last_layers = np.where(even, self.layers, np.clip(left, 0, self.slow_layers))
        last = block.times(last_layers) + self.head
        other = block.times(self.slow_layers)
        slow = last.where(last.total >= other.total, other)
        return mean.where(grid.pp == 1, slow)

    def _send_s(self) -> Floats:
        """One activation to the next stage; ranks of a tensor-parallel group share the work."""
        moved = self.rows * self.model.hidden_size * WIRE_BYTES / self.tp
        return self.groups.pp.send_s(moved)

    def _pipeline(self, mean: Passes, slow: Passes, send_s: Floats) -> tuple[Floats, Floats]:
        """Makespan of all micro-batches, and the bubble in it."""
        grid = self.grid
        stages = np.where(np.isin(grid.schedule, V_SHAPED), 2, grid.virtual_stages)
        chunk = mean.times(1 / stages)

        def makespan(transfer: Floats | float) -> Floats:
            return pipeline_time(
                grid.schedule, grid.pp, stages, self.micro_batches, chunk.forward, chunk.backward_input,
                chunk.backward_weight, transfer, self.rules.overlap_p2p, slow.total,
            )  # fmt: skip

        still = makespan(0.0)
        bubble = np.where(grid.pp > 1, still - self.micro_batches * slow.total, 0.0)
        total = np.where(grid.pp > 1, makespan(send_s), self.micro_batches * slow.total)
        return total, bubble

    def _data_parallel(self, block: Passes) -> tuple[Floats, Floats]:
        """Reduction of gradients at the end of a step, and gathering under ZeRO-1 and 2: shown and hidden."""
        grid, rules, groups = self.grid, self.rules, self.groups
        dense, experts = self.shares.rank, self.shares.expert_rank
        wire = rules.reduce_bytes
        # Also where nothing is sharded: experts are spread over ranks that share all else.
        replicated = (
            groups.shard.all_reduce_s(dense * wire)
            + groups.expert_shard.all_reduce_s(experts * wire)
            + groups.replicate.all_reduce_s((dense + experts) * wire)
        )
        scatter = self._shards_s(dense, experts, wire)
        gather = self._shards_s(dense, experts, WIRE_BYTES)
        across = self._across_s(dense, experts)
        sharded = (grid.zero == 1) | (grid.zero == 2)
        # ZeRO-2 has no room for whole sums: each micro-batch's gradients are scattered at once.
        times = np.where((grid.zero == 2) & (grid.accumulate == SHARDED), self.micro_batches, 1.0)
        reduce = np.where(sharded, scatter * times + across, np.where(grid.zero == 0, replicated, 0.0))
        gather = np.where(sharded, gather, 0.0)
        layers = self.layers
        window_back = (block.backward_input + block.backward_weight) * layers * times
        window_forward = block.forward * layers
        hide = self.rates.overlap
        hidden_reduce = np.minimum(hide * reduce, window_back) if rules.overlap_grad_reduce else 0 * reduce
        hidden_gather = (
            np.minimum(hide * gather, window_forward) if rules.overlap_param_gather else 0 * gather
        )
        hidden = hidden_reduce + hidden_gather
        return reduce + gather - hidden + self.rates.contention * hidden, hidden

    def _optimizer_s(self) -> Floats:
        """The update: bytes over the memory bus."""
        mine = self.shares.updated(self.grid)
        on_device = mine * self.rules.optimizer_bytes / self.device.bytes_per_s
        # On the host the update is ruled by a device's share of host memory, about as fast as its link there.
        on_host = mine * self.rules.optimizer_bytes / self.workload.cluster.host_bytes_per_s
        return np.where(self.grid.offload > 0, on_host, on_device)
