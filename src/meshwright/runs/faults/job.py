"""The job that the fault tests train: a tiny decoder on generated text, in layouts of four ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.data.prepare import CorpusSpec, prepare_corpus

WORLD_SIZE = 4
GLOBAL_BATCH = 8
SAVE_EVERY = 20
DOCUMENTS, LINES = 40, 40
LAYOUTS = {
    "ddp": ("layout.dp_replicate=4",),
    "zero3": ("layout.dp_shard=4",),
    "pp-tp": ("layout.pp=2", "layout.tp=2"),
}
"""Overrides of each layout, in the order in which they are tested."""
PHASES = {
    "ddp": ("forward", "backward", "update", "control all-reduce"),
    "zero3": ("forward", "backward", "update", "control all-reduce"),
    "pp-tp": ("forward and backward", "update", "control all-reduce"),
}
"""Phases of every step, by layout."""
ENDLESS = 10_000_000
"""Steps of a run that is stopped by a signal."""
JOB = f"""
name = "faults"
[model]
preset = "tiny"
[data]
path = "{{data}}"
seq_len = 32
[train]
steps = {ENDLESS}
global_batch = {GLOBAL_BATCH}
lr = 3e-3
schedule = "constant"
eval_samples = 8
[cluster]
device = "cpu"
devices_per_node = {WORLD_SIZE}
matmul_flops_per_s = 1e11
[checkpoint]
every_steps = {SAVE_EVERY}
keep_last = 1000000
[elastic]
snapshot_every = 5
"""
"""The learning rate is constant: the first steps do not depend on the number of steps."""


@dataclass(frozen=True)
class TinyJob:
    """The job in a temporary folder, with its data."""

    folder: Path

    @property
    def file(self) -> Path:
        """The job file."""
        return self.folder / "job.toml"

    @classmethod
    def write(cls, folder: Path) -> TinyJob:
        """Write the text, prepare it, and write the job file."""
        text, data = folder / "text", folder / "data"
        text.mkdir()
        for number in range(DOCUMENTS):
            lines = [
                f"document {number} line {line}: {'the quick brown fox ' * (line % 5)}"
                for line in range(LINES)
            ]
            (text / f"{number:02d}.txt").write_text("\n".join(lines), encoding="utf-8")
        prepare_corpus(CorpusSpec(sources=(str(text),), out=str(data), eval_fraction=0.125), folder)
        job = cls(folder)
        job.file.write_text(JOB.format(data=data), encoding="utf-8")
        return job
