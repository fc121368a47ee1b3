"""Everything that one rank holds while it trains, built in one place."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.checkpoint import saver as plain
from meshwright.checkpoint.manifest import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    SELECTION_BIAS,
    Manifest,
    list_checkpoints,
    read_manifest,
)
from meshwright.core.events import EventWriter
from meshwright.data.dataset import TokenDataset
from meshwright.data.order import SampleOrder
from meshwright.data.shards import ShardFolder
from meshwright.data.tokenizer import TOKENIZER_FILE
from meshwright.launch.assignment import Assignment
from meshwright.layout.optimizer_state import STEP_COUNT, rule_of, state_keys
from meshwright.layout.stages import local_stages, locate_parameters
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.measure.step_observer import StepObserver
from meshwright.models.bf16_weights import WeightCopies
from meshwright.models.decoder import Decoder, Stages, compile_blocks, fuse_blocks
from meshwright.models.dtypes import AUTOCAST_DTYPES, RESIDUAL_DTYPES
from meshwright.models.init import WeightSource, find_weight_source
from meshwright.models.kernels.gemm_autotune import autotune_gemms
from meshwright.models.linear import convert_linears_to_fp8
from meshwright.models.resnet import ResNet
from meshwright.parallel.apply import (
    apply_data_parallel,
    build_bucket_reducer,
    build_pipeline,
    build_sharded_state,
)
from meshwright.parallel.bucket_reducer import BucketReducer
from meshwright.parallel.build import ShardedWeights, build_model
from meshwright.parallel.context import ContextParallel
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.parallel_context import ParallelContext
from meshwright.parallel.pipeline.collect import gather_to_first_stage
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.zero1 import ShardedState
from meshwright.plan.contract import Plan
from meshwright.spec.execution import (
    autotunes_gemms,
    keeps_bf16_grads,
    uses_bf16_weight_copies,
    uses_eager_blocks,
    uses_fused_adamw,
    uses_triton_blocks,
)
from meshwright.spec.job import Job, Train
from meshwright.spec.model import ResNetModel
from meshwright.spec.train_defaults import fill_defaults
from meshwright.train.amp import MixedPrecision
from meshwright.train.batches import Batcher, BatchPrefetcher
from meshwright.train.divergence import non_finite_error
from meshwright.train.expert_balance import ExpertBalancer, build_expert_balancer
from meshwright.train.gradient_noise import NoiseScale
from meshwright.train.image_batches import ImageBatcher, open_image_batches
from meshwright.train.optimizer import build_optimizer
from meshwright.train.optimizer_offload import OffloadedOptimizerState, build_offloaded_state

NEW_KEYS = {f.name: f.default for f in dataclasses.fields(Train) if f.default is not dataclasses.MISSING}
"""What a key was in a checkpoint that is older than the key."""


@dataclass
class Trainer:
    """One rank's objects and its place in the run."""

    plan: Plan
    assignment: Assignment
    mesh: Mesh
    counter: CollectiveCounter
    events: EventWriter
    model: Decoder | ResNet | Stages
    module: nn.Module
    """The model as the layout wraps it; what is called."""
    pipeline: Pipeline | None
    """Calls the stages, where the model is cut into some."""
    reducer: BucketReducer | None
    """Sums gradients, where neither the module nor the pipeline does."""
    parallel: ParallelContext
    """Which positions, parts of matrices and experts this rank has."""
    sharded_state: ShardedState
    """What of the model this rank updates and keeps state for."""
    optimizer: torch.optim.Optimizer
    offloaded: OffloadedOptimizerState | None
    """Where its state lies on the host."""
    noise_scale: NoiseScale
    amp: MixedPrecision
    weight_copies: WeightCopies | None
    """Copies of its matrices in 16 bits, where products read some."""
    balancer: ExpertBalancer | None
    """Keeps experts evenly busy, where there are some."""
    train_batches: Batcher | ImageBatcher
    eval_batches: Batcher | ImageBatcher
    order: SampleOrder
    prefetcher: BatchPrefetcher
    """Gives every step its batch."""
    data_sha256: str
    """Of the index, which holds the shards' own checksums; of images, see ``prepare.images``."""
    step: int = 0
    """Optimizer steps done."""
    first_step: int = 0
    """Where this attempt began."""
    position: int = 0
    """Samples consumed."""
    stop_requested: bool = False
    """Set by a signal; the ranks agree on it at the end of a step."""
    saved_step: int = -1
    """Steps done when the last checkpoint was begun: until it is written, rank 0 is behind."""
    save_requested: bool = False
    """Agreed on at the end of a step, where all ranks take part in a checkpoint."""
    saved_at: float = field(default_factory=time.monotonic)
    """When the last checkpoint was begun."""
    best_eval_loss: float = float("inf")
    audit: StepObserver | None = None
    """Watches the step, if it is audited or proved."""

    @property
    def job(self) -> Job:
        """The settled job."""
        return self.plan.job

    def is_save_due(self) -> bool:
        """Whether the time between two checkpoints is over."""
        return 0 < self.job.checkpoint.every_minutes <= (time.monotonic() - self.saved_at) / 60

    def has_checkpoint(self) -> bool:
        """Whether there is one to resume from; asks the disk, as only rank 0 knows what it has saved."""
        return bool(list_checkpoints(Path(self.assignment.checkpoint_dir)))


