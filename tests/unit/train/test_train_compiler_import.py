"""Ranks that do not compile do not import the compiler, and results are unchanged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from meshwright.train.compiler_import import DISABLE_ATTRIBUTE, DISABLED_METHODS, skip_compiler_import

TRAINED = """
import json, sys
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.prepare import prepare_run
from meshwright.runs.reporter import SILENT
from meshwright.train.worker import run_rank

HEAVY = ("sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor")
source, *overrides = sys.argv[1:]
prepared = prepare_run(LoadedJob.load(source, tuple(overrides)), "no", SILENT)
loaded = {}
def on_event(event):
    loaded[event["event"]] = [name for name in HEAVY if name in sys.modules]
status = run_rank(prepared.assignment.run_dir, on_event)
print(json.dumps({"status": status, "loaded": loaded}))
"""


def test_one_process_imports_neither_compiler_nor_sharding(job_file: Path):
    """This holds from start to end. The imports would take as long as torch itself."""
    overrides = ["layout.dp_replicate=1", "train.steps=3", f"run_dir={job_file.parent / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-c", TRAINED, str(job_file), *overrides],
        capture_output=True,
        text=True,
        check=True,
        cwd=job_file.parent,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["status"] == 0
    assert {"started", "step", "state", "eval", "checkpoint", "finished"} <= set(result["loaded"])
    assert {event: heavy for event, heavy in result["loaded"].items() if heavy} == {}


@pytest.fixture
def restore_compiler_hooks():
    """Restore torch's methods, because other tests of this process compile."""
    yield
    for method in DISABLED_METHODS:
        vars(method.__wrapped__).pop(DISABLE_ATTRIBUTE, None)


@pytest.mark.usefixtures("restore_compiler_hooks")
@pytest.mark.parametrize("rule", [AdamW, SGD])
def test_updates_without_the_compiler_import_are_bit_identical(
    rule: type[AdamW | SGD], monkeypatch: pytest.MonkeyPatch
):
    """No autograd graph is built, hooks are called, and state is saved and loaded."""
    monkeypatch.setattr(rule, "step", rule.step)  # restored after the test
    found, hooks = [], []
    for spared in (False, True):
        if spared:
            skip_compiler_import()
        weight = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
        optimizer = rule([weight], lr=0.1, weight_decay=0.1, fused=True)
        optimizer.register_step_post_hook(lambda *_: hooks.append(1))
        for step in range(3):
            weight.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
        assert weight.requires_grad
        assert weight.grad_fn is None
        found.append(weight.detach())
    assert torch.equal(*found)
    assert len(hooks) == 6


@pytest.mark.usefixtures("restore_compiler_hooks")
def test_second_call_keeps_hooks_of_existing_optimizers(monkeypatch: pytest.MonkeyPatch):
    """Torch wraps the step of a class when the first optimizer is built. The wrapper must stay."""
    monkeypatch.setattr(AdamW, "step", AdamW.step)  # restored after the test
    skip_compiler_import()
    weight, called = nn.Parameter(torch.ones(4)), []
    weight.grad = torch.ones(4)
    optimizer = AdamW([weight], fused=True)
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    for _ in range(3):
        skip_compiler_import()
        optimizer.step()
    assert len(called) == 3
