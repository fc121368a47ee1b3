"""Rank entry points with an injected fault or a probe. Tests set ``ENTRY`` to ``injected_faults:<name>``."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import resource
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from meshwright.checkpoint import drafts, saver, writer
from meshwright.measure.memory_tracker import PeakTracker
from meshwright.models import decoder, decoder_sharding
from meshwright.models.decoder import Decoder
from meshwright.parallel import expert
from meshwright.train import build, loop, worker
from meshwright.train.batches import Batcher, BatchPrefetcher
from meshwright.train.finite_checks import FiniteChecks
from meshwright.train.trainer import StepHooks, Trainer
from meshwright.train.worker import run_rank, run_with_trainer
from meshwright.verify.bad_gradient import (
    FACTORS,
    UpdateWatch,
    scale_input_gradient,
    scale_weight_gradient,
)
from meshwright.verify.bench import scaling

MEMORY_LIMIT_BYTES = 200_000_000
"""Limit of rank 1 in ``limited_memory``; the predicted peak is 230 MB, most of it activations."""
M_MMAP_THRESHOLD = -3
"""Parameter of glibc's ``mallopt``."""


class Before(StepHooks):
    """Calls functions with the trainer before a part of each step."""

    def __init__(self, update=lambda trainer: None, forward_backward=lambda trainer: None):
        self.update, self.forward_backward = update, forward_backward

    def before_forward_backward(self, trainer, observer):
        self.forward_backward(trainer)

    def before_update(self, trainer):
        self.update(trainer)


def train_with(hooks, run_dir, listener):
    """Train with hooks in every step."""

    def train(trainer):
        for one in hooks:
            trainer.register_hooks(one)
        loop.train(trainer)

    return run_with_trainer(train, run_dir, listener)


def extra_all_reduce(run_dir, listener):
    """Adds an all-reduce to every step."""

    def all_reduce(trainer):
        dist.all_reduce(torch.zeros(3), group=trainer.mesh.group("dp_replicate"))

    return train_with([Before(update=all_reduce)], run_dir, listener)


def extra_broadcast_once(run_dir, listener):
    """Adds one broadcast to step 3, on a group that belongs to no mesh axis."""

    def broadcast(trainer):
        if trainer.step == 2:
            dist.broadcast(torch.zeros(5, dtype=torch.float64), 0, group=dist.new_group())

    return train_with([Before(update=broadcast)], run_dir, listener)


def wide_expert_rows(run_dir, listener):
    """Sends the rows of experts twice as wide as needed; the numbers stay right."""
    original = expert.all_to_all_rows

    def all_to_all_rows(rows, *how):
        return original(torch.cat((rows, rows), dim=1), *how)[:, : rows.shape[1]].contiguous()

    expert.all_to_all_rows = all_to_all_rows
    return run_rank(run_dir, listener)


def collectives_outside_autograd(run_dir, listener):
    """Adds collectives that bypass autograd: a functional one, and one in inference mode."""

    def add(trainer):
        if trainer.step == 2:
            group = trainer.mesh.group("dp_replicate")
            functional.all_reduce(torch.zeros(4), "sum", group).sum()
            with torch.inference_mode():
                dist.broadcast(torch.zeros(2), 0, group=group)

    return train_with([Before(update=add)], run_dir, listener)


def record_all_gathers(run_dir, listener):
    """Probe: counts the all-gathers issued before each block's forward and backward pass."""
    original = loop.train

    def note(trainer):
        rows = [row for row in trainer.counter.rows() if row["op"] == "all_gather" and row["phase"] == "step"]
        if trainer.counter.phase == "step":
            trainer.events.write("gathers_so_far", gathers=sum(row["calls"] for row in rows))

    def watched(trainer):
        for block in trainer.model.list_blocks():
            block.attention.register_forward_pre_hook(lambda *_: note(trainer))
            block.ffn.register_full_backward_pre_hook(lambda *_: note(trainer))
        original(trainer)

    return run_with_trainer(watched, run_dir, listener)


def count_graphs(run_dir, listener, hooks=()):
    """Probe: the graphs that torch.compile built in this process before and after each generation."""
    original = loop.train

    def count():
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def counted(trainer):
        before, models = count(), sum(isinstance(one, Decoder) for one in gc.get_objects())
        for one in hooks:
            trainer.register_hooks(one)
        original(trainer)
        trainer.events.write("graphs", before=before, graphs=count(), models=models)

    return run_with_trainer(counted, run_dir, listener)


