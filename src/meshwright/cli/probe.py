"""``meshwright probe``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.api import probe
from meshwright.cli.output import Output
from meshwright.cli.reporter import ConsoleReporter
from meshwright.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from meshwright.results import ProbeResult


def probe_machine(output: Output, cpu_only: bool, out: Path) -> int:
    """Probe this machine and print the measured rates."""
    result = probe(out, cpu=cpu_only, reporter=ConsoleReporter(output))
    _show(output, result)
    took = format_seconds(result.seconds)
    output.print(f"took {took}\n\ncluster file: {out}; use it with cluster.file={out}")
    output.result(result.as_dict())
    return 0


def _show(output: Output, result: ProbeResult) -> None:
    """Rates before and after, and the steps that they were fitted to."""
    before, after, checked = result.before, result.cluster, result.checked
    keys = ("fp32_flops_per_s", "bf16_flops_per_s", "memory_bytes_per_s")
    cells = [(key, f"{getattr(before, key):.3g}", f"{getattr(after, key):.3g}") for key in keys]
    probed = after.probed
    assert probed is not None, "it was just measured"
    names = [
        "copy_bytes_per_s",
        "optimizer_bytes_per_s",
        "launch_s",
        "elementwise",
        "block_s",
        "step_s",
    ]
    names += ["triton_elementwise"] if probed.device == "cuda" else []
    cells += [(f"probed.{name}", "-", f"{getattr(probed, name):.3g}") for name in names]
    output.table("Cluster", ("", "before", "measured"), cells)
    if not checked:
        return
    rows = [
        (
            str(row.layers),
            row.block_backend,
            format_seconds(row.predicted_s),
            format_seconds(row.measured_s),
            format_bytes(row.predicted_peak_bytes),
            "" if row.measured_peak_bytes is None else format_bytes(row.measured_peak_bytes),
        )
        for row in checked
    ]
    output.print()
    columns = ("layers", "blocks", "predicted", "measured", "predicted peak", "measured")
    output.table("Steps that the remaining rates were fitted to", columns, rows)
