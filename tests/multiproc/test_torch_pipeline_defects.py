"""Torch's pipeline schedules give wrong gradients with DDP and FSDP2; our interpreter gives correct ones.

The first tests reproduce torch's defects. If one fails, torch has fixed the defect: update the docs, which
give it as a reason for our interpreter. The last test compares our gradients with one process in the same
layouts: two pipeline ranks, two data-parallel ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from meshwright.core.packages import package_version
from meshwright.launch.assignment import Assignment
from meshwright.layout.parameters import list_parameters
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.parallel.build import build_model
from meshwright.parallel.mesh import destroy_mesh, init_mesh
from meshwright.plan.build import build_plan
from meshwright.plan.contract import PLAN_FILE, read_plan, write_plan
from meshwright.runs.ranks import build_launch
from meshwright.spec.layout import Layout
from meshwright.spec.legality.table import with_layout
from meshwright.spec.load import build_job, load_job
from meshwright.train.batches import Batcher
from meshwright.train.loop import report_end
from meshwright.train.worker import run_with_trainer

WIDTH, MICRO_BATCHES, SAMPLES = 8, 4, 2
"""Torch's pipeline: hidden size, micro-batches per step, samples per micro-batch."""
TOLERANCE = 1e-5
"""Largest relative difference of gradients due to rounding."""


class Half(nn.Module):
    """A residual block without norms. A stage has two."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def build_torch_stages():
    """Four stages with the same weights on every rank."""
    torch.manual_seed(0)
    return [nn.Sequential(Half(), Half()) for _ in range(4)]


class TorchPipeline:
    """Two stages of a rank under one of torch's schedules, and the full model in one process as reference."""

    def __init__(self, mesh, schedule, pp_ranks, wrap):
        self._mine = [stage for stage, pp_rank in enumerate(pp_ranks) if pp_rank == mesh.pp_rank]
        stages = build_torch_stages()
        self._modules = [wrap(stages[stage]) for stage in self._mine]
        pipeline = [
            PipelineStage(module, stage, 4, mesh.device, group=mesh.group("pp"))
            for module, stage in zip(self._modules, self._mine, strict=True)
        ]
        self._schedule = schedule(pipeline, MICRO_BATCHES, loss_fn=_square, scale_grads=False)
        torch.manual_seed(1)
        x, y = torch.randn(2, 2, MICRO_BATCHES * SAMPLES, WIDTH)
        self._x, self._y = x[mesh.dp_rank], y[mesh.dp_rank]
        self._reference = build_torch_stages()
        full = nn.Sequential(*self._reference)
        for samples, targets in zip(x, y, strict=True):
            (_square(full(samples), targets) / 2).backward()  # the mean over data-parallel ranks

    def step(self):
        """One step. Returns the relative error of each parameter's gradient, None if it has no gradient."""
        given = (self._x,) if 0 in self._mine else ()
        self._schedule.step(*given, **({"target": self._y} if 3 in self._mine else {}))
        errors = []
        for module, stage in zip(self._modules, self._mine, strict=True):
            pairs = zip(module.parameters(), self._reference[stage].parameters(), strict=True)
            errors += [_relative_error(_full(ours.grad), reference.grad) for ours, reference in pairs]
            module.zero_grad()
        return errors


def _square(out, target):
    return (out - target).square().sum()