def count_graphs_and_kill_rank_1(run_dir, listener):
    """The same; rank 1 gets SIGKILL in step 14 of the first generation."""

    def kill(trainer):
        if (trainer.mesh.rank, trainer.step, trainer.assignment.generation) == (1, 13, 0):
            os.kill(os.getpid(), signal.SIGKILL)

    return count_graphs(run_dir, listener, [Before(update=kill)])


def optimizer_state_not_offloaded(run_dir, listener):
    """Ignores ``layout.offload``: the optimizer state stays on the device."""
    build.build_offloaded_state = lambda *_: None
    return run_rank(run_dir, listener)


def infinite_gradient(run_dir, listener):
    """Sets a gradient element to inf in step 3. The loss stays finite."""

    def overflow(trainer):
        if trainer.step == 2:
            trainer.model.norm.weight.grad[0] = float("inf")

    return train_with([Before(update=overflow)], run_dir, listener)


def exception_in_step_3(run_dir, listener):
    """Rank 1 raises an exception in step 3."""

    def fail(trainer):
        if trainer.step == 2 and trainer.mesh.rank == 1:
            raise RuntimeError("raised by the test")

    return train_with([Before(forward_backward=fail)], run_dir, listener)


def nan_in_step_3(run_dir, listener):
    """Sets the final norm's weights to NaN in step 3."""

    def plant(trainer):
        if trainer.step == 2:
            with torch.no_grad():
                trainer.model.norm.weight.fill_(float("nan"))

    return train_with([Before(forward_backward=plant)], run_dir, listener)


def nondeterministic_op(run_dir, listener):
    """Calls an operator that has no deterministic implementation."""

    def put(trainer):
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]), accumulate=False)

    return train_with([Before(update=put)], run_dir, listener)


def secondary_error_on_rank_0(run_dir, listener):
    """Rank 1 fails. Rank 0 then fails with an error that is not a connection error."""
    original = Trainer.forward_backward

    def forward_backward(trainer, *args):
        if trainer.step == 2 and trainer.mesh.rank == 1:
            raise RuntimeError("primary error")
        try:
            return original(trainer, *args)
        except RuntimeError:
            raise ValueError("secondary error") from None

    Trainer.forward_backward = forward_backward
    return run_rank(run_dir, listener)


def infinite_gradient_on_rank_1(run_dir, listener):
    """Sets an element of rank 1's gradient shard to inf in step 3."""
    original = Trainer.update

    def update(trainer, *args):
        assign = trainer.rank_parameters.assign_shard_grads

        def assign_and_overflow():
            assign()
            if trainer.step == 2 and trainer.mesh.rank == 1:
                dict(trainer.rank_parameters.named_parameters())["norm.weight"].grad[0] = float("inf")

        trainer.rank_parameters.assign_shard_grads = assign_and_overflow
        norm = original(trainer, *args)
        trainer.rank_parameters.assign_shard_grads = assign
        return norm

    Trainer.update = update
    return run_rank(run_dir, listener)


def record_startup_memory(run_dir, listener):
    """Probe: each rank writes its peak memory while it builds the trainer."""
    original = worker.build_trainer

    def build_trainer(context, stop):
        with PeakTracker([]) as tracker:
            trainer = original(context, stop)
        note = Path(run_dir, f"start-{context.mesh.rank}.json")
        note.write_text(json.dumps({"peak": tracker.peak_bytes}))
        return trainer

    worker.build_trainer = build_trainer
    return run_rank(run_dir, listener)


def record_saving_memory(run_dir, listener):
    """Probe: each rank writes its memory before a checkpoint and its peak during the save."""
    original = saver.CheckpointSaver._save

    def save(self, eval_loss):
        state = self.state
        moments = [v for values in state.optimizer.state.values() for v in values.values()]
        with PeakTracker([*state.sharded.local_parameters(), *moments]) as tracker:
            before = tracker.live_bytes
            original(self, eval_loss)
        note = Path(run_dir, f"saving-{self._rank}.json")
        note.write_text(json.dumps({"before": before, "peak": tracker.peak_bytes}))

    saver.CheckpointSaver._save = save
    return run_rank(run_dir, listener)


def sigkill_during_save(run_dir, listener):
    """Rank 0 gets SIGKILL when half of its tensors of step 4 are written."""
    original = writer.write_tensors

    def write_tensors(path, parts, check):
        calls = itertools.count()

        def kill_at_half(part, values):
            if ".step-00000004" in str(path) and os.environ["RANK"] == "0" and next(calls) == len(parts) // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            check(part, values)

        return original(path, parts, kill_at_half)

    writer.write_tensors = write_tensors
    return run_rank(run_dir, listener)


