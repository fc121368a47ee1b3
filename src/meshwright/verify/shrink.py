"""Shrinks a job that is too large to be proved on this machine, and keeps all its axes.

Each degree above one becomes the smallest legal one; layers and widths follow. A proof shows that shards are
split, sent and joined correctly: that needs two of everything, not a thousand. Every change is listed, with
the reasons.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.core.units import format_bytes, format_seconds
from meshwright.layout.flops import flops_per_token
from meshwright.layout.optimizer_state import predict_optimizer
from meshwright.layout.parameters import FLOAT32_BYTES, count_parameters, list_parameters
from meshwright.spec.job import Job
from meshwright.spec.layout import DEGREES, Layout
from meshwright.spec.legality.table import find_problems, with_layout
from meshwright.spec.load import job_tree
from meshwright.spec.model import DecoderModel, ResNetModel

MAX_RANKS = 8
"""Processes of a proof on one machine."""
MAX_MEMORY_SHARE = 0.5
"""Share of free memory for the state of all ranks; the rest is for activations."""
MAX_SECONDS = 600.0
"""Time of the reference, at the assumed FLOP/s of the machine."""

SMALL_HEAD = 16
SMALL_HEADS = 2
SMALL_SEQ_LEN = 64
SMALL_BATCH = 8
SMALL_IMAGE_WIDTH = 16
UNREPORTED_KEYS = ("model.preset", "model.hf")
"""Changed with the others, but irrelevant to the reader."""


@dataclass(frozen=True)
class Change:
    """One key of the job that was made smaller."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True)
class ShrunkJob:
    """A job that can be proved on this machine, and how it was changed."""

    job: Job
    reasons: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()

    def as_dict(self) -> dict[str, Any] | None:
        """For ``--json``; None if the job is unchanged."""
        if not self.reasons:
            return None
        changes = [dataclasses.asdict(change) for change in self.changes]
        return {"reasons": list(self.reasons), "changes": changes}


def shrink_to_fit(job: Job, steps: int, memory_bytes: int, flops_per_s: float) -> ShrunkJob:
    """The job itself if it can be proved on this machine, else a smaller one with the same axes.

    Args:
        job: With its layout given.
        steps: Steps of the proof.
        memory_bytes: Free memory.
        flops_per_s: Rate of one process.
    """
    reasons = find_reasons(job, steps, memory_bytes, flops_per_s)
    if not reasons:
        return ShrunkJob(job)
    small = shrink(job)
    return ShrunkJob(small, tuple(reasons), tuple(list_changed_keys(job, small)))


def find_reasons(job: Job, steps: int, memory_bytes: int, flops_per_s: float) -> list[str]:
    """Why a job is too large, in sentences; empty if it is not."""
    reasons = []
    layout = job.layout
    if layout.world_size > MAX_RANKS:
        reasons.append(f"{layout.world_size} ranks, more than the {MAX_RANKS} that one machine runs")
    shards = layout.dp_shard * layout.cp
    state = state_bytes(job) * layout.dp_replicate * (1 if layout.zero == 3 else shards)
    if state > MAX_MEMORY_SHARE * memory_bytes:
        room = f"{MAX_MEMORY_SHARE:.0%} of the {format_bytes(memory_bytes)} free here"
        reasons.append(f"{format_bytes(state)} of state, more than {room}")
    tokens = steps * job.train.global_batch * job.data.seq_len
    seconds = tokens * flops_per_token(job.model, job.data.seq_len) / flops_per_s
    if seconds > MAX_SECONDS:
        most = format_seconds(MAX_SECONDS)
        reasons.append(f"{steps} steps take one process about {format_seconds(seconds)}, more than {most}")
    return reasons


def state_bytes(job: Job) -> int:
    """Bytes of weights, gradients and optimizer state in one process."""
    parameters = list_parameters(job.model)
    return (
        2 * FLOAT32_BYTES * count_parameters(job.model) + predict_optimizer(parameters, job.train).state_bytes
    )


def shrink(job: Job) -> Job:
    """The smallest legal job with the same axes: fewest ranks, then the narrowest model."""
    for layout in _small_layouts(job.layout):
        for widen in (1, 2, 4, 8):
            small = _shrunk(job, layout, widen)
            if is_legal(small):
                return small
    return job


def is_legal(job: Job) -> bool:
    """Whether the job is legal; features that are not built yet are reported when it runs."""
    return all(problem.code.endswith("-not-built") for problem in find_problems(job))


def list_changed_keys(before: Job, after: Job) -> Iterator[Change]:
    """The keys that differ."""
    old, new = job_tree(before), job_tree(after)
    for section in ("layout", "model", "data", "train"):
        for key in dict.fromkeys((*old[section], *new[section])):
            path, was, now = f"{section}.{key}", old[section].get(key), new[section].get(key)
            if was != now and path not in UNREPORTED_KEYS:
                yield Change(path, was, now)


