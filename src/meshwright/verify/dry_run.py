"""One rank of a layout without devices, memory or the other ranks: one step of the real code.

Tensors are torch's fake ones, which have a shape and a type and nothing inside; process groups are torch's
fake ones, which return at once. What is built, wrapped, called and freed is what a real rank builds, wraps,
calls and frees: the same functions in the same order, under the same counter and the same tracker.

Integers stay real. They are few, and code reads them: the order of DDP's buckets, the coordinates of a mesh,
the number of targets, how many tokens an expert gets. Whatever else is read from a tensor is zero.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore  # makes the backend known, too
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from meshwright.core.events import EventWriter, Listener
from meshwright.data.dataset import SampleBatch, TokenDataset
from meshwright.launch.assignment import Assignment
from meshwright.measure.collective_counter import DEVICE_KEYS, CollectiveCounter
from meshwright.models.moe import MixtureOfExperts
from meshwright.parallel.batch import Batch
from meshwright.parallel.expert import ShardedTokens, TokenDispatcher
from meshwright.parallel.mesh import destroy_mesh, init_mesh
from meshwright.plan.contract import Plan
from meshwright.spec.job import Job
from meshwright.train.batches import Batcher, Samples
from meshwright.train.build import build_trainer
from meshwright.train.loop import report_end
from meshwright.train.step_audit import StepAudit
from meshwright.train.trainer import RankContext, Trainer

ProgressCallback = Callable[[str], None]
"""Told what is being done."""
_READ = torch.ops.aten._local_scalar_dense.default
"""What ``item``, ``tolist`` and ``float`` call."""
_COUNT = torch.ops.aten.arange
"""Of integers it is integers, unless a type is asked for."""


def dry_run_step(plan: Plan, rank: int, listener: Listener, report_progress: ProgressCallback) -> None:
    """Take one step as a rank.

    Args:
        plan: Of a job for CPU, not compiled.
        rank: Which of its ranks.
        listener: Told the events of an audited step: ``state`` and ``collectives``.
        report_progress: For progress.
    """
    assert plan.job.cluster.device == "cpu", "fake tensors are those of a CPU here"
    counter, events = CollectiveCounter(), EventWriter(Path(os.devnull), rank, 0, listener)
    counter.install()
    mesh = None
    try:
        mesh = init_mesh(plan.job, counter, FakeStore(), rank, backend="fake")
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, RealIntegers():
            report_progress("building")
            nowhere = Assignment(os.devnull, os.devnull, os.devnull)
            blank = ZeroDataset(plan.job)
            with SharedChunks():
                context = RankContext(plan, nowhere, mesh, counter, events)
                trainer = build_trainer(context, open_split=lambda _: blank)
            route_evenly(trainer.model)
            batches = trainer.data.train
            assert isinstance(batches, Batcher), "decoders read tokens"
            _run_step(trainer, FakeBatcher(**vars(batches), fake=fake), report_progress)
    finally:
        if mesh is not None:
            destroy_mesh(mesh)
        counter.remove()
        events.close()


def route_evenly(model: nn.Module) -> None:
    """Experts get the same number of tokens each, over all ranks: scores that are nowhere choose nobody."""
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            place = 0
            if isinstance(layer.dispatch, TokenDispatcher):
                place = layer.dispatch.rank
                layer.dispatch = EvenExchange(layer.dispatch)
            layer.router.choose = functools.partial(choose_round_robin, place)
            if isinstance(layer.tokens, ShardedTokens):
                layer.tokens = EvenTokens(layer.tokens)


def choose_round_robin(place: int, scores: Tensor, chosen: Tensor) -> Tensor:
    """Experts in turn, as no score says anything; each rank goes on where the one before it has ended."""
    slots = torch.arange(chosen.numel(), dtype=torch.int64).view_as(chosen)
    return (slots + place * chosen.numel()) % scores.shape[1]


class EvenExchange(TokenDispatcher):
    """Every other rank sends as much as this one, to the experts in turn."""

    def __init__(self, exchange: TokenDispatcher) -> None:
        vars(self).update(vars(exchange))

    def exchange_counts(self, told_XH: Tensor) -> Tensor:  # noqa: N803
        """Asks, and knows the answer."""
        super().exchange_counts(told_XH)
        ranks, held = told_XH.shape
        sent = int(told_XH.sum()) // self._etp
        begins = torch.arange(ranks).unsqueeze(1) * sent
        own = torch.arange(held) + self.rank // self._etp * held
        return (sent - (own - begins) % self._experts + self._experts - 1) // self._experts


class EvenTokens(ShardedTokens):
    """The tokens of every other rank chose what this one's did."""

    def __init__(self, tokens: ShardedTokens) -> None:
        vars(self).update(vars(tokens))

    def gather(self, experts_NK: Tensor) -> Tensor:  # noqa: N803
        """Asks, and knows the answer."""
        ranks = len(super().gather(experts_NK)) // len(experts_NK)
        return experts_NK.repeat(ranks, 1)