def unprepared_inputs(run_dir, listener):
    """Every column-parallel linear prepares its own input, instead of once per attention and feed-forward."""
    for module in ("blocks.*.attention", "blocks.*.ffn"):
        del decoder_sharding.SHARDING[module]
    return run_rank(run_dir, listener)


def fail_unless_replicated(run_dir, listener):
    """A benchmark rank that raises unless data parallelism is replicated only."""

    def measure(trainer):
        if trainer.job.layout.data_degree > trainer.job.layout.dp_replicate:
            raise RuntimeError("raised by the test")
        scaling.measure(trainer)

    return run_with_trainer(measure, run_dir, listener)


def limited_memory(run_dir, listener):
    """Rank 1 may allocate at most ``MEMORY_LIMIT_BYTES`` beyond its memory at the start.

    glibc is told to map large blocks individually. Otherwise its heap keeps freed memory.
    """
    if os.environ["RANK"] == "1":
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)  # as tuned by the user: the rank leaves it
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
        status = Path("/proc/self/status").read_text()
        held = int(status.partition("VmData:")[2].split()[0]) * 1024
        limit = held + MEMORY_LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return run_rank(run_dir, listener)


def plant_nan(run_dir, listener):
    """Plants NaN from a step on, as ``plant.json`` beside the run folder says: where, on which rank, how.

    With ``once`` the step after it, unless it is the recomputed one, has the NaN no longer.
    """
    plant = json.loads((Path(run_dir).parent / "plant.json").read_text())
    return train_with([PlantNan(plant), UpdateWatch()], run_dir, listener)


class PlantNan(StepHooks):
    """Plants NaN in a module as its dict says."""

    def __init__(self, plant):
        self.plant, self.planted = plant, []

    def before_forward_backward(self, trainer, observer):
        plant, planted = self.plant, self.planted
        if planted and plant.get("once") and not isinstance(observer, FiniteChecks):
            planted.pop().remove()
        generations = plant.get("generations", [trainer.assignment.generation])
        if trainer.step == plant["step"] - 1 and trainer.assignment.generation in generations:
            found = dict(trainer.model.named_modules()).get(plant["module"])
            if found is not None and trainer.mesh.rank in plant["ranks"]:
                planted.append(NAN_PLANTS[plant["kind"]](found))


def _nan_in_weight(module):
    weight = module.weight.to_local() if hasattr(module.weight, "to_local") else module.weight
    with torch.no_grad():
        weight[0, 0] = float("nan")


def _nan_in_output(module, when=lambda inputs: True):
    original = module.forward

    def forward(*inputs):
        out = original(*inputs)
        return out * float("nan") if when(inputs) else out

    module.forward = forward


NAN_PLANTS = {
    "weight": _nan_in_weight,
    "output": _nan_in_output,
    "output of some tokens": lambda module: _nan_in_output(
        module, lambda inputs: bool((inputs[0] == 101).any())
    ),
    "input gradient": lambda module: scale_input_gradient(module, FACTORS["nan"]),
    "spike in the input gradient": lambda module: scale_input_gradient(module, FACTORS["spike"]),
    "spike in the weight gradient": lambda module: scale_weight_gradient(module, FACTORS["spike"]),
    "weight gradient": lambda module: scale_weight_gradient(module, FACTORS["nan"]),
}


def flip_a_weight_bit(run_dir, listener):
    """Flips the lowest bit of one weight of a rank after a step, as ``flip.json`` says."""
    flip = json.loads((Path(run_dir).parent / "flip.json").read_text())
    original = Trainer.train_step

    def train_step(trainer, *args):
        result = original(trainer, *args)
        if (trainer.mesh.rank, trainer.step) == (flip["rank"], flip["step"]):
            trainer.rank_parameters.local_parameters()[0].detach().view(-1)[:1].view(
                torch.int32
            ).bitwise_xor_(1)
        return result

    Trainer.train_step = train_step
    return run_rank(run_dir, listener)


def _is_wrong(trainer):
    return trainer.step == 3 and trainer.mesh.rank == 1


def other_shape_in_step_4(run_dir, listener):
    """Rank 1 all-reduces a tensor of another size."""

    def reduce(trainer):
        dist.all_reduce(
            torch.zeros(5000 if _is_wrong(trainer) else 3), group=trainer.mesh.group("dp_replicate")
        )

    return train_with([Before(update=reduce)], run_dir, listener)


