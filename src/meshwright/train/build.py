"""Builds the trainer of a rank, in one function from top to bottom."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
from torch import nn

from meshwright.checkpoint.resume import resume
from meshwright.checkpoint.saver import CheckpointSaver
from meshwright.checkpoint.state import CheckpointedState, TrainState
from meshwright.layout.stages import local_stages
from meshwright.models.bf16_weights import WeightCopies
from meshwright.models.decoder import Decoder, Stages, compile_blocks, fuse_blocks
from meshwright.models.dtypes import AUTOCAST_DTYPES, RESIDUAL_DTYPES
from meshwright.models.init import WeightSource, find_weight_source
from meshwright.models.kernels.gemm_autotune import autotune_gemms
from meshwright.models.linear import convert_linears_to_fp8
from meshwright.parallel.apply import (
    apply_data_parallel,
    build_bucket_reducer,
    build_pipeline,
    build_sharded_state,
)
from meshwright.parallel.build import ShardedWeights, build_model
from meshwright.parallel.parallel_context import ParallelContext
from meshwright.parallel.pipeline.collect import gather_to_first_stage
from meshwright.spec.execution import (
    keeps_bf16_grads,
    uses_bf16_weight_copies,
    uses_eager_blocks,
    uses_fused_adamw,
    uses_triton_blocks,
)
from meshwright.spec.job import Job
from meshwright.train.amp import MixedPrecision
from meshwright.train.data import OpenSplit, open_data
from meshwright.train.expert_balance import build_expert_balancer
from meshwright.train.optimizer import build_optimizer
from meshwright.train.optimizer_offload import build_offloaded_state
from meshwright.train.stop_signal import StopSignal
from meshwright.train.trainer import ParallelModel, RankContext, Trainer


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
    model = _parallelize(context, amp, weights or find_weight_source(job, from_hf=assignment.hf_weights))
    copies = None if model.weight_copies is None else model.weight_copies.copies
    optimizer = build_optimizer(model.sharded_state, job.train, copies, uses_fused_adamw(job))
    offloaded = build_offloaded_state(optimizer, model.sharded_state, job, mesh)
    balancer = build_expert_balancer(model.model, job, mesh.device, amp)
    data = open_data(job, Path(assignment.data_dir), mesh, model.parallel.context, open_split)
    state = CheckpointedState(
        plan=context.plan,
        counters=TrainState(),
        model=model.model,
        sharded=model.sharded_state,
        optimizer=optimizer,
        loss_scaler=amp,
        expert_biases=balancer,
        gather_to_first_stage=partial(gather_to_first_stage, mesh),
        data_sha256=data.sha256,
        tokenizer=data.tokenizer,
    )
    if assignment.resume_from is not None:
        notes = resume(state, Path(assignment.resume_from))
        if model.weight_copies is not None:
            model.weight_copies.is_stale = True
        context.events.write(
            "resumed", checkpoint=assignment.resume_from, step=state.counters.step, notes=notes
        )
    saver = CheckpointSaver(Path(assignment.checkpoint_dir), state, mesh.rank, context.events)
    return Trainer(
        context, model, amp, optimizer, offloaded, balancer, data, state.counters, saver, stop or StopSignal()
    )


def _set_determinism(job: Job) -> None:
    if job.train.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(job.train.deterministic)  # imports torch's compiler: two seconds
    if job.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by the first GEMM


def _parallelize(context: RankContext, amp: MixedPrecision, weights: WeightSource) -> ParallelModel:
    """Build the rank's part of the model and apply all axes; ``parallel.apply`` explains their order."""
    plan, job, mesh = context.plan, context.plan.job, context.mesh
    parallel = ParallelContext.of(job, mesh)
    if parallel.local_shards is not None:
        weights = ShardedWeights(weights, parallel.local_shards)
    model = build_model(job, mesh.device, weights, parallel, local_stages(job, mesh.pp_rank))
    weight_copies = _compile(model, job) if not uses_eager_blocks(job) else None
    autotune_gemms(job, mesh.device, context.events)
    module = apply_data_parallel(model, job, mesh, weights)
    pipeline, reducer = None, None
    if isinstance(model, Stages):
        pipeline = build_pipeline(model, job, plan.micro_batches, mesh, amp)
    else:
        reducer = build_bucket_reducer(model, job, mesh)
    sharded_state = build_sharded_state(model, job, mesh, parallel.local_shards)
    return ParallelModel(model, module, pipeline, reducer, parallel, sharded_state, weight_copies)


def _compile(model: nn.Module, job: Job) -> WeightCopies | None:
    """Set up blocks that are not eager, as the job says; returns the bf16 weight copies."""
    for decoder in model if isinstance(model, Stages) else (model,):
        assert isinstance(decoder, Decoder), "the legality table compiles decoders only"
        decoder.residual_dtype = RESIDUAL_DTYPES[job.train.residual_dtype]
        if job.train.precision == "fp8":
            convert_linears_to_fp8(decoder, gradients=job.train.fp8_weight_grads)
        if uses_bf16_weight_copies(job):
            decoder.weight_copies = WeightCopies(decoder, AUTOCAST_DTYPES[job.train.precision])
        if uses_triton_blocks(job):
            fuse_blocks(decoder, torch.bfloat16 if keeps_bf16_grads(job) else torch.float32)
        else:
            compile_blocks(decoder, backend=job.train.compile_backend)
    return model.weight_copies if isinstance(model, Decoder) else None
