"""Builds the trainer of a rank, in one function from top to bottom."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from meshwright.checkpoint.copying import fetch_small_files
from meshwright.checkpoint.hf.source import SOURCE_FILE, HfSource, load_source, read_hf_folder
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.resume import resume
from meshwright.checkpoint.retired_snapshots import RetiredSnapshots, restore_resharded
from meshwright.checkpoint.saver import CheckpointSaver
from meshwright.checkpoint.state import CheckpointedState, TrainState
from meshwright.checkpoint.state_snapshots import StateSnapshots
from meshwright.checkpoint.stores import CheckpointStores
from meshwright.core.errors import UserError
from meshwright.core.object_path import parse_location
from meshwright.data.corpus_file import parse_corpus, read_corpus, write_corpus
from meshwright.layout.snapshot_size import keeps_snapshots
from meshwright.models.decoder import Stages
from meshwright.models.init import find_weight_source
from meshwright.models.kernels.gemm_autotune import autotune_gemms
from meshwright.models.weight_source import WeightSource, ZeroWeights
from meshwright.parallel.apply import parallelize
from meshwright.parallel.data_parallel import (
    build_backup_replicas,
    build_bucket_reducer,
    build_rank_parameters,
)
from meshwright.parallel.pipeline.build import build_pipeline
from meshwright.spec.execution import uses_fused_adamw
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel
from meshwright.train.amp import MixedPrecision
from meshwright.train.chat_template import read_template
from meshwright.train.data import OpenSplit, TrainData, open_data
from meshwright.train.expert_balance import build_expert_balancer
from meshwright.train.optimizer import build_optimizer
from meshwright.train.optimizer_offload import build_offloaded_state
from meshwright.train.parallel_model import ParallelModel
from meshwright.train.rank_context import RankContext
from meshwright.train.stop_signal import StopSignal
from meshwright.train.trainer import Trainer


def build_trainer(
    context: RankContext,
    stop: StopSignal | None = None,
    open_split: OpenSplit | None = None,
    weights: WeightSource | None = None,
) -> Trainer:
    """Build model, optimizer and data of a rank; load the checkpoint if the run is resumed.

    Args:
        context: Plan, mesh and reporting of the rank.
        stop: Set when the rank is asked to stop.
        open_split: Replaces the data that the assignment names.
        weights: Replaces the initial weights of the job.
    """
    job, assignment, mesh = context.plan.job, context.assignment, context.mesh
    _set_determinism(job)
    amp = MixedPrecision(job, mesh.device)
    restores = (
        context.retired is not None or context.restore_step is not None or assignment.resume_from is not None
    )
    if weights is None:
        weights = ZeroWeights(job.model) if restores else find_weight_source(job, assignment.hf_weights)
    model = _parallelize(context, amp, weights)
    applied = model.applied
    copies = None if applied.weight_copies is None else applied.weight_copies.copies
    optimizer = build_optimizer(model.rank_parameters, job.train, copies, uses_fused_adamw(job))
    offloaded = build_offloaded_state(optimizer, model.rank_parameters, job, mesh)
    balancer = build_expert_balancer(applied.model, job, mesh.device, amp)
    data = open_data(
        job,
        Path(assignment.data_dir),
        mesh,
        applied.parallel.cp,
        open_split,
        assignment.eval_sets,
        None if assignment.corpus is None else parse_corpus(assignment.corpus),
    )
    template, small_files = _read_small_files(context, data) if mesh.rank == 0 else (None, {})
    state = CheckpointedState(
        plan=context.plan,
        counters=TrainState(),
        model=applied.model,
        sharded=model.rank_parameters,
        optimizer=optimizer,
        loss_scaler=amp,
        expert_biases=balancer,
        corpus=data.corpus,
        template=template,
        small_files=small_files,
        transport=mesh.transport_name,
    )
    snapshots = _build_snapshots(context, state)
    context.setup.end("rebuild")
    if context.retired is not None:
        _reshard(context, context.retired, state, snapshots)
    elif context.restore_step is not None:
        assert snapshots is not None, "a snapshot to restore"
        snapshots.restore(context.restore_step)
    elif assignment.resume_from is not None:
        notes = resume(state, parse_location(assignment.resume_from), mesh.rank)
        context.events.write(
            "resumed", checkpoint=assignment.resume_from, step=state.counters.step, notes=notes
        )
    skip_samples(context, state.counters)
    data = _open_restored(context, state, data)
    context.setup.end("load")
    if applied.weight_copies is not None and restores:
        applied.weight_copies.is_stale = True
    stores = _stores_of(context)
    saver = CheckpointSaver(
        stores, state, mesh.rank, context.events, snapshots, context.commit, assignment.attempt
    )
    stop = stop or StopSignal()
    return Trainer(
        context=context,
        parallel_model=model,
        amp=amp,
        optimizer=optimizer,
        offloaded_state=offloaded,
        balancer=balancer,
        data=data,
        state=state.counters,
        saver=saver,
        stop=stop,
    )


def _open_restored(context: RankContext, state: CheckpointedState, data: TrainData) -> TrainData:
    """Open the data at the restored position; they may have grown during the run.

    Args:
        context: Context of this rank.
        state: The restored state; gets the data.
        data: The data of the start.
    """
    run_dir, counters = Path(context.assignment.run_dir), state.counters
    if counters.corpus:  # of an in-memory snapshot
        state.corpus = read_corpus(run_dir, counters.corpus)
    if state.corpus == data.corpus:
        return data
    counters.corpus = write_corpus(run_dir, state.corpus)
    return data.reopened(state.corpus)


def _reshard(
    context: RankContext, retired: RetiredSnapshots, state: CheckpointedState, own: StateSnapshots | None
) -> None:
    """Load the state from the snapshots of another layout, and keep it as a snapshot of this one."""
    restore_resharded(state, retired, context.mesh.rank)
    retired.close()
    if own is not None:
        own.take()
    context.events.write("resharded", step=state.counters.step)


def skip_samples(context: RankContext, counters: TrainState) -> None:
    """After a rollback, go on with the samples after the bad step."""
    if counters.position < context.min_position:
        skipped, counters.position = context.min_position - counters.position, context.min_position
        if context.mesh.rank == 0:
            context.events.write("rolled_back", step=counters.step, skipped_samples=skipped)


def _build_snapshots(context: RankContext, state: CheckpointedState) -> StateSnapshots | None:
    """The in-memory snapshots of this rank; None if they are off, or if there is not enough memory."""
    plan, memory = context.plan, context.snapshot_slots
    if memory is None or not keeps_snapshots(plan.job):
        return None
    if plan.host_memory is not None and plan.host_memory.snapshots_off:
        if context.mesh.rank == 0:
            context.events.write("snapshots_off", reason=plan.host_memory.snapshots_off, planned=True)
        return None
    try:
        return StateSnapshots(memory, state, plan.job.elastic.snapshot_every, context.commit)
    except OSError as error:
        context.events.write("snapshots_off", reason=str(error), planned=False)
        return None


def _read_small_files(context: RankContext, data: TrainData) -> tuple[str | None, dict[str, bytes]]:
    """Chat template and files of every checkpoint; read now, as their folders may be gone later."""
    model, resume_from = context.plan.job.model, context.assignment.resume_from
    files = {} if data.tokenizer is None else {data.tokenizer.name: data.tokenizer.read_bytes()}
    if resume_from is not None:
        source = _load_kept_source(context, resume_from)
    else:
        source = read_hf_folder(model) if isinstance(model, DecoderModel) and model.hf else None
    template, template_files = read_template(context.plan.job, source)
    return template, files | template_files | ({SOURCE_FILE: source.to_zip()} if source else {})


def _stores_of(context: RankContext) -> CheckpointStores:
    assignment = context.assignment
    return CheckpointStores.of(context.plan.job.checkpoint, assignment.checkpoint_dir, assignment.stores)


def _load_kept_source(context: RankContext, resume_from: str) -> HfSource | None:
    """The Hugging Face files that a checkpoint keeps; if it was removed since, a newer one has them."""
    newer = reversed(_stores_of(context).list_paths())
    for checkpoint in (parse_location(resume_from), *newer):
        with suppress(UserError):
            manifest = read_manifest(checkpoint, verify=False)
            with fetch_small_files(checkpoint, manifest) as folder:
                return load_source(folder)
    return None


def _set_determinism(job: Job) -> None:
    if job.train.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(job.train.deterministic)  # imports torch's compiler: two seconds
    if job.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by the first GEMM


def _parallelize(context: RankContext, amp: MixedPrecision, weights: WeightSource) -> ParallelModel:
    """Build the rank's part of the model with all axes applied, its pipeline and its optimizer shard."""
    plan, job, mesh = context.plan, context.plan.job, context.mesh
    gemms = autotune_gemms(job, mesh.device, context.events)
    applied = parallelize(job, mesh, weights, gemms)
    model, pipeline, reducer, backup = applied.model, None, None, None
    if isinstance(model, Stages):
        pipeline = build_pipeline(model, job, plan.micro_batches, mesh, amp)
    else:
        reducer = build_bucket_reducer(model, job, mesh)
        backup = build_backup_replicas(model, job, mesh, context.store)
    rank_parameters = build_rank_parameters(model, job, mesh, applied.parallel.local_shards)
    return ParallelModel(applied, pipeline, reducer, rank_parameters, backup)
