"""Entry points of ranks with a planted fault. Tests name them as module:function; ranks import them."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from meshwright.checkpoint import saver
from meshwright.measure.memory_tracker import PeakTracker
from meshwright.models import decoder_sharding
from meshwright.train import build, loop, worker
from meshwright.train.trainer import Trainer
from meshwright.train.worker import run_rank, run_with_trainer
from meshwright.verify.bench import scaling

ROOM = 400_000_000
"""Of a rank for which a peak of 460 MB is predicted, most of it activations."""
M_MMAP_THRESHOLD = -3
"""Of glibc's mallopt."""


def extra_all_reduce(run_dir, listener):
    """Every step has one more all-reduce."""
    honest = Trainer.update

    def update(trainer, lr):
        dist.all_reduce(torch.zeros(3), group=trainer.mesh.group("dp_replicate"))
        return honest(trainer, lr)

    Trainer.update = update
    return run_rank(run_dir, listener)


def extra_broadcast_once(run_dir, listener):
    """The third step has a broadcast on a group without an axis."""
    honest = Trainer.update

    def update(trainer, lr):
        if trainer.step == 2:
            dist.broadcast(torch.zeros(5, dtype=torch.float64), 0, group=dist.new_group())
        return honest(trainer, lr)

    Trainer.update = update
    return run_rank(run_dir, listener)


def hidden_collectives(run_dir, listener):
    """Collectives outside autograd: a functional one, and one in inference mode."""
    honest = Trainer.update

    def update(trainer, lr):
        if trainer.step == 2:
            group = trainer.mesh.group("dp_replicate")
            functional.all_reduce(torch.zeros(4), "sum", group).sum()
            with torch.inference_mode():
                dist.broadcast(torch.zeros(2), 0, group=group)
        return honest(trainer, lr)

    Trainer.update = update
    return run_rank(run_dir, listener)


def note_gathers(run_dir, listener):
    """Reports, when a block starts a forward or backward pass, how many all-gathers were issued."""
    honest = loop.train

    def note(trainer):
        rows = [row for row in trainer.counter.rows() if row["op"] == "all_gather" and row["phase"] == "step"]
        if trainer.counter.phase == "step":
            trainer.events.write("gathers_so_far", gathers=sum(row["calls"] for row in rows))

    def watched(trainer):
        for block in trainer.model.list_blocks():
            block.attention.register_forward_pre_hook(lambda *_: note(trainer))
            block.ffn.register_full_backward_pre_hook(lambda *_: note(trainer))
        honest(trainer)

    return run_with_trainer(watched, run_dir, listener)


def count_graphs(run_dir, listener):
    """Reports how many graphs torch.compile built."""
    honest = loop.train

    def counted(trainer):
        honest(trainer)
        trainer.events.write("graphs", graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"])

    return run_with_trainer(counted, run_dir, listener)


def state_that_stays(run_dir, listener):
    """The optimizer state is not offloaded, whatever the layout says."""
    build.build_offloaded_state = lambda *_: None
    return run_rank(run_dir, listener)


def infinite_gradient(run_dir, listener):
    """One gradient overflows in the third step; the loss is finite."""
    honest = Trainer.update

    def update(trainer, lr):
        if trainer.step == 2:
            trainer.model.norm.weight.grad[0] = float("inf")
        return honest(trainer, lr)

    Trainer.update = update
    return run_rank(run_dir, listener)


def raises_in_step_three(run_dir, listener):
    """Rank 1 raises an exception."""
    honest = Trainer.forward_backward

    def forward_backward(trainer, batches, divisor):
        if trainer.step == 2 and trainer.mesh.rank == 1:
            raise RuntimeError("the cat sat on the keyboard")
        return honest(trainer, batches, divisor)

    Trainer.forward_backward = forward_backward
    return run_rank(run_dir, listener)


def nan_in_step_three(run_dir, listener):
    """One rank's weights turn into NaN."""
    honest = Trainer.forward_backward

    def forward_backward(trainer, batches, divisor):
        if trainer.step == 2:
            with torch.no_grad():
                trainer.model.norm.weight.fill_(float("nan"))
        return honest(trainer, batches, divisor)

    Trainer.forward_backward = forward_backward
    return run_rank(run_dir, listener)


def not_deterministic(run_dir, listener):
    """An operator that torch does not run deterministically."""
    honest = Trainer.update

    def update(trainer, lr):
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]), accumulate=False)
        return honest(trainer, lr)

    Trainer.update = update
    return run_rank(run_dir, listener)


