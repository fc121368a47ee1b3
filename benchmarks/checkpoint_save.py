"""How long a checkpoint blocks training: Meshwright, a plain copy, and DCP's asynchronous save.

One process holds parameters and two AdamW moments, 1 GB in all. In each round it runs, one after the other:

- a plain copy of the same bytes into memory that was touched before (``Tensor.copy_``, pinned on a GPU);
- Meshwright's save: the copy into staging memory and the start of the writing thread;
- ``torch.distributed.checkpoint.async_save`` with its default stager; on a GPU it keeps its pinned memory.

``blocked`` is the time until the call returns, ``commit`` the time until the files are complete. Then both
save again beside a loop of GEMMs, as in training; ``slowdown`` is the median time of its steps
until the files are complete over the median of 30 steps without a save. The first round warms up everything
and does not count. DCP needs a process group; gloo with one rank is used.

    python benchmarks/checkpoint_save.py [--gigabytes 1] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from meshwright.checkpoint.drafts import FolderDraft
from meshwright.checkpoint.manifest import Manifest, TensorFacts
from meshwright.checkpoint.staging import StagingBuffer
from meshwright.checkpoint.tensor_files import WriteItem
from meshwright.checkpoint.writer import CheckpointWrite
from meshwright.layout.state_chunks import TensorSlice

TARGET_COPY = 1.3
LAYERS = 24
LOOP_SIZE = 512
LOOP_STEP_S = 0.02
OUTSIDE_STEPS = 30


def build_state(gigabytes: float, device: torch.device) -> dict[str, torch.Tensor]:
    """Parameters and moments of equal layers."""
    rows = int(gigabytes * 1e9 / 4 / 3 / LAYERS / 1024)
    names = [f"blocks.{n}.weight{key}" for n in range(LAYERS) for key in ("", ":exp_avg", ":exp_avg_sq")]
    return {name: torch.randn(rows, 1024, device=device) for name in names}


def measure_copy(state: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> dict[str, float]:
    """A plain copy."""
    began = time.perf_counter()
    for name, tensor in state.items():
        into[name].copy_(tensor, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return {"blocked": time.perf_counter() - began}


def start_ours(
    state: dict[str, torch.Tensor], staging: StagingBuffer, root: Path, step: int
) -> CheckpointWrite:
    """Stage and start the thread."""
    facts = {name: TensorFacts("F32", tuple(tensor.shape)) for name, tensor in state.items()}
    manifest = Manifest(
        step=step, position=0, world_size=1, model={}, train={}, seq_len=1, data_sha256="", buckets=[],
        tensors=facts,
    )  # fmt: skip
    parts = [WriteItem(n, TensorSlice.full(tuple(t.shape)), tuple(t.shape), t) for n, t in state.items()]
    write = CheckpointWrite(FolderDraft.at(root, step, 0), 0, staging.copy(parts), manifest)
    write.start()
    return write


def measure_ours(
    state: dict[str, torch.Tensor], staging: StagingBuffer, root: Path, step: int
) -> dict[str, float]:
    """Start the save and wait for the commit."""
    began = time.perf_counter()
    write = start_ours(state, staging, root, step)
    blocked = time.perf_counter() - began
    write.wait()
    assert write.path is not None, write.error
    return {"blocked": blocked, "commit": time.perf_counter() - began}


def start_dcp(state: dict[str, torch.Tensor], stager: Any, root: Path, step: int) -> Future[Any]:
    """Start DCP's asynchronous save; the future is done when its files are complete."""
    future = dcp.async_save(state, checkpoint_id=root / f"dcp-{step}", async_stager=stager)
    return getattr(future, "upload_completion", future)


def measure_dcp(state: dict[str, torch.Tensor], stager: Any, root: Path, step: int) -> dict[str, float]:
    """DCP's asynchronous save."""
    began = time.perf_counter()
    future = start_dcp(state, stager, root, step)
    blocked = time.perf_counter() - began
    future.result()
    return {"blocked": blocked, "commit": time.perf_counter() - began}


class TrainingLoop:
    """Steps of GEMMs, of about 20 ms on a CPU core."""

    def __init__(self, device: torch.device) -> None:
        self._weight = torch.randn(LOOP_SIZE, LOOP_SIZE, device=device) / LOOP_SIZE**0.5
        self._repeat = 1
        while self._step() < LOOP_STEP_S:
            self._repeat *= 2

    def _step(self) -> float:
        began, out = time.perf_counter(), self._weight
        for _ in range(self._repeat):
            out = out @ self._weight
        out.sum().item()
        return time.perf_counter() - began

    def measure_slowdown(self, save: Callable[[], Callable[[], bool]]) -> dict[str, float]:
        """Steps during a save over steps without.

        Args:
            save: Starts it; returns a function that says whether it is complete.
        """
        outside = [self._step() for _ in range(OUTSIDE_STEPS)]
        is_complete, during = save(), [self._step()]
        while not is_complete():
            during.append(self._step())
        return {"slowdown": statistics.median(during) / statistics.median(outside)}


def run(gigabytes: float, rounds: int) -> dict[str, Any]:
    """Measure all three, several times."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    state = build_state(gigabytes, device)
    pinned = device.type == "cuda"
    into = {name: torch.zeros(t.shape, pin_memory=pinned) for name, t in state.items()}
    staging = StagingBuffer(device)
    stager = dcp.staging.BlockingAsyncStager(cache_staged_state_dict=pinned)
    found: dict[str, list[dict[str, float]]] = {"copy": [], "meshwright": [], "dcp": []}
    loop = TrainingLoop(device)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        root = Path(folder)
        for step in range(rounds + 1):
            found["copy"].append(measure_copy(state, into))
            ours = measure_ours(state, staging, root, step)
            theirs = measure_dcp(state, stager, root, step)
            again = step + rounds + 1
            ours |= loop.measure_slowdown(lambda: start_ours(state, staging, root, again).is_done)  # noqa: B023
            theirs |= loop.measure_slowdown(lambda: start_dcp(state, stager, root, again).done)  # noqa: B023
            found["meshwright"].append(ours)
            found["dcp"].append(theirs)
            for path in root.iterdir():
                shutil.rmtree(path)
    medians = {
        name: {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
        for name, rows in found.items()
    }
    blocked = {name: row["blocked"] for name, row in medians.items()}
    bytes_ = sum(tensor.nbytes for tensor in state.values())
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, {device.type}",
        "load": os.getloadavg()[0],
        "bytes": bytes_,
        "seconds": medians,
        "blocked_over_copy": blocked["meshwright"] / blocked["copy"],
        "blocked_over_dcp": blocked["meshwright"] / blocked["dcp"],
    }


def main() -> None:
    """Print a row per kind and both ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        result = run(given.gigabytes, given.rounds)
        dist.destroy_process_group()
    if given.json:
        print(json.dumps(result))
        return
    print(f"{result['bytes'] / 1e9:.2f} GB, {result['date']}, {result['machine']}, load {result['load']:.1f}")
    for name, row in result["seconds"].items():
        times = [f"{key} {value:.3f} s" for key, value in row.items() if key != "slowdown"]
        slower = [f"steps until then {row['slowdown']:.2f} times as long"] if "slowdown" in row else []
        print(f"  {name:10} " + ", ".join(times + slower))
    print(f"  blocked / plain copy {result['blocked_over_copy']:.2f} (target at most {TARGET_COPY})")
    print(f"  blocked / DCP        {result['blocked_over_dcp']:.2f} (target at most 1)")


if __name__ == "__main__":
    main()