def _run_step(trainer: Trainer, batches: FakeBatcher, report_progress: ProgressCallback) -> None:
    """The step, audited as the first of a run is."""
    samples = trainer.job.train.global_batch
    with ReportedStepAudit(trainer, report_progress) as audit:
        micro_batches = batches.micro_batches(np.arange(samples))
        trainer.compute_step(micro_batches, samples * trainer.job.data.seq_len, audit)
    trainer.state.advance(samples)
    report_end(trainer, evaluations=0, stopping=False)


class ReportedStepAudit(StepAudit):
    """The audit of a step, which also says how far the step is."""

    def __init__(self, trainer: Trainer, report_progress: ProgressCallback) -> None:
        super().__init__(trainer)
        self._tell, self._all = report_progress, trainer.plan.micro_batches

    def before_forward(self, micro_batch: int) -> None:
        """A forward pass begins."""
        self._tell(f"micro-batch {micro_batch + 1} of {self._all}")
        super().before_forward(micro_batch)

    def after_backward(self) -> None:
        """The gradients are complete."""
        self._tell("updating")
        super().after_backward()


class RealIntegers(TorchDispatchMode):
    """Above the fake mode: integers and what is made of them are real, and collectives are called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation for real where nothing fake goes into it."""
        kwargs = kwargs or {}
        if FakeTensor in types:
            if func is _READ:
                return 0.0 if args[0].is_floating_point() else 0
            if func.namespace in ("_c10d_functional", "meshwright"):
                # Their kernels for fake tensors only make the result; those for a CPU call the group.
                return func.redispatch(DEVICE_KEYS["cpu"], *args, **kwargs)
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype")
        given = any(isinstance(leaf, Tensor) for leaf in tree_iter((args, kwargs)))
        counts = dtype is None and func.overloadpacket is _COUNT and all(type(a) is int for a in args)
        if given or counts or (dtype is not None and not dtype.is_floating_point):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class SharedChunks(TorchFunctionMode):
    """Chunks of one shape are one tensor while a model is cut: FSDP2 makes all ranks' and keeps its own.

    Nothing is inside them that could differ, and a view costs a fake tensor a tenth of a millisecond: 512
    ranks of a 70B model took most of a minute for it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Cut once where torch would cut as often as there are ranks."""
        kwargs = kwargs or {}
        if func is torch.chunk and isinstance(args[0], FakeTensor):  # nothing is differentiated yet
            return _chunk_once(*args, **kwargs)
        return func(*args, **kwargs)


def _chunk_once(whole: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    rows = whole.size(dim)
    size = -(-rows // chunks)
    full, rest = divmod(rows, size)
    tail = [whole.narrow(dim, full * size, rest)] if rest else []
    return [whole.narrow(dim, 0, size)] * full + tail


class ZeroDataset(TokenDataset):
    """As many samples as a step wants, of zeros; every position is a target."""

    def __init__(self, job: Job) -> None:
        self.seq_len, self.mask = job.data.seq_len, job.data.mask
        self.shard_sample_counts = (job.train.global_batch,)

    def __len__(self) -> int:
        return self.shard_sample_counts[0]

    def read(self, indices: npt.ArrayLike) -> SampleBatch:
        """Zeros."""
        zeros = np.zeros((np.size(indices), self.seq_len), dtype=np.int64)
        return SampleBatch(zeros, zeros, zeros if self.mask == "document" else None)


@dataclass(frozen=True, kw_only=True)
class FakeBatcher(Batcher):
    """A rank's micro-batches: targets, which are counted, are real, and all else is fake."""

    fake: FakeTensorMode

    def micro_batches(self, samples: Samples, min_samples: int = 0) -> Iterator[Batch]:
        """The model's arguments."""
        for batch in super().micro_batches(samples, min_samples):
            faked = {
                name: self.fake.from_tensor(tensor)
                for name, tensor in batch._asdict().items()
                if tensor is not None and name != "targets"
            }
            yield batch._replace(**faked)