OpenSplit = Callable[[str], TokenDataset]
"""Gives the samples of ``train`` or ``eval``."""


def build_trainer(
    plan: Plan,
    assignment: Assignment,
    mesh: Mesh,
    counter: CollectiveCounter,
    events: EventWriter,
    open_split: OpenSplit | None = None,
    weights: WeightSource | None = None,
) -> Trainer:
    """Build model, optimizer and data of this rank; load the checkpoint if there is one to resume.

    Args:
        plan: What to build.
        assignment: Where things lie.
        mesh: This rank's place.
        counter: Of collectives.
        events: Where this rank writes what happens.
        open_split: In place of the data that the assignment names.
        weights: First values in place of the job's, for who does not care which.
    """
    job = plan.job
    if job.train.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(job.train.deterministic)  # loads torch's compiler: two seconds
    if job.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product runs
    parallel = ParallelContext.of(job, mesh)
    weights = weights or find_weight_source(job, from_hf=assignment.hf_weights)
    if parallel.local_shards is not None:
        weights = ShardedWeights(weights, parallel.local_shards)
    model = build_model(job, mesh.device, weights, parallel, local_stages(job, mesh.pp_rank))
    assert job.layout.micro_batch is not None, "a plan settles the micro-batch"
    train_batches, eval_batches, data_sha256 = _open_data(
        job, Path(assignment.data_dir), mesh, parallel.context, open_split
    )
    weight_copies = _compile(model, job) if not uses_eager_blocks(job) else None
    autotune_gemms(job, mesh.device, events)
    module = apply_data_parallel(model, job, mesh, weights)
    amp, pipeline, reducer = MixedPrecision(job, mesh.device), None, None
    if isinstance(model, Stages):
        pipeline = build_pipeline(model, job, plan.micro_batches, mesh, amp)
    else:
        reducer = build_bucket_reducer(model, job, mesh)
    sharded_state = build_sharded_state(model, job, mesh, parallel.local_shards)
    order = SampleOrder(train_batches.dataset.shard_sample_counts, job.train.seed)
    copies = None if weight_copies is None else weight_copies.copies
    optimizer = build_optimizer(sharded_state, job.train, copies, uses_fused_adamw(job))
    trainer = Trainer(
        plan=plan,
        assignment=assignment,
        mesh=mesh,
        counter=counter,
        events=events,
        model=model,
        module=module,
        pipeline=pipeline,
        reducer=reducer,
        parallel=parallel,
        sharded_state=sharded_state,
        optimizer=optimizer,
        offloaded=build_offloaded_state(optimizer, sharded_state, job, mesh),
        noise_scale=NoiseScale(module, job.train.noise_scale_every),
        amp=amp,
        weight_copies=weight_copies,
        balancer=build_expert_balancer(model, job, mesh.device, amp),
        train_batches=train_batches,
        eval_batches=eval_batches,
        order=order,
        prefetcher=BatchPrefetcher(order, train_batches, job.train.global_batch, mesh.device),
        data_sha256=data_sha256,
    )
    if assignment.resume_from is not None:
        _resume(trainer, Path(assignment.resume_from))
    return trainer


def _compile(model: nn.Module, job: Job) -> WeightCopies | None:
    """Blocks as compiled ones are: with a stream, products and copies as the job says; returns the copies."""
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