def _full(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def _relative_error(gradient, reference):
    return None if gradient is None else float((gradient - reference).norm() / reference.norm())


def run_torch(run_dir, listener):
    """One rank: all cases; the one that crashes is the last."""
    mesh = init_mesh(read_plan(Path(run_dir) / PLAN_FILE).job, CollectiveCounter())
    interleaved, v_shape = (0, 1, 0, 1), (0, 1, 1, 0)

    dp_mesh = DeviceMesh.from_group(mesh.group("dp_replicate"), "cpu")

    def shard(reshard):
        def wrap(stage):
            for part in (*stage, stage):
                fully_shard(part, mesh=dp_mesh, reshard_after_forward=reshard)
            return stage

        return wrap

    def replicate(stage):
        return DistributedDataParallel(stage, process_group=mesh.group("dp_replicate"))

    def report(case, **found):
        listener({"event": "case", "rank": mesh.rank, "case": case, **found})

    for case, schedule, pp_ranks, wrap in (
        ("fsdp resharded, zbv", ScheduleZBVZeroBubble, v_shape, shard(reshard=True)),
        ("fsdp resharded, interleaved", ScheduleInterleavedZeroBubble, interleaved, shard(reshard=True)),
        ("fsdp not resharded, zbv", ScheduleZBVZeroBubble, v_shape, shard(reshard=False)),
        ("ddp, zbv", ScheduleZBVZeroBubble, v_shape, replicate),
    ):
        report(case, errors=TorchPipeline(mesh, schedule, pp_ranks, wrap).step())
    pipeline, done = TorchPipeline(mesh, ScheduleInterleaved1F1B, interleaved, replicate), 0
    try:
        for _ in range(2):
            errors = pipeline.step()
            done += 1
    except RuntimeError as error:
        report("crash", message=str(error.__cause__ or error))
    report("ddp, interleaved", errors=errors, steps=done)
    destroy_mesh(mesh)
    return 0


@pytest.fixture(scope="module")
def torch_cases(tmp_path_factory):
    """The results of each case with torch's schedules, by rank."""
    tree = {
        "model": {"preset": "tiny", "num_layers": 2},
        "data": {"path": "none", "seq_len": 32},
        "train": {"steps": 1, "global_batch": 8},
        "layout": {"pp": 2, "dp_replicate": 2, "micro_batch": 1},
        "cluster": {"device": "cpu", "devices_per_node": 4, "matmul_flops_per_s": 1e11},
    }
    plan, folder, events = build_plan(build_job(tree))[0], tmp_path_factory.mktemp("torch-pipelines"), []
    write_plan(plan, folder / PLAN_FILE)
    build_launch(f"{__name__}:run_torch", plan.job, folder, events.append).run()
    cases = {}
    for event in events:
        if event["event"] == "case":
            cases.setdefault(event["case"], {})[event["rank"]] = event
    return cases


def _errors(case):
    return [error for event in case.values() for error in event["errors"]]


DEFECTS_TORCH = (2, 13)
"""The version that has these defects. Its predecessors have others: on 2.11 a rank dies in the first case."""
shows_defects = pytest.mark.skipif(
    package_version("torch") < DEFECTS_TORCH, reason="the defects are those of torch 2.13"
)


@shows_defects
@pytest.mark.slow
@pytest.mark.parametrize("case", ["fsdp resharded, zbv", "fsdp resharded, interleaved"])
def test_torchs_zero_bubble_loses_gradients_of_resharded_fsdp2_parameters(torch_cases, case):
    """Torch 2.13, without an error: some parameters have no gradient, others a wrong one.

    With ``reshard_after_forward=False`` the gradients of the same model are correct.
    """
    errors = _errors(torch_cases[case])
    assert any(error is None for error in errors), "fixed in torch: every parameter has a gradient"
    assert max(error for error in errors if error is not None) > 0.1, "fixed in torch: correct gradients"
    assert max(_errors(torch_cases["fsdp not resharded, zbv"])) < TOLERANCE


@shows_defects
@pytest.mark.slow
def test_torchs_zero_bubble_does_not_all_reduce_ddp_gradients(torch_cases):
    """Torch 2.13, without an error: each replica keeps its local gradients."""
    assert max(_errors(torch_cases["ddp, zbv"])) > 0.1, "fixed in torch: DDP reduces the gradients"


@shows_defects
@pytest.mark.slow
def test_ddp_under_torchs_interleaved_schedule_crashes_in_the_second_step(torch_cases):
    """Torch 2.13 infers shapes with a backward pass that DDP counts. With few micro-batches, DDP then fails.

    The first step is correct. If ``PipelineStage`` gets the shapes, all steps are.
    """
    case = torch_cases["ddp, interleaved"]
    assert max(_errors(case)) < TOLERANCE
    assert {event["steps"] for event in case.values()} == {1}, "fixed in torch: the second step completed"
    messages = [event["message"] for event in torch_cases["crash"].values()]
    assert any("rebuilt parameter indices size" in message for message in messages), messages


def compare_with_one_process(trainer):
    """One rank: two steps; the gradients of the second are compared with those of the full model."""
    job, batches = trainer.job, trainer.data.train
    first, second = trainer.data.order.samples_at(range(2 * job.train.global_batch)).reshape(2, -1)
    trainer.forward_backward(batches.micro_batches(first), batches.count_targets(first))
    trainer.rank_parameters.zero_grads()
    divisor = batches.count_targets(second)
    trainer.forward_backward(batches.micro_batches(second), divisor)
    trainer.rank_parameters.assign_shard_grads()
    full = build_model(with_layout(job, Layout(mode="given", micro_batch=1)), trainer.mesh.device)
    for batch in Batcher(batches.dataset, 0, 1, 1).micro_batches(second):
        (full(*batch) / divisor).backward()
    state = trainer.rank_parameters
    errors = {
        name: _relative_error(state.full_tensor(name, own.grad), full.get_parameter(name).grad)
        for name, own in state.named_parameters()
    }
    trainer.events.write("compared", errors=errors)
    report_end(trainer, evaluations=0, stopping=False)


def run_ours(run_dir, listener):
    """One rank, with the trainer that `train` builds."""
    return run_with_trainer(compare_with_one_process, run_dir, listener)


@pytest.mark.parametrize(
    "layout",
    [
        "dp_shard=2 zero=3 schedule=zbv virtual_stages=2",
        pytest.param("dp_replicate=2 schedule=interleaved virtual_stages=2", marks=pytest.mark.slow),
    ],
)
def test_our_pipeline_has_the_gradients_of_one_process(job_file, prepared, tmp_path, layout):
    """In layouts where torch is wrong or crashes, every gradient of the second step is correct."""
    keys = ("pp=2", "micro_batch=1", *layout.split())
    settings = ["model.num_layers=4", "model.tied_embeddings=false", "train.global_batch=8"]
    plan, _ = build_plan(load_job(str(job_file), [*settings, *(f"layout.{key}" for key in keys)]))
    assert plan.micro_batches == MICRO_BATCHES
    write_plan(plan, tmp_path / PLAN_FILE)
    Assignment(str(tmp_path), str(prepared), str(tmp_path / "checkpoints")).write()
    events = []
    build_launch(f"{__name__}:run_ours", plan.job, tmp_path, events.append).run()
    errors = [event["errors"] for event in events if event["event"] == "compared"]
    assert len(errors) == 4
    names = {name for row in errors for name in row}
    assert names == {parameter.name for parameter in list_parameters(plan.job.model)}
    assert max(error for row in errors for error in row.values()) < TOLERANCE
