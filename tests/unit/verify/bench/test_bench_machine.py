"""Measurements of ``meshwright probe``: single operations, and real steps of a small plan."""

from __future__ import annotations

import pytest
import torch

from meshwright.models.bf16_weights import WeightCopies
from meshwright.models.block_backend import convert_to_triton
from meshwright.plan.probe_runs import PROBE_SUITES, find_cluster, list_runs
from meshwright.verify.bench import machine
from meshwright.verify.synthetic_data import RandomTokens

CPU = torch.device("cpu")
TIMER = machine.CpuTimer(1e-3)


def test_larger_operations_take_longer():
    small = machine.time_linear(CPU, torch.float32, (16, 16, 16), TIMER)
    large = machine.time_linear(CPU, torch.float32, (512, 512, 512), TIMER)
    assert all(0 < few < many for few, many in zip(small, large, strict=True))
    forward_s, backward_s = machine.time_attention(CPU, torch.float32, (4, 2, 8), (2, 64), TIMER)
    assert forward_s > 0
    assert backward_s > 0
    assert machine.measure_copy(CPU, 2**16, TIMER) > machine.measure_copy(CPU, 2, TIMER)
    (run, *_) = list_runs(PROBE_SUITES["cpu"], find_cluster(cpu_only=True))
    assert machine.measure_adamw(CPU, run.plan.job, 2**12, TIMER) > 0
    assert machine.measure_launch(CPU, TIMER) > 0
    assert machine.count_multiprocessors(CPU) == 0


def test_elementwise_operations_and_fp8_gemms_can_be_timed():
    """The test uses torch operations. On a GPU the kernels of a run are timed."""
    (run, *_) = list_runs(PROBE_SUITES["cpu"], find_cluster(cpu_only=True))
    assert machine.time_triton_kernels(CPU, run.plan.job, TIMER) > 0
    assert all(took_s > 0 for took_s in machine.time_fp8_linear(CPU, (32, 16, 16), TIMER))


def test_timed_steps_use_the_trainer_and_its_blocks(monkeypatch):
    """The trainer is that of a run, and the CPU time of its blocks is measured as on a GPU."""
    (run, *_) = list_runs(PROBE_SUITES["cpu"], find_cluster(cpu_only=True))
    built, build = [], machine.build_trainer
    monkeypatch.setattr(machine, "build_trainer", lambda *a, **k: built.append(build(*a, **k)) or built[0])
    found = machine.time_steps(run.plan)
    assert found.step_s > 0
    assert (found.peak_bytes, found.block_s) == (None, None)
    (trainer,) = built
    assert trainer.step == run.plan.job.train.steps
    assert machine.time_block_launch(trainer) > 0
    blocks = list(trainer.model.list_blocks())
    assert len(blocks) > 1
    gradients = [p.grad for block in blocks for p in block.parameters()]
    assert all(gradient is not None for gradient in gradients), "forward and backward of every block ran"
    trainer.model.weight_copies = WeightCopies(trainer.model, torch.bfloat16)
    convert_to_triton(trainer.model)
    assert machine.time_block_launch(trainer) > 0, "Triton blocks return two tensors"


def test_all_random_tokens_are_targets():
    (run, *_) = list_runs(PROBE_SUITES["cpu"], find_cluster(cpu_only=True))
    words = RandomTokens(run.plan.job)
    rows = words.read([0, 1, 2])
    assert rows.tokens.shape == (3, 32)
    assert words.count_targets([0, 1, 2]) == 3 * 32
    assert rows.tokens.max() < run.plan.job.model.vocab_size
    assert len(words) >= run.plan.job.train.global_batch * run.plan.job.train.steps


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_probed_models_differ_from_the_benchmark_models(device):
    """Benchmark predictions are therefore for shapes that were not probed."""
    widths = {table["model"]["hidden_size"] for table in PROBE_SUITES[device].models}
    assert not widths & {2048, 3072, 512}