def _open_data(
    job: Job, data_dir: Path, mesh: Mesh, context: ContextParallel | None, open_split: OpenSplit | None
) -> tuple[Batcher, Batcher, str] | tuple[ImageBatcher, ImageBatcher, str]:
    """This rank's samples to train on and to evaluate with, and the identity of the data."""
    if isinstance(job.model, ResNetModel):
        return open_image_batches(job, job.model, data_dir, mesh.dp_rank)

    rows = (job.data.seq_len, job.data.mask, job.data.prompt_masking)
    share = 1 / job.train.global_batch if job.model.num_experts else None

    def batcher(split: str) -> Batcher:
        dataset = open_split(split) if open_split else TokenDataset.open(data_dir, split, *rows)
        degree, micro_batch = job.layout.data_degree, job.layout.micro_batch or 1
        return Batcher(dataset, mesh.dp_rank, degree, micro_batch, context, share)

    if open_split is not None:
        return batcher("train"), batcher("eval"), ""
    digest = hashlib.sha256(ShardFolder.open(data_dir).index.to_bytes()).hexdigest()
    return batcher("train"), batcher("eval"), digest


def take_snapshot(trainer: Trainer) -> plain.Snapshot:
    """What a checkpoint of this moment holds: parameters, a tied head not a second time, and their state.

    Each tensor that is cut is gathered in a call of its own, when it is asked for, and only then: every rank
    must go through all of them, and none holds more than one. A weight that is not finite raises there.
    """
    sharded_state, train = trainer.sharded_state, trainer.job.train
    named = dict(sharded_state.named_parameters())
    model: dict[str, plain.SavedTensor] = {}
    state: dict[str, plain.SavedTensor] = {}
    for parameter, holder in locate_parameters(trainer.job):
        name, shape = parameter.name, parameter.shape
        piece = partial(_piece, trainer.mesh, holder)
        model[name] = piece(shape, partial(sharded_state.full_parameter, name))
        for key in state_keys(rule_of(name, len(shape), train), train):
            own = trainer.optimizer.state[named[name]][key] if name in named else torch.empty(0)
            if key == STEP_COUNT:
                state[f"{name}:{key}"] = piece((), partial(torch.clone, own))
            else:
                state[f"{name}:{key}"] = piece(shape, partial(sharded_state.full_tensor, name, own))
    if trainer.job.mixes_samples:  # the running statistics of batch norms
        model |= {name: plain.SavedTensor.of(buffer) for name, buffer in trainer.model.named_buffers()}
    if trainer.balancer is not None and trainer.balancer.bias_LE is not None:
        model[SELECTION_BIAS] = plain.SavedTensor.of(trainer.balancer.bias_LE)  # the same on every rank
    model = {n: replace(p, whole=partial(_require_finite, trainer, n, p.whole)) for n, p in model.items()}
    return plain.Snapshot({MODEL_FILE: model, OPTIMIZER_FILE: state})


def _piece(mesh: Mesh, holder: int, shape: tuple[int, ...], make: Callable[[], Tensor]) -> plain.SavedTensor:
    """A tensor of a checkpoint, at the rank that writes it."""
    bring = partial(gather_to_first_stage, mesh, holder, shape, torch.float32, make)
    return plain.SavedTensor(torch.float32, shape, bring)


def _require_finite(trainer: Trainer, name: str, make: Callable[[], Tensor]) -> Tensor:
    whole = make()
    if not bool(torch.isfinite(whole).all()):  # never over a good checkpoint
        raise non_finite_error(f"weight {name}", math.nan, trainer.step, trainer.has_checkpoint())
    return whole


def save(trainer: Trainer, snapshot: plain.Snapshot, eval_loss: float | None) -> Path:
    """Write a checkpoint of this moment; called by rank 0 alone."""
    job = trainer.job
    root = Path(trainer.assignment.checkpoint_dir)
    manifest = Manifest(
        step=trainer.step,
        position=trainer.position,
        world_size=trainer.mesh.world_size,
        model=dataclasses.asdict(job.model),
        train=fill_defaults(job.train),
        seq_len=job.data.seq_len,
        mask=job.data.mask,
        prompt_masking=job.data.prompt_masking,
        data_sha256=trainer.data_sha256,
        buckets=[list(names) for names in trainer.plan.buckets],
        micro_batch=job.layout.micro_batch or 0,
        compression=job.compression.kind,
        sharding=describe_sharding(job),
        torch=torch.__version__,
        loss_scale=trainer.amp.state_dict(),
        eval_loss=eval_loss,
        best_eval_loss=None if math.isinf(trainer.best_eval_loss) else trainer.best_eval_loss,
    )
    data = trainer.train_batches.dataset
    extra = (data.tokenizer_folder / TOKENIZER_FILE,) if isinstance(data, TokenDataset) else ()
    return plain.save_checkpoint(root, manifest, snapshot, extra)


