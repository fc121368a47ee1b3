"""NCCL ranks regroup after a kill or a stop, or go on in another layout: two ranks on one GPU.

The survivor waits in an NCCL kernel. Its communicators are aborted from another thread (``parallel.abort``).
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(180),
]

JOB = (
    "cluster.device=cuda",
    "cluster.devices_per_node=2",
    "model.num_layers=2",
    "model.hidden_size=256",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.ffn_size=512",
    "data.seq_len=64",
    "train.global_batch=8",
    "train.steps=200",
    "train.precision=fp32",
    "train.block_backend=eager",
    "elastic.snapshot_every=5",
)


class Saboteur:
    """Sends a signal to each process of rank 1 after some steps, from a thread beside the run."""

    def __init__(self, run_dir, number, times, steps_before=30):
        """Start the thread.

        Args:
            run_dir: Of the run.
            number: Of the signal.
            times: How often.
            steps_before: Steps of all ranks in a generation before the signal; the first one waits for 30.
        """
        self.run_dir, self.number, self.times, self.steps_before = run_dir, number, times, steps_before
        self.sent = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def events(self):
        try:
            lines = (self.run_dir / "events.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def _run(self):
        deadline = time.monotonic() + 100
        while len(self.sent) < self.times and time.monotonic() < deadline:
            time.sleep(0.01)  # polls the file
            events = self.events()
            generation = max((e["generation"] for e in events), default=0)
            steps = [e for e in events if e["event"] == "step" and e["generation"] == generation]
            pids = [e["pid"] for e in events if e["event"] == "started" and e["rank"] == 1]
            before = self.steps_before if self.sent else 30
            if len(steps) >= before and pids and pids[-1] not in self.sent:
                self.sent.append(pids[-1])
                os.kill(pids[-1], self.number)


@pytest.fixture
def disturbed(train, monkeypatch, tmp_path):
    """``disturbed(layout, number, times)``: a calm run, and one in which rank 1 gets a signal some times."""
    monkeypatch.setattr("meshwright.runs.ranks.find_gpus", lambda: [None, None])
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "shared_gpu_ranks:run_with_nccl")

    def run(layout, number, times, *options):
        calm = train(*JOB, *options, layout, "run_dir=calm")
        saboteur = Saboteur(tmp_path / "run", number, times)
        found = train(*JOB, *options, layout, "run_dir=run")
        assert len(saboteur.sent) == times, "the run was disturbed"
        assert found.losses == pytest.approx(calm.losses, rel=1e-3)
        return saboteur.events()

    return run


@pytest.mark.parametrize("layout", ["layout.dp_replicate=2", "layout.dp_shard=2"])
def test_nccl_ranks_regroup_after_a_kill(disturbed, layout):
    """Three kills. The survivor keeps its process, and its state where it is whole."""
    events = disturbed(layout, signal.SIGKILL, 3)
    recovered = [e for e in events if e["event"] == "recovered"]
    assert len(recovered) == 3
    assert len({e["pid"] for e in events if e["event"] == "started" and e["rank"] == 0}) == 1
    assert all(e["source"] == "snapshot" for e in recovered)


def test_a_spare_takes_over_an_nccl_rank(disturbed):
    events = disturbed("layout.dp_replicate=2", signal.SIGKILL, 1, "elastic.spares=1")
    (recovered,) = [e for e in events if e["event"] == "recovered"]
    assert recovered["failed_rank"] == 1


def test_a_stopped_nccl_rank_is_killed_and_replaced(disturbed):
    """Its device memory would be held; the other rank is in a kernel that waits for it."""
    events = disturbed("layout.dp_replicate=2", signal.SIGSTOP, 1)
    (recovered,) = [e for e in events if e["event"] == "recovered"]
    assert recovered["failed_rank"] == 1
    assert recovered["how"].startswith("stopped")
    assert recovered["how"].endswith("then killed")


@pytest.mark.parametrize("layout", ["layout.dp_replicate=2", "layout.dp_shard=2"])
def test_nccl_ranks_go_on_with_one_device_and_again_with_two(train, monkeypatch, tmp_path, layout):
    """The second kill leaves the device out. Snapshots of two ranks are loaded by one."""
    monkeypatch.setattr("meshwright.runs.ranks.find_gpus", lambda: [None, None])
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "shared_gpu_ranks:run_with_nccl")
    options = (
        "elastic.may_change=data",
        "elastic.restarts=1",
        "elastic.retry_device_s=0.5",
        "elastic.grow_after_s=0",
        "train.steps=600",
        "train.lr=3e-4",  # with a larger one, rounding differences of the layouts grow too fast
        layout,
    )
    calm = train(*JOB, *options, "run_dir=calm")
    saboteur = Saboteur(tmp_path / "run", signal.SIGKILL, times=2, steps_before=0)
    found = train(*JOB, *options, "run_dir=run")
    assert found.losses == pytest.approx(calm.losses, rel=1e-3)
    changes = [e for e in saboteur.events() if e["event"] == "layout_changed"]
    assert [(e["ranks_before"], e["ranks"]) for e in changes] == [(2, 1), (1, 2)]
