"""Micro-batches of a rank, and the prefetched batch of the next step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.core.events import EVENTS_FILE, EventWriter
from meshwright.data.dataset import IGNORE_INDEX, SampleBatch, TokenDataset
from meshwright.data.order import SampleOrder
from meshwright.launch.assignment import Assignment
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.parallel.batch import Batch
from meshwright.parallel.mesh import ControlAllReduce, Mesh, init_mesh
from meshwright.plan.build import build_plan
from meshwright.spec.load import load_job
from meshwright.train import loop
from meshwright.train.batches import Batcher, BatchPrefetcher, assign_samples
from meshwright.train.build import build_trainer
from meshwright.train.rank_context import RankContext
from meshwright.train.trainer import Trainer

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BATCH, MICRO_BATCH, SEQ_LEN = 6, 2, 16


@pytest.fixture(autouse=True)
def pinned_batches(monkeypatch):
    """The batches for which pinned memory was requested. Pinning needs a GPU, so it is replaced."""
    batches = []
    monkeypatch.setattr(Batch, "pin_memory", lambda batch: batches.append(batch) or batch)
    return batches


@pytest.fixture
def build_prefetcher(prepared):
    """``build_prefetcher(device)``: a prefetcher over the prepared text."""

    def build(device: torch.device) -> BatchPrefetcher:
        dataset = TokenDataset.open(prepared, "train", SEQ_LEN)
        order = SampleOrder(dataset.shard_sample_counts, 7)
        return BatchPrefetcher(order, Batcher(dataset, 0, 1, MICRO_BATCH), BATCH, device)

    return build


def read(prefetcher: BatchPrefetcher, steps: range, *, ahead: bool) -> list[tuple]:
    """The batches of these steps. With ``ahead`` the next batch is prefetched before a step ends."""
    found = []
    for step in steps:
        position, samples, targets, micro_batches = prefetcher.get(step * BATCH)
        tokens = [batch.inputs.tolist() for batch in micro_batches]
        found.append((position, samples.tolist(), targets, tokens))
        if ahead and step + 1 < steps.stop:
            prefetcher.prefetch((step + 1) * BATCH)
    return found


def test_prefetching_keeps_samples_and_their_order(build_prefetcher, pinned_batches):
    """Every step but the first is prefetched, each with one micro-batch."""
    usual = read(build_prefetcher(CPU), range(5), ahead=False)
    assert len(usual[0][3]) == BATCH // MICRO_BATCH
    assert read(build_prefetcher(GPU), range(5), ahead=True) == usual
    assert len(pinned_batches) == 4


def test_resumed_run_continues_at_its_position(build_prefetcher):
    assert (
        read(build_prefetcher(GPU), range(3, 5), ahead=True)
        == read(build_prefetcher(CPU), range(5), ahead=False)[3:]
    )


def test_batch_prefetched_for_another_position_is_discarded(build_prefetcher):
    prefetcher = build_prefetcher(GPU)
    prefetcher.prefetch(BATCH)
    assert prefetcher.get(3 * BATCH).samples.tolist() == build_prefetcher(CPU).get(3 * BATCH).samples.tolist()


def test_nothing_is_prefetched_on_a_cpu(build_prefetcher, pinned_batches):
    prefetcher = build_prefetcher(CPU)
    prefetcher.prefetch(0)
    assert not pinned_batches
    assert prefetcher._next is None


def build_rank(job_file: Path, folder: Path, *overrides: str) -> Trainer:
    """The trainer of a one-process run."""
    alone = ("layout.micro_batch=4", "layout.dp_replicate=1")
    plan, _ = build_plan(load_job(str(job_file), [*alone, *overrides]))
    folder.mkdir()
    counter = CollectiveCounter()
    assignment = Assignment(str(folder), plan.job.data.path, str(folder / "checkpoints"))
    mesh = init_mesh(plan.job, counter)
    events = EventWriter(folder / EVENTS_FILE, 0)
    return build_trainer(RankContext(plan, assignment, mesh, counter, events))


def losses(folder: Path) -> list[float]:
    """The losses of all step and eval events."""
    events = [json.loads(line) for line in (folder / EVENTS_FILE).read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] in ("step", "eval")]


def test_loop_prefetches_before_it_synchronizes_except_in_the_last_step(
    job_file, tmp_path, monkeypatch, pinned_batches
):
    """A whole run with evaluation has bit-identical losses.

    The next batch is ready at each synchronization.
    """
    usual = build_rank(job_file, tmp_path / "usual")
    loop.train(usual)
    ahead = build_rank(job_file, tmp_path / "ahead")
    ahead.data.prefetcher._on_gpu = True
    waits = []
    original_wait = ControlAllReduce.wait

    def wait(sums):
        ready = ahead.data.prefetcher._next
        waits.append(None if ready is None else ready.position)
        return original_wait(sums)

    monkeypatch.setattr(ControlAllReduce, "wait", wait)
    loop.train(ahead)
    steps, batch = ahead.job.train.steps, ahead.job.train.global_batch
    assert waits == [batch * step for step in range(1, steps)] + [None, None], (
        "the last wait is that of the evaluation"
    )
    assert len(pinned_batches) == steps - 1
    assert losses(tmp_path / "ahead") == losses(tmp_path / "usual")
    assert len(losses(tmp_path / "ahead")) == steps + 1


class SynchronizationRecorder(TorchDispatchMode):
    """Records operations that synchronize with a GPU: reading values, and outputs of data-dependent size."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        indices = [i for i in args[1] if i is not None] if name in ("index", "index_put_") else []
        by_mask = any(index.dtype == torch.bool for index in indices)
        if by_mask or name in ("_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive"):
            self.reads.append(args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mask", ["causal", "document"])
def test_step_does_not_synchronize_before_its_end(job_file, tmp_path, mask):
    """When the next batch is prefetched, the step has read only the counts of its own targets."""
    trainer = build_rank(job_file, tmp_path / "run", f"data.mask={mask}")
    trainer.counter.phase = "step"
    _, _, targets, micro_batches = trainer.data.prefetcher.get(0)
    batches = list(micro_batches)  # in CPU memory
    seen: list[int] = []
    with SynchronizationRecorder() as recorder:
        trainer.compute_step(batches, targets, prefetch=lambda: seen.append(len(recorder.reads)))
    assert len(recorder.reads) == seen[0], "the final read copies one tensor and is not recorded"
    assert seen == [len(batches)]
    assert {tensor.dtype for tensor in recorder.reads} == {torch.int64}


def test_cpu_and_device_scalars_are_summed_together():
    mesh = Mesh(0, 1, CPU)
    found = mesh.all_reduce_scalars([torch.tensor(0.1, dtype=torch.float64), 3, 0.25, torch.tensor(2.0)])
    assert found == [0.1, 3.0, 0.25, 2.0]


@given(st.integers(0, 200), st.integers(1, 17))
def test_samples_are_assigned_once_and_evenly(count, ranks):
    assigned = [assign_samples(count, rank, ranks) for rank in range(ranks)]
    assert [s for samples in assigned for s in samples] == list(range(count))
    assert max(map(len, assigned)) - min(map(len, assigned)) <= 1
    assert len(assigned[0]) == max(map(len, assigned)), (
        "rank 0 has the most samples and decides the number of micro-batches"
    )


class FakeDataset:
    """Row i has the tokens i, i+1, ... and belongs to document 3."""

    seq_len = 4

    def __init__(self, mask="causal"):
        self.mask = mask

    def read(self, indices):
        tokens = np.asarray(indices)[:, None] + np.arange(4)
        return SampleBatch(tokens, tokens + 1, np.full_like(tokens, 3) if self.mask == "document" else None)

    def count_targets(self, indices):
        return 4 * len(indices)


@pytest.mark.parametrize("mask", ["causal", "document"])
@given(st.integers(1, 30), st.integers(1, 7), st.integers(1, 6))
def test_ranks_run_equal_micro_batches_and_each_sample_counts_once(mask, count, ranks, micro):
    samples = np.arange(100, 100 + count)
    shapes, seen = set(), []
    for rank in range(ranks):
        batches = list(
            Batcher(FakeDataset(mask), rank, ranks, micro, sample_weight=1 / count).micro_batches(samples)
        )
        shapes.add((len(batches), micro))
        for tokens, targets, segments, weights in batches:
            assert tokens.shape == targets.shape == (micro, 4)
            assert tokens.dtype == targets.dtype == torch.int64
            assert (segments is not None) == (mask == "document")
            real = targets[:, 0] != IGNORE_INDEX
            shares, lengths = weights.unbind(1)
            assert shares.tolist() == pytest.approx((real / count).tolist()), "the share of the global batch"
            assert lengths.tolist() == (4 * real).tolist()
            seen += tokens[real][:, 0].tolist()
            assert (targets[~real] == IGNORE_INDEX).all()
            assert (tokens[~real] == 0).all()
            if segments is not None:
                assert (segments[real] == 3).all()
                assert (segments[~real] == 0).all()
    assert len(shapes) == 1
    assert sorted(seen) == samples.tolist()
    assert Batcher(FakeDataset(), 0, ranks, micro).count_targets(samples) == 4 * count