def other_op_in_step_4(run_dir, listener):
    """Rank 1 gathers where the others reduce."""

    def reduce(trainer):
        group = trainer.mesh.group("dp_replicate")
        if _is_wrong(trainer):
            dist.all_gather_into_tensor(torch.zeros(3 * group.size()), torch.zeros(3), group=group)
        else:
            dist.all_reduce(torch.zeros(3), group=group)

    return train_with([Before(update=reduce)], run_dir, listener)


def skipped_all_reduce_in_step_4(run_dir, listener):
    """Rank 1 leaves out an all-reduce that all ranks made in every step before."""

    def reduce(trainer):
        if not _is_wrong(trainer):
            dist.all_reduce(torch.zeros(3), group=trainer.mesh.group("dp_replicate"))

    return train_with([Before(update=reduce)], run_dir, listener)


def stuck_in_data_in_step_4(run_dir, listener):
    """Rank 1 waits for its samples for ever."""
    original = Batcher.micro_batches

    def micro_batches(batcher, samples, min_samples=0):
        if batcher.rank == 1 and next(steps) == 3:
            time.sleep(1000)
        yield from original(batcher, samples, min_samples)

    steps = itertools.count()
    Batcher.micro_batches = micro_batches
    return run_rank(run_dir, listener)


def stuck_in_checkpoint(run_dir, listener):
    """Rank 0 never returns from the flush of a checkpoint's files."""
    assert drafts.sync_path
    drafts.sync_path = lambda _: time.sleep(1000)
    return run_rank(run_dir, listener)


def blocked_in_step_4(run_dir, listener):
    """Rank 1 sleeps before an optimizer step."""
    return train_with(
        [Before(update=lambda trainer: time.sleep(1000 if _is_wrong(trainer) else 0))], run_dir, listener
    )


def jumping_clock(run_dir, listener):
    """The wall clock of rank 1 is an hour behind, and jumps an hour ahead in step 4."""
    clock, offset = time.time, [-3600]
    if os.environ["RANK"] == "1":
        time.time = lambda: clock() + offset[0]

    def jump(trainer):
        if trainer.step == 3:
            offset[0] = 3600

    return train_with([Before(update=jump)], run_dir, listener)


def busy_for_seconds(run_dir, listener):
    """Rank 1 computes for 12 s in step 3, and so does rank 0 in the evaluation: nothing hangs."""

    def compute(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    def compute_in_step_3(trainer):
        if trainer.step == 2 and trainer.mesh.rank == 1:
            compute(12)

    original = loop.evaluate

    def evaluate(trainer):
        if trainer.mesh.rank == 0:
            compute(12)
        return original(trainer)

    loop.evaluate = evaluate
    return train_with([Before(update=compute_in_step_3)], run_dir, listener)


def slow_blocks(run_dir, listener):
    """Rank 0 sleeps before every block."""
    if os.environ.get("RANK") == "0":
        original = decoder.Block.forward

        def forward(block, *args, **kwargs):
            time.sleep(0.2)
            return original(block, *args, **kwargs)

        decoder.Block.forward = forward
    return run_rank(run_dir, listener)


def slow_reads(run_dir, listener):
    """Rank 1 waits 60 ms for the data of each step after the first 40."""
    original = BatchPrefetcher.get

    def get(prefetcher, position):
        steps = position // prefetcher._global_batch
        batch = original(prefetcher, position)
        if os.environ.get("RANK") != "1" or steps < 40:
            return batch
        return batch._replace(micro_batches=late(batch.micro_batches))

    def late(micro_batches):
        time.sleep(0.06)
        yield from micro_batches

    BatchPrefetcher.get = get
    return run_rank(run_dir, listener)


def slow_saves(run_dir, listener):
    """Rank 1 takes 0.5 s longer for each checkpoint."""
    original = saver.CheckpointSaver._save

    def save(self, *args, **kwargs):
        if os.environ.get("RANK") == "1":
            time.sleep(0.5)
        return original(self, *args, **kwargs)

    saver.CheckpointSaver._save = save
    return run_rank(run_dir, listener)


def killed_while_computing(run_dir, listener):
    """Rank 2 gets SIGKILL in a block of step 5, and rank 0 in one of step 9; each once."""
    original = Trainer._accumulate

    def accumulate(trainer, *args):
        rank, mark = trainer.mesh.rank, Path(run_dir) / f"killed-{trainer.mesh.rank}"
        if {2: 4, 0: 8}.get(rank) == trainer.step and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(trainer, *args)

    Trainer._accumulate = accumulate
    return run_rank(run_dir, listener)
