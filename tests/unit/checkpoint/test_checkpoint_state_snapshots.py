"""In-memory snapshots of a rank: selection biases from a checkpoint are kept, also when they are fixed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from meshwright.checkpoint.retired_snapshots import RetiredSnapshots
from meshwright.checkpoint.state import TrainState
from meshwright.checkpoint.state_snapshots import StateSnapshots
from meshwright.launch.snapshot_slots import SnapshotSlots
from meshwright.layout.snapshot_size import COUNTER_BYTES, slot_bytes, slot_start
from meshwright.layout.snapshot_tensors import fingerprint, list_snapshot_tensors
from meshwright.layout.state_chunks import SELECTION_BIAS

EXPERTS = 1024
"""Large enough for biases that do not fit the rest of a page."""


class Biases:
    """The biases of expert selection."""

    def __init__(self, bias=None):
        self.bias_LE = bias

    def use_biases(self, network, bias_LE):  # noqa: N803
        self.bias_LE = bias_LE


@pytest.fixture
def job(make_job):
    """A model with experts and fixed biases: ``train.balance_rate`` is 0."""
    experts = {"num_layers": 2, "num_experts": EXPERTS, "experts_per_token": 2, "expert_ffn_size": 8}
    found = make_job(model=experts, layout={"dp_replicate": 1, "micro_batch": 1})
    assert found.train.balance_rate == 0
    return found


@pytest.fixture
def make_state(job):
    """The state of a rank with one parameter."""

    def make(bias=None):
        parameter = nn.Parameter(torch.arange(3.0))
        return SimpleNamespace(
            plan=SimpleNamespace(job=job),
            counters=TrainState(),
            model=nn.Module(),
            sharded=SimpleNamespace(
                named_parameters=lambda: [("weight", parameter)], local_parameters=lambda: [parameter]
            ),
            optimizer=torch.optim.SGD([parameter]),
            loss_scaler=SimpleNamespace(state_dict=lambda: None, load_state_dict=lambda state: None),
            expert_biases=Biases(bias),
        )

    return make


@pytest.fixture
def memory():
    slots = SnapshotSlots.create(0)
    yield slots
    slots.close()


def test_biases_that_are_set_after_the_memory_was_reserved_are_restored(make_state, memory):
    """As in a resumed run: the checkpoint is loaded last. The new process of a killed rank has no biases."""
    state = make_state()
    snapshots = StateSnapshots(memory, state, every_steps=1)
    biases = torch.rand(2, EXPERTS)
    state.expert_biases.use_biases(state.model, biases)
    for step in (1, 2, 3):
        state.counters.step = step
        snapshots.take()
    again = make_state()
    StateSnapshots(memory, again, every_steps=1).restore(2)
    assert torch.equal(again.expert_biases.bias_LE, biases)
    assert again.counters.step == 2


def test_a_run_without_biases_has_none_after_a_restore(make_state, memory):
    """Zeros would select the same experts, and would be written into checkpoints."""
    state = make_state()
    StateSnapshots(memory, state, every_steps=1).take()
    again = make_state()
    StateSnapshots(memory, again, every_steps=1).restore(0)
    assert again.expert_biases.bias_LE is None


@pytest.mark.parametrize("has_biases", [True, False])
def test_ranks_of_another_layout_read_biases_only_if_there_are_some(job, memory, has_biases):
    tensors = list_snapshot_tensors(job, 0)
    memory.reserve(slot_bytes(tensor.bytes for tensor in tensors))
    content = {"tensors": fingerprint((t.name, t.numel) for t in tensors), "has_selection_bias": has_biases}
    with Path(memory.path).open("r+b") as file:
        file.seek(slot_start(0, memory.slot_bytes))
        file.write(json.dumps(content).encode().ljust(COUNTER_BYTES))
    memory.set_step(0, 7)
    retired = RetiredSnapshots(job, 7, {0: memory.path})
    assert (SELECTION_BIAS in retired.names()) is has_biases
    retired.close()