@torch.no_grad()
def _resume(trainer: Trainer, checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint, verify=False)  # whoever named it has verified it
    sharded_state = trainer.sharded_state
    named = dict(sharded_state.named_parameters())
    states = {
        f"{name}:{key}": value
        for name, parameter in named.items()
        for key, value in trainer.optimizer.state.get(parameter, {}).items()
    }
    weights = dict(zip(named, sharded_state.local_parameters(), strict=True))
    if trainer.job.mixes_samples:
        weights |= dict(trainer.model.named_buffers())
    if trainer.balancer is not None:
        _resume_biases(trainer.balancer, trainer.model, checkpoint)
    for file, targets in ((MODEL_FILE, weights), (OPTIMIZER_FILE, states)):
        with plain.open_tensors(checkpoint, file) as saved:
            missing = targets.keys() - set(saved.keys())
            assert not missing, f"{file} lacks tensors of the model: {checkpoint}: {sorted(missing)}"
            for key, target in targets.items():
                whole = saved.get_slice(key)  # nothing is read yet
                if whole.get_shape() == list(target.shape):
                    target.copy_(saved.get_tensor(key))
                else:
                    target.copy_(sharded_state.shard_to(key.partition(":")[0], whole, target.shape))
    if trainer.weight_copies is not None:
        trainer.weight_copies.is_stale = True
    trainer.step, trainer.position = manifest.step, manifest.position
    if manifest.train.get("loss_scale") == trainer.job.train.loss_scale:  # another first scale starts anew
        trainer.amp.load_state_dict(manifest.loss_scale)
    if manifest.best_eval_loss is not None:
        trainer.best_eval_loss = manifest.best_eval_loss
    notes = _differences(manifest, trainer)
    trainer.events.write("resumed", checkpoint=str(checkpoint), step=trainer.step, notes=notes)


def _resume_biases(balancer: ExpertBalancer, model: nn.Module, checkpoint: Path) -> None:
    """The biases that experts are chosen by; where the run before had none, they start at zero.

    They are a part of the model: without a rate they move no more, and experts are still chosen by them.
    """
    with plain.open_tensors(checkpoint, MODEL_FILE) as saved:
        if SELECTION_BIAS in set(saved.keys()):
            balancer.use_biases(model, saved.get_tensor(SELECTION_BIAS))


def describe_sharding(job: Job) -> str:
    """How the state is cut, as the manifest says it; empty where it is not."""
    layout, parts = job.layout, []
    if layout.pp > 1:
        order = "a file" if layout.schedule_file else layout.schedule
        layers = ",".join(str(count) for count in layout.stage_layers or ())
        parts.append(f"pp={layout.pp} schedule={order} stage_layers={layers}")
    if layout.zero:
        parts.append(f"dp_replicate={layout.dp_replicate} dp_shard={layout.dp_shard} zero={layout.zero}")
    if layout.cp > 1:
        parts.append(f"cp={layout.cp} context={layout.context}")
    if layout.ep * layout.etp > 1:
        parts.append(f"ep={layout.ep} etp={layout.etp}")
    if layout.tp > 1:
        parts.append(f"tp={layout.tp}" + (" sequence_parallel" if layout.sequence_parallel else ""))
    return " ".join(parts)


def _differences(manifest: Manifest, trainer: Trainer) -> list[str]:
    """What makes the curve go on differently, in sentences; empty if it goes on bit by bit."""
    job, notes = trainer.job, []
    if manifest.world_size != trainer.mesh.world_size:
        notes.append(
            f"{manifest.world_size} ranks before, {trainer.mesh.world_size} now: equal up to rounding"
        )
    elif manifest.buckets != [list(names) for names in trainer.plan.buckets]:
        notes.append("the gradient buckets are cut differently: equal up to rounding")
    facts = (
        ("layout.micro_batch", manifest.micro_batch, job.layout.micro_batch),
        ("compression.kind", manifest.compression, job.compression.kind),
        ("the sharding", manifest.sharding or "none", describe_sharding(job) or "none"),
        ("torch", manifest.torch, torch.__version__),
    )
    notes += [
        f"{name} was {before}, is {now}: equal up to rounding" for name, before, now in facts if before != now
    ]
    if autotunes_gemms(job):
        notes.append("algorithms of products may be others than before: equal up to rounding")
    if manifest.data_sha256 != trainer.data_sha256:
        notes.append("the data are not the same as before")
    for key, value in fill_defaults(job.train).items():
        before = manifest.train.get(key, NEW_KEYS.get(key))
        if key not in ("eval_every", "eval_samples", "noise_scale_every") and before != value:
            notes.append(f"train.{key} was {before}, is {value}")
    return notes
