"""Fault test 18: a checkpoint of 4 ranks is loaded and saved again by 3, 1, 2 and 4 ranks."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.tensor_files import CheckpointReader
from meshwright.runs.faults.checks.check import CheckRun, require
from meshwright.runs.faults.checks.running_command import PROGRAM, commands
from meshwright.runs.faults.faulty_train import SAVE_AGAIN
from meshwright.runs.faults.job import TinyJob

Layouts = Sequence[Sequence[str]]
NAME = "step-00000004"
BATCH = 12
STEPS = (
    "train.steps=24",
    f"train.global_batch={BATCH}",
    "checkpoint.every_steps=4",
    "checkpoint.keep_last=9",
    "train.warmup=2",
    "train.schedule=cosine",
)
ROUNDING = 1e-6
"""Relative difference of a loss between layouts: sums are grouped differently (float32). Seen: 1.2e-7."""
SHARDED: Layouts = (
    ("layout.dp_shard=4", "layout.zero=3"),
    ("layout.dp_shard=3", "layout.zero=1"),
    ("layout.dp_replicate=1",),
    ("layout.tp=2",),
    ("layout.dp_shard=4", "layout.zero=3"),
)
REPLICATED: Layouts = (
    ("layout.dp_replicate=2", "layout.tp=2"),
    ("layout.dp_replicate=3",),
    ("layout.dp_replicate=1",),
    ("layout.pp=2",),
    ("layout.dp_replicate=2", "layout.tp=2"),
)


def check_resharding(check: CheckRun, families: Sequence[Layouts] = (SHARDED, REPLICATED)) -> None:
    """Four hops in each family of layouts."""
    job, worst = TinyJob.write(check.folder).file, 0.0
    for number, layouts in enumerate(families):
        worst = max(worst, _hop(check.folder / f"family-{number}", job, layouts))
    check.count("hops", 4 * len(families))
    check.limit("relative difference of a loss", worst, ROUNDING, "")


def _hop(folder: Path, job: Path, layouts: Layouts) -> float:
    """Each hop loads what the one before has saved, saves it again, and then trains 20 steps.

    All tensors (weights, both moments, step counts) and the position in the data are equal after each hop.
    The losses are equal up to rounding, and bit by bit in the layout of the first run, after all the others.
    """
    folder.mkdir()
    straight = _train(folder, job, *STEPS, *layouts[0], "run_dir=straight")
    before = original = folder / "straight" / "checkpoints" / NAME
    expected, position = load_tensors(before), read_manifest(before).position
    require((len(straight), position) == (24, 4 * BATCH), f"{len(straight)} steps, position {position}")
    worst, losses = 0.0, list[float]()
    for number, layout in enumerate(layouts[1:]):
        root, name = folder / f"hop-{number}", " ".join(layout)
        shutil.copytree(before, root / NAME)
        losses = _train(
            folder, job, *STEPS, *layout, f"checkpoint.dir={root}", f"run_dir={root}-run", again=True
        )
        before = root / f"{NAME}.1"
        manifest, saved = read_manifest(before), load_tensors(before)
        require((manifest.step, manifest.position) == (4, position), f"{name}: another position")
        require(saved.keys() == expected.keys(), f"{name}: other tensors")
        differing = [key for key in expected if not torch.equal(saved[key], expected[key])]
        require(not differing, f"{name}: {differing} differ")
        pairs = zip(losses, straight[4:], strict=True)
        worst = max(worst, *(abs(loss / other - 1) for loss, other in pairs))
    require(losses == straight[4:], "the losses of the first layout differ, after all hops")
    require_equal_files(before, original)
    return worst


def _train(folder: Path, job: Path, *overrides: str, again: bool = False) -> list[float]:
    """Train, or resume and save what was loaded; returns the losses."""
    program = (sys.executable, "-m", "meshwright.runs.faults.faulty_train", SAVE_AGAIN) if again else None
    with commands(folder) as start:
        if program is None:
            running = start("train", job, *overrides, "--json", program=PROGRAM)
        else:
            running = start(job, *overrides, program=program)
        status, out, err = running.finish(300)
    require(status == 0, f"{' '.join(overrides)}: status {status}: {out} {err}")
    losses: list[Any] = json.loads(out)["losses"]
    return [float(loss) for loss in losses]


def load_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All full tensors of a checkpoint, by name: parameters, optimizer state, buffers."""
    saved = CheckpointReader(checkpoint)
    return {name: saved.read(name) for name in saved.names()}


def require_equal_files(one: Path, other: Path) -> None:
    """The files of tensors of two checkpoints of the same layout are equal bit by bit."""
    names = read_manifest(one).tensor_files
    require(names and names == read_manifest(other).tensor_files, "other files of tensors")
    for name in names:
        require((one / name).read_bytes() == (other / name).read_bytes(), f"{name} differs")