def cause_and_consequence(run_dir, listener):
    """Rank 1 fails; rank 0 then fails with an error that does not look like a lost peer."""
    honest = Trainer.forward_backward

    def forward_backward(trainer, batches, divisor):
        if trainer.step == 2 and trainer.mesh.rank == 1:
            raise RuntimeError("the cause")
        try:
            return honest(trainer, batches, divisor)
        except RuntimeError:
            raise ValueError("a consequence") from None

    Trainer.forward_backward = forward_backward
    return run_rank(run_dir, listener)


def infinite_row(run_dir, listener):
    """A gradient overflows in the third step, in rows of rank 1's shard."""
    honest = Trainer.update

    def update(trainer, lr):
        take = trainer.sharded_state.assign_shard_grads

        def take_and_break():
            take()
            if trainer.step == 2 and trainer.mesh.rank == 1:
                dict(trainer.sharded_state.named_parameters())["norm.weight"].grad[0] = float("inf")

        trainer.sharded_state.assign_shard_grads = take_and_break
        norm = honest(trainer, lr)
        trainer.sharded_state.assign_shard_grads = take
        return norm

    Trainer.update = update
    return run_rank(run_dir, listener)


def watched_start(run_dir, listener):
    """No fault: ranks write their peak memory while they build the trainer."""
    honest = worker.build_trainer

    def build_trainer(context, stop):
        with PeakTracker([]) as tracker:
            trainer = honest(context, stop)
        note = Path(run_dir, f"start-{context.mesh.rank}.json")
        note.write_text(json.dumps({"peak": tracker.peak_bytes}))
        return trainer

    worker.build_trainer = build_trainer
    return run_rank(run_dir, listener)


def watched_saving(run_dir, listener):
    """No fault: ranks write their memory before a checkpoint and its peak during the save."""
    honest = saver.CheckpointSaver._save

    def save(self, eval_loss, best):
        state = self._state
        moments = [v for values in state.optimizer.state.values() for v in values.values()]
        with PeakTracker([*state.sharded.local_parameters(), *moments]) as tracker:
            before = tracker.live_bytes
            honest(self, eval_loss, best)
        note = Path(run_dir, f"saving-{self._rank}.json")
        note.write_text(json.dumps({"before": before, "peak": tracker.peak_bytes}))

    saver.CheckpointSaver._save = save
    return run_rank(run_dir, listener)


def killed_while_saving(run_dir, listener):
    """Rank 0 is killed (SIGKILL) when it has gathered half of the tensors of step 4."""
    honest = saver.take_snapshot

    def take_snapshot(state, has_checkpoint):
        snapshot = honest(state, has_checkpoint)
        if state.counters.step != 4 or os.environ["RANK"] != "0":
            return snapshot
        last = sum(len(header) for header in snapshot.headers().values()) // 2
        tensors = snapshot.tensors()

        def until_half():
            for index, tensor in enumerate(tensors):
                if index == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield tensor

        snapshot._tensors = until_half()
        return snapshot

    saver.take_snapshot = take_snapshot
    return run_rank(run_dir, listener)


def unprepared_inputs(run_dir, listener):
    """Attention and feed-forward do not prepare their input: every column-parallel linear does."""
    for module in ("blocks.*.attention", "blocks.*.ffn"):
        del decoder_sharding.SHARDING[module]
    return run_rank(run_dir, listener)


def scaling_of_replicas_alone(run_dir, listener):
    """A benchmark rank that fails for layouts other than replicas."""

    def measure(trainer):
        if trainer.job.layout.data_degree > trainer.job.layout.dp_replicate:
            raise RuntimeError("only replicas are for this test")
        scaling.measure(trainer)

    return run_with_trainer(measure, run_dir, listener)


def little_memory(run_dir, listener):
    """Rank 1 may allocate at most ``ROOM`` bytes beyond what it has at the start.

    glibc maps its large blocks one by one, so that what is freed is free: its heap would keep holes.
    """
    if os.environ["RANK"] == "1":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)
        status = Path("/proc/self/status").read_text()
        held = int(status.partition("VmData:")[2].split()[0]) * 1024
        limit = held + ROOM
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return run_rank(run_dir, listener)