def _small_layouts(layout: Layout) -> Iterator[Layout]:
    """Layouts with small degrees on the same axes, fewest ranks first."""
    axes = [axis for axis in DEGREES if getattr(layout, axis) > 1]
    choices = [sorted({n for n in (2, 3, 4) if n <= getattr(layout, axis)}) for axis in axes]
    stages = min(layout.virtual_stages, 2)
    layouts = []
    for degrees in itertools.product(*choices):
        smaller: dict[str, Any] = dict(zip(axes, degrees, strict=True))
        smaller |= {"virtual_stages": stages, "stage_layers": None, "schedule_file": None}
        smaller |= {} if isinstance(layout.placement, str) else {"placement": "auto"}
        layouts.append(dataclasses.replace(layout, **smaller))
    return iter(sorted(layouts, key=lambda small: (small.world_size, small.ep, small.etp)))


def _shrunk(job: Job, layout: Layout, widen: int) -> Job:
    """The job with a small layout and a model ``widen`` times as wide as the narrowest."""
    model = job.model
    data, train = job.data, job.train
    share = min(train.global_batch, max(SMALL_BATCH, 4 * layout.data_degree * layout.pp))
    train = dataclasses.replace(train, global_batch=share)
    if layout.micro_batch is not None:
        most = max(1, -(-share // layout.data_degree) // (2 * layout.pp))
        layout = dataclasses.replace(layout, micro_batch=min(layout.micro_batch, most))
    if isinstance(model, ResNetModel):
        small_resnet = _shrink_resnet(model, widen)
        return with_layout(dataclasses.replace(job, model=small_resnet, train=train), layout)
    piece = 2 * layout.cp * layout.tp
    seq_len = min(data.seq_len, -(-SMALL_SEQ_LEN // piece) * piece)
    data = dataclasses.replace(data, seq_len=seq_len)
    repeated = model.num_kv_heads < job.layout.tp
    small = _shrink_decoder(model, layout, seq_len, widen, repeated)
    return with_layout(dataclasses.replace(job, model=small, data=data, train=train), layout)


def _shrink_decoder(
    model: DecoderModel, layout: Layout, seq_len: int, widen: int, repeated: bool
) -> DecoderModel:
    """Two layers, or one per stage; as many key heads as ``tp``; other widths in proportion, rounded.

    Key heads that are replicated over ``tp`` stay so: there is one.
    """
    dense = min(model.dense_layers, 1)
    windows = model.window_every if model.window else 1
    layers = max(2, layout.pp * layout.virtual_stages, dense + 1, windows)
    key_heads = 1 if repeated else min(model.num_kv_heads, max(SMALL_HEADS, layout.tp) * widen)
    groups = min(
        model.num_heads // model.num_kv_heads, 2 if model.num_kv_heads > 1 else layout.tp * widen * 2
    )
    head = min(model.head_size, SMALL_HEAD)
    heads = key_heads * groups
    hidden = min(model.hidden_size, heads * head)

    def scaled(width: int) -> int:
        """In proportion, and divisible by ``tp`` and ``etp``."""
        step = 8 * layout.tp * layout.etp
        return min(width, -(-width * hidden // (model.hidden_size * step)) * step)

    def most(value: int | None, limit: int) -> int | None:
        return None if value is None else min(value, limit)

    chosen = most(model.experts_per_token, 2)
    return dataclasses.replace(
        model,
        preset=None,
        hf=None,
        num_layers=min(model.num_layers, layers),
        dense_layers=dense,
        num_kv_heads=key_heads,
        num_heads=heads,
        head_dim=None if model.head_dim is None else head,
        hidden_size=hidden,
        ffn_size=scaled(model.ffn_size),
        expert_ffn_size=None if model.expert_ffn_size is None else scaled(model.expert_ffn_size),
        experts_per_token=chosen,
        num_experts=most(model.num_experts, 2 * max(layout.ep, chosen or 1)),
        latent_size=most(model.latent_size, 2 * head),
        query_latent_size=most(model.query_latent_size, 2 * head),
        rope_head_dim=most(model.rope_head_dim, head),
        value_head_dim=most(model.value_head_dim, head),
        window=most(model.window, max(1, seq_len // 2)),
        max_positions=model.max_positions
        if model.positions == "rope"
        else most(model.max_positions, seq_len),
    )


def _shrink_resnet(model: ResNetModel, widen: int) -> ResNetModel:
    """One block per stage and a narrow first stage; the image size stays that of the data."""
    least = SMALL_IMAGE_WIDTH if model.norm_groups is None and model.norm == "batch" else model.groups
    width = min(model.width, least * widen)
    return dataclasses.replace(model, preset=None, blocks=(1,) * len(model.blocks), width=width)
