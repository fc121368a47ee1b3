"""``meshwright checkpoint``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from meshwright.cli.app import require_packages
from meshwright.cli.generate import find_checkpoint
from meshwright.cli.output import Output
from meshwright.core.units import format_bytes
from meshwright.launch.environment import prepare_environment
from meshwright.spec.cluster import count_cores

BYTES_PER_GB = 10**9


def export_folder(output: Output, path: Path, out: Path, dtype: str, shard_gb: float) -> int:
    """Write the checkpoint that a path means as a Hugging Face folder."""
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="exporting a checkpoint")
    checkpoint = find_checkpoint(path)
    prepare_environment(threads=count_cores())
    from meshwright.survive.hf.export import export_checkpoint  # noqa: PLC0415

    done = export_checkpoint(checkpoint, out, dtype, max(1, int(shard_gb * BYTES_PER_GB)))
    output.say(f"{checkpoint}, step {done.step}, as {done.architecture} in {out}")
    output.say(f"{format_bytes(done.bytes)} of {dtype}; files: {', '.join(done.files)}")
    facts = dataclasses.asdict(done)
    output.result({"checkpoint": str(checkpoint), "out": str(out), "dtype": dtype, **facts})
    return 0
