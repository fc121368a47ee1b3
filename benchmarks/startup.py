"""Time from the command to the first step, and memory of a rank: ``meshwright train``, one process, on CPU.

The baseline is a minimal script that imports torch, builds a model of the same widths, and takes one AdamW
step. Both run alternately in their own processes, so that other load on the machine affects both. Wall time
on a busy machine says little, so CPU time up to the first step is printed, too. Phases are times since the
start of the command; the fork server imports torch while the command still plans.

    python benchmarks/startup.py [--rounds 5] [--src OTHER/src] [--json]

``--src`` takes the package from another tree, to compare with an earlier version.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

JOB = """
name = "startup"
run_dir = "{run_dir}"
[model]
num_layers = 8
hidden_size = 128
num_heads = 16
num_kv_heads = 8
ffn_size = 384
vocab_size = 320
tied_embeddings = true
[data]
path = "builtin:python-stdlib"
seq_len = 128
tokenizer = "byte"
[train]
steps = 100000
global_batch = 8
eval_samples = 8
[layout]
dp_replicate = 1
[cluster]
preset = "local"
device = "cpu"
"""
TORCH_SCRIPT = """
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(128) for _ in range(2))
        self.qkv, self.out = nn.Linear(128, 256, bias=False), nn.Linear(128, 128, bias=False)
        self.up, self.down = nn.Linear(128, 768, bias=False), nn.Linear(384, 128, bias=False)
    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).split((128, 64, 64), dim=-1)
        q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

embed = nn.Embedding(320, 128)
model = nn.Sequential(embed, *(Block() for _ in range(8)), nn.RMSNorm(128), nn.Linear(128, 320, bias=False))
model[-1].weight = embed.weight
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
tokens = torch.randint(256, (8, 129))
def step():
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
step()
print("stepped", flush=True)
while True:
    step()
"""
LIMIT_S = 120.0
MEMORY_STEPS = 4
"""Steps after which memory is read: after the audited one, which is the second."""


def run_ours(folder: Path, source: Path) -> dict[str, float]:
    """One start of the command: event times, CPU time up to the first step, memory of the rank."""
    run_dir = Path(tempfile.mkdtemp(dir=folder)) / "run"
    job = run_dir.parent / "job.toml"
    job.write_text(JOB.format(run_dir=run_dir))
    environment = {**os.environ, "PYTHONPATH": str(source)}
    with _started([sys.executable, "-m", "meshwright", "train", str(job)], folder, environment) as command:
        started = time.time()
        first_step = _wait_for(run_dir, command, step=1)
        cpu_s = sum(_cpu_seconds(pid) for pid in _process_tree(command.pid))
        events = {event["event"]: event for event in _read_events(run_dir)}
        _wait_for(run_dir, command, step=MEMORY_STEPS)
        memory = _memory(events["started"]["pid"])
        all_pss_mb = sum(_memory(pid)["pss_mb"] for pid in _process_tree(command.pid))
    return {
        "planned_s": (run_dir / "plan.toml").stat().st_mtime - started,
        "ranks_started_s": events["started"]["time"] - started,
        "ready_s": events["ready"]["time"] - started,
        "first_step_s": first_step["time"] - started,
        "cpu_s": cpu_s,
        **memory,
        "all_pss_mb": all_pss_mb,
    }


def run_torch(folder: Path) -> dict[str, float]:
    """One start of the torch script: time and CPU time up to the first step, memory."""
    with _started([sys.executable, "-c", TORCH_SCRIPT], folder, dict(os.environ)) as script:
        started = time.time()
        assert script.stdout is not None, "its output is a pipe"
        assert script.stdout.readline() == b"stepped\n", "the script failed"
        first_step_s, cpu_s = time.time() - started, _cpu_seconds(script.pid)
        time.sleep(0.3)  # a few more steps free the temporary memory of the first
        return {"first_step_s": first_step_s, "cpu_s": cpu_s, **_memory(script.pid)}


def time_imports(source: Path) -> dict[str, float]:
    """CPU seconds of processes that only import."""
    imports = {
        "python": "pass",
        "command line": "import meshwright.cli",
        "job": "import meshwright.cli, meshwright.spec.load",
        "planner": "import meshwright.cli, meshwright.runs.train",
        "torch": "import torch",
        "rank": "import meshwright.train.worker",
    }
    environment = {**os.environ, "PYTHONPATH": str(source)}
    found = {}
    for name, text in imports.items():
        process = subprocess.Popen([sys.executable, "-c", text], env=environment)
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
        found[name] = usage.ru_utime + usage.ru_stime
    return found


@contextlib.contextmanager
def _started(
    arguments: list[str], folder: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process; at the end it is killed with its children."""
    process = subprocess.Popen(
        arguments,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _wait_for(run_dir: Path, command: subprocess.Popen[bytes], step: int) -> dict[str, Any]:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and command.poll() is None:
        for event in _read_events(run_dir):
            if event["event"] == "step" and event["step"] >= step:
                return event
        time.sleep(0.005)
    raise SystemExit(f"no step {step} after {LIMIT_S:.0f} s, or the command failed; see {run_dir}")


def _read_events(run_dir: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        text = (run_dir / "events.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return []


def _process_tree(pid: int) -> list[int]:
    """A process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in _process_tree(int(child)))]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> dict[str, float]:
    """Memory of a process: proportional set size, resident set size, unique set size."""
    rows = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    found = {row[0]: int(row[1]) * 1024 / 1e6 for row in rows}
    private = found["Private_Dirty:"] + found["Private_Clean:"]
    return {"pss_mb": found["Pss:"], "rss_mb": found["Rss:"], "private_mb": private}


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}


def main() -> None:
    """Measure alternately, print medians and ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--src", type=Path, default=Path(__file__).resolve().parents[1] / "src")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    ours, torchs, imports = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_ours(folder, arguments.src)  # prepares the data and fills the disk cache
        for _ in range(arguments.rounds):
            ours.append(run_ours(folder, arguments.src))
            torchs.append(run_torch(folder))
            imports.append(time_imports(arguments.src))
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "load": os.getloadavg()[0],
        "rounds": arguments.rounds,
        "ours": _medians(ours),
        "torch": _medians(torchs),
        "import_cpu_s": _medians(imports),
        "ratios": {
            key: statistics.median(a[key] / b[key] for a, b in zip(ours, torchs, strict=True))
            for key in torchs[0]
        },
    }
    print(json.dumps(result) if arguments.json else _describe(result))


def _describe(result: dict[str, Any]) -> str:
    ours, torchs, ratios = result["ours"], result["torch"], result["ratios"]
    lines = [
        f"start-up, medians of {result['rounds']} rounds: {result['machine']}; load {result['load']:.1f}",
        "imports, CPU seconds: "
        + ", ".join(f"{name} {seconds:.2f}" for name, seconds in result["import_cpu_s"].items()),
        "since the start of the command: "
        + ", ".join(f"{key.removesuffix('_s')} {ours[key]:.2f} s" for key in list(ours)[:4]),
        f"{'':22}{'ours':>9}{'torch':>9}{'ratio':>8}",
    ]
    names = {
        "first_step_s": "first step, s",
        "cpu_s": "CPU time, s",
        "pss_mb": "memory (PSS), MB",
        "rss_mb": "resident (RSS), MB",
        "private_mb": "private, MB",
    }
    for key, name in names.items():
        lines.append(f"{name:22}{ours[key]:9.2f}{torchs[key]:9.2f}{ratios[key]:8.2f}")
    lines.append(f"rank, command and fork server together: {ours['all_pss_mb']:.0f} MB (PSS)")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
