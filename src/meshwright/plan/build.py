"""Builds the contract: searches the layouts of a job, predicts the chosen one, writes down its figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.layout.axes import dense_shard_axis, reduces_full_grads
from meshwright.layout.ddp_buckets import local_buckets
from meshwright.layout.flops import flops_per_token
from meshwright.layout.fsdp_groups import shard_ranks, sharded_state_bytes
from meshwright.layout.no_effect import find_unused_settings
from meshwright.layout.optimizer_offload import offloaded_state
from meshwright.layout.parameters import count_parameters
from meshwright.layout.snapshot_size import keeps_snapshots, predict_snapshot_bytes
from meshwright.layout.stages import pp_rank_of
from meshwright.layout.state_chunks import predict_staging_bytes
from meshwright.layout.tensor_parallel import local_model
from meshwright.plan.contract import PlanContract, RankPrediction, layout_keys
from meshwright.plan.memory.cpu_memory import predict_cpu_memory
from meshwright.plan.memory.feed_forward import balanced_rows, row_bytes
from meshwright.plan.memory.fit import MemoryNeed, usable_bytes
from meshwright.plan.memory.ledger import Ledger
from meshwright.plan.predict import Prediction
from meshwright.plan.search.find import SearchResult
from meshwright.plan.search.planner import search_job
from meshwright.plan.search.reasons import explain_choice
from meshwright.plan.time.interval import step_interval
from meshwright.spec.execution import resolve_transport
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


def build_plan(job: Job, named: Sequence[str] = ()) -> tuple[PlanContract, SearchResult]:
    """Search the layouts of a job and build the contract of the best one.

    Args:
        job: Its layout may be open.
        named: Layout keys that the user wrote; they keep their value.
    """
    found = search_job(job, named)
    return plan_from(found.best[0], explain_choice(job, found), job.layout.stage_layers is None), found


def plan_from(
    prediction: Prediction, reasons: Sequence[str] = (), layers_assigned: bool = True
) -> PlanContract:
    """The contract for one layout.

    Args:
        prediction: The layout's prediction.
        reasons: Why the layout was chosen.
        layers_assigned: Whether the planner, not the user, assigned layers to pipeline stages.
    """
    ranks = tuple(_list_ranks(prediction))
    cpu_memory = predict_cpu_memory(prediction.job, ranks, prediction.placement) if prediction.exact else None
    if cpu_memory is not None and cpu_memory.snapshots_off:
        ranks = tuple(dataclasses.replace(rank, snapshot_bytes=0) for rank in ranks)
        reasons = [*reasons, f"in-memory snapshots off: {cpu_memory.snapshots_off}"]
    if cpu_memory is not None and cpu_memory.staging_off:
        ranks = tuple(dataclasses.replace(rank, staging_bytes=0) for rank in ranks)
        reasons = [*reasons, f"checkpoints are synchronous: {cpu_memory.staging_off}"]
    return dataclasses.replace(_build(prediction, reasons, layers_assigned, ranks), host_memory=cpu_memory)


def summarize_plan(plan: PlanContract) -> dict[str, Any]:
    """A plan for ``--json``."""
    return _summarize(plan, plan.classes())


def summarize(prediction: Prediction, reasons: Sequence[str] = ()) -> dict[str, Any]:
    """A prediction for ``--json``: the summary of its plan, without a list of all ranks."""
    memory = prediction.memory
    ranks = [
        _predict_rank(pp_rank, ledger, need, ledger.state_bytes)
        for pp_rank, (ledger, need) in enumerate(zip(memory.ledgers, memory.needs, strict=True))
    ]
    plan = _build(prediction, reasons, True, ())
    return _summarize(plan, {name: ranks[pp_rank] for name, pp_rank in prediction.classes.items()})


def _summarize(plan: PlanContract, ranks: dict[str, RankPrediction]) -> dict[str, Any]:
    """The layout with the memory of one rank per class."""
    spread = step_interval(plan.job)
    needed = max(rank.needed_bytes for rank in ranks.values())
    summary = {
        "layout": layout_keys(plan.job),
        "step_s": plan.step_s,
        "step_s_low": plan.step_s * spread.low,
        "step_s_high": plan.step_s * spread.high,
        "interval_basis": spread.basis,
        "tokens_per_s_per_device": plan.tokens_per_step / plan.step_s / plan.world_size,
        "mfu": plan.mfu,
        "cost_per_step": plan.cost_per_step,
        "memory_bytes": {name: rank.summary() for name, rank in ranks.items()},
        "needed_bytes": needed,
        "fits": needed <= plan.usable_bytes,
        "exact": plan.exact,
        "breakdown_s": plan.breakdown_s,
        "hidden_s": plan.hidden_s,
        "collectives": [row.as_dict() for row in plan.collectives],
        "transport": plan.transport,
        "placement": [list(pair) for pair in plan.rank_placement.as_pairs()] if plan.placement else None,
        "reasons": list(plan.reasons),
        "unused_settings": [unused.as_dict() for unused in find_unused_settings(plan.job)],
    }
    if plan.host_memory is not None:
        summary["host_memory"] = plan.host_memory.as_dict()
    if plan.pipeline is not None:
        summary["bubble"] = plan.pipeline.bubble
        summary["stages"] = [dataclasses.asdict(row) for row in plan.stages()]
    return summary


def _build(
    prediction: Prediction,
    reasons: Sequence[str],
    layers_assigned: bool,
    ranks: tuple[RankPrediction, ...],
) -> PlanContract:
    job, layout = prediction.job, prediction.layout
    whole = prediction.exact and reduces_full_grads(job)
    return PlanContract(
        job=job,
        micro_batches=prediction.micro_batches,
        step_s=prediction.step_s,
        breakdown_s=prediction.time.parts,
        hidden_s=prediction.time.hidden,
        tokens_per_step=job.train.global_batch * job.data.seq_len,
        flops_per_token=flops_per_token(job.model, job.data.seq_len),
        parameters=count_parameters(job.model),
        ranks=ranks,
        collectives=prediction.traffic,
        buckets=tuple(
            tuple(names) for rank in (range(layout.pp) if whole else ()) for names in local_buckets(job, rank)
        ),
        layers_assigned=layout.pp > 1 and layers_assigned,
        reasons=tuple(reasons),
        pipeline=prediction.time.pipeline,
        exact=prediction.exact,
        usable_bytes=usable_bytes(job.cluster),
        transport=resolve_transport(job),
        placement=prediction.placement,
    )


def _list_ranks(prediction: Prediction) -> Iterator[RankPrediction]:
    """The prediction of each rank; for a plan-only layout, one rank per class."""
    job, memory = prediction.job, prediction.memory
    if not prediction.exact:
        for pp_rank, (ledger, need) in enumerate(zip(memory.ledgers, memory.needs, strict=True)):
            yield _predict_rank(pp_rank, ledger, need, ledger.state_bytes)
        return
    sharded = dense_shard_axis(job.layout).size > 1
    states: dict[tuple[int, tuple[int, int]], dict[str, int]] = {}
    offloaded: dict[tuple[int, tuple[int, int]], dict[str, int]] = {}
    snapshots: dict[tuple[int, tuple[int, int]], int] = {}
    staging: dict[tuple[int, tuple[int, int]], int] = {}
    rows, each_row = _balanced_routing(job)
    for rank in range(job.layout.world_size):
        pp_rank, shards = pp_rank_of(job, rank), shard_ranks(job, rank)
        ledger = memory.ledgers[pp_rank]
        if (pp_rank, shards) not in states:
            state = sharded_state_bytes(job, rank) if sharded else ledger.state_bytes
            states[pp_rank, shards], offloaded[pp_rank, shards] = state, offloaded_state(job, state)
            snapshots[pp_rank, shards] = predict_snapshot_bytes(job, rank) if keeps_snapshots(job) else 0
            is_staged = job.checkpoint.asynchronous
            staging[pp_rank, shards] = predict_staging_bytes(job, rank) if is_staged else 0
        predicted = _predict_rank(rank, ledger, memory.needs[pp_rank], states[pp_rank, shards])
        yield dataclasses.replace(
            predicted,
            offloaded_bytes=offloaded[pp_rank, shards],
            snapshot_bytes=snapshots[pp_rank, shards],
            staging_bytes=staging[pp_rank, shards],
            routed_rows=rows,
            row_bytes=each_row,
        )


def _predict_rank(rank: int, ledger: Ledger, need: MemoryNeed, state: dict[str, int]) -> RankPrediction:
    return RankPrediction(
        rank=rank,
        state_bytes=state,
        peak_bytes=ledger.peak_bytes,
        peak_at=ledger.peak_at,
        first_peak_bytes=ledger.first_peak_bytes,
        activation_bytes=ledger.activation_bytes,
        lines=ledger.lines,
        needed_bytes=need.needed_bytes,
    )


def _balanced_routing(job: Job) -> tuple[int, int]:
    """Rows of a rank's experts in one layer, and activation bytes per row; 0 without experts."""
    model = local_model(job)
    if not isinstance(model, DecoderModel) or not model.expert_layers:
        return 0, 0
    return balanced_rows(job, model, job.layout.micro_batch or 1), row_bytes(job, model)
