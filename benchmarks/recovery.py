"""Time from kill -9 of a rank to the next completed step: Meshwright's regrouping against torchrun's restart.

Both train a tiny decoder with DDP on the same number of CPU ranks. Meshwright takes an in-memory snapshot
every 5 steps. The torchrun script is plain torch with a checkpoint every 5 steps, which all workers load
after the restart. It sets ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``, because the restart fails without it. The
runs alternate, so that other load on the machine affects both. Times are from the signal to the next step of
rank 0, repeated or new.

    python benchmarks/recovery.py [--ranks 2] [--rounds 3] [--kills 3] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshwright.elastic.faults.schedule import fail
from meshwright.runs.faults.criteria import is_settled
from meshwright.runs.faults.job import TinyJob
from meshwright.runs.faults.trial import Trial

FIRST_STEP, STEP_GAP = 23, 50
LIMIT_S = 300.0
TARGET_S = 2.0
PARTS = ("detect_s", "halt_s", "decide_s", "start_s", "join_s", "rebuild_s", "load_s")
SCRIPT = """
import json, os, sys, time
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

folder = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(64) for _ in range(2))
        self.qkv, self.out = nn.Linear(64, 128, bias=False), nn.Linear(64, 64, bias=False)
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(128, 64, bias=False)
    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).split((64, 32, 32), dim=-1)
        q, k, v = (y.unflatten(-1, (-1, 16)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

torch.manual_seed(0)
embed = nn.Embedding(320, 64)
model = nn.Sequential(embed, Block(), Block(), nn.RMSNorm(64), nn.Linear(64, 320, bias=False))
model[-1].weight = embed.weight
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
newest = os.path.join(folder, "checkpoint.pt")
step = 0
if os.path.exists(newest):
    state = torch.load(newest)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
replica = nn.parallel.DistributedDataParallel(model)
log = open(os.path.join(folder, "steps.jsonl"), "a", buffering=1)
while True:
    tokens = torch.randint(256, (8 // dist.get_world_size(), 33))
    loss = F.cross_entropy(replica(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    log.write(json.dumps({"rank": rank, "pid": os.getpid(), "step": step, "time": time.time()}) + "\\n")
    if step % 5 == 0 and rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, newest + ".part")
        os.replace(newest + ".part", newest)
"""


def measure_ours(folder: Path, ranks: int, kills: int, seed: int) -> list[dict[str, float]]:
    """Kill ranks of one run; returns the times of each recovery."""
    generator = random.Random(seed)
    schedule = [
        fail(rank=generator.randrange(ranks), step=FIRST_STEP + STEP_GAP * number, during="backward")
        for number in range(kills)
    ]
    folder.mkdir()
    trial = Trial(TinyJob.write(folder), folder / "run", [f"layout.dp_replicate={ranks}"], schedule)
    trial.run(is_settled, LIMIT_S)
    trial.check()
    if trial.violations:
        raise SystemExit(f"the run of Meshwright failed: {trial.violations}")
    found = []
    for injection in trial.injections:
        recovered = next(e for e in trial.view.of("recovered") if e["time"] >= injection.time)
        step = next(
            e["time"]
            for e in trial.view.of("step")
            if (e["rank"], e["generation"]) == (0, recovered["generation"])
        )
        parts = {part: recovered[part] or 0.0 for part in PARTS}
        found.append({"next_step_s": step - injection.time, "ready_s": recovered["seconds"], **parts})
    return found


def measure_torchrun(folder: Path, ranks: int, kills: int, seed: int) -> list[dict[str, float]]:
    """Kill workers of torchrun; returns the time of each restart."""
    generator = random.Random(seed)
    folder.mkdir()
    script, steps = folder / "train.py", folder / "steps.jsonl"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={kills}", str(script), str(folder)]
    with (folder / "log").open("wb") as log:
        launcher = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True
        )
    found = []
    try:
        for number in range(kills):
            victim, step = generator.randrange(ranks), FIRST_STEP + STEP_GAP * number
            done = _wait_for(steps, launcher, partial(_find, rank=victim, step=step))
            before = {entry["pid"] for entry in _read(steps)}
            killed_at = time.time()
            os.kill(done["pid"], signal.SIGKILL)
            after = _wait_for(steps, launcher, partial(_find, rank=0, step=0, not_by=before))
            found.append({"next_step_s": after["time"] - killed_at})
    finally:
        launcher.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(30)
        launcher.kill()
        launcher.wait()
    return found


def _read(steps: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        return [
            json.loads(line) for line in steps.read_text().splitlines(keepends=True) if line.endswith("\n")
        ]
    return []


def _find(
    entries: Sequence[dict[str, Any]], rank: int, step: int, not_by: Collection[int] = ()
) -> dict[str, Any] | None:
    """The newest step of a rank, if it is far enough and not by these processes."""
    found = [entry for entry in entries if entry["rank"] == rank and entry["pid"] not in not_by]
    if not_by:
        return found[0] if found else None
    return found[-1] if found and found[-1]["step"] >= step else None


def _wait_for(
    steps: Path,
    launcher: subprocess.Popen[bytes],
    find: Callable[[list[dict[str, Any]]], dict[str, Any] | None],
) -> dict[str, Any]:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and launcher.poll() is None:
        found = find(_read(steps))
        if found is not None:
            return found
        time.sleep(0.005)
    raise SystemExit(f"torchrun made no step: exit status {launcher.poll()}, see {steps.parent / 'log'}")


def measure(ranks: int, rounds: int, kills: int) -> dict[str, Any]:
    """Alternate both; returns medians, worst cases and the ratio."""
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            ours += measure_ours(Path(folder) / f"ours-{number}", ranks, kills, number)
            theirs += measure_torchrun(Path(folder) / f"torchrun-{number}", ranks, kills, number)
    times = {
        "meshwright": [one["next_step_s"] for one in ours],
        "torchrun": [one["next_step_s"] for one in theirs],
    }
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "date": str(datetime.datetime.now(tz=datetime.UTC).date()),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {version('torch')}",
        "load_average": os.getloadavg()[0],
        "ranks": ranks,
        "kills": len(ours),
        "median_s": medians,
        "worst_s": {name: max(values) for name, values in times.items()},
        "ratio": medians["torchrun"] / medians["meshwright"],
        "parts_s": {part: statistics.median(one[part] for one in ours) for part in (*PARTS, "ready_s")},
        "target_s": TARGET_S,
    }


def main() -> None:
    """Print both times and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.ranks, arguments.rounds, arguments.kills)
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{found['ranks']} ranks, {found['date']}, {found['machine']}, load {found['load_average']:.1f}")
    for name in ("meshwright", "torchrun"):
        median, worst = found["median_s"][name], found["worst_s"][name]
        print(f"  {name}: kill to next step median {median:.2f} s, worst {worst:.2f} s of {found['kills']}")
    parts = ", ".join(
        f"{part.removesuffix('_s')} {value * 1e3:.0f} ms" for part, value in found["parts_s"].items()
    )
    print(f"  parts of meshwright: {parts}")
    print(f"  ratio {found['ratio']:.1f} (target: at most {TARGET_S:g} s)")


if __name__ == "__main__":
    main()
