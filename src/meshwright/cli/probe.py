"""``meshwright probe``: times this machine's device, and writes a cluster file that predicts with it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.cli.app import require_packages
from meshwright.cli.cluster_file import require_writable, write_cluster
from meshwright.cli.measure import processor_name
from meshwright.cli.output import Output
from meshwright.cli.ranks import require_devices
from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_bytes, format_seconds
from meshwright.launch.environment import prepare_environment
from meshwright.plan.probe_runs import (
    PROBE_SUITES,
    GemmShape,
    ProbeRun,
    ProbeSuite,
    count_block_bytes,
    find_cluster,
    list_attention,
    list_fp8_gemms,
    list_gemms,
    list_runs,
)
from meshwright.plan.time.probed import count_work, fit_steps, with_probed
from meshwright.spec.cluster import Cluster, count_cores
from meshwright.spec.execution import uses_triton_blocks
from meshwright.spec.job import Job
from meshwright.spec.probed import AttentionTime, GemmTime, Probed

if TYPE_CHECKING:
    import torch

WARM_S = 1.5
"""A GPU is brought to its clocks under load before anything is timed."""
TERA = 1e12


@dataclass(frozen=True)
class StepCheck:
    """A small model's step: as built of probed times, and as it was."""

    layers: int
    block_backend: str
    """Whose moved what was not product or attention."""
    predicted_s: float
    measured_s: float
    predicted_peak_bytes: int
    measured_peak_bytes: int | None


def probe_machine(output: Output, cpu_only: bool, out: Path) -> int:
    """Measure, fit, write the file."""
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="probe")
    require_writable(out, "probe")
    started, cluster = time.perf_counter(), find_cluster(cpu_only)
    on_gpu, suite = cluster.device == "cuda", PROBE_SUITES[cluster.device]
    prepare_environment(threads=count_cores() if on_gpu else 1)
    # Nothing is counted against the peak here, so that it is not measured first.
    runs = list_runs(suite, dataclasses.replace(cluster, matmul_flops_per_s=1.0))
    require_devices(runs[0].plan.job, 1)
    where = cluster.device_name if on_gpu else processor_name()
    output.errors.print(f"probing {where}")
    probed, large = _time_operations(output, suite, cluster.device, runs)
    probed, checked = _fit_to_steps(output, runs, probed)
    import torch  # noqa: PLC0415  (after the environment is set)

    date = datetime.now(UTC).isoformat(timespec="seconds")
    basis = f"measured by meshwright probe on {where}, torch {torch.__version__}, {date[:10]}"
    found = dataclasses.replace(cluster, **_rates(cluster, probed, large), probed=probed, basis=basis)
    write_cluster(out, found, "probe")
    seconds = time.perf_counter() - started
    _show(output, cluster, found, checked)
    output.print(f"took {format_seconds(seconds)}\n\ncluster file: {out}; use it with cluster.file={out}")
    output.result(
        {
            "cluster_file": str(out),
            "cluster": {k: v for k, v in dataclasses.asdict(found).items() if v is not None},
            "checked": [dataclasses.asdict(row) for row in checked],
            "seconds": seconds,
            "date": date,
        }
    )
    return 0


def _time_operations(
    output: Output, suite: ProbeSuite, kind: Literal["cpu", "cuda"], runs: Sequence[ProbeRun]
) -> tuple[Probed, dict[str, float]]:
    """Single operations; and the rates of a large product by precision."""
    import torch  # noqa: PLC0415

    from meshwright.train.throughput import measure_matmul  # noqa: PLC0415
    from meshwright.verify.bench import machine  # noqa: PLC0415

    tell, seconds, device = output.errors.print, suite.seconds, torch.device(kind)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    dtype = dtypes[suite.precision]
    if kind == "cuda":
        if not torch.cuda.is_available():
            rule, fix = (
                "is here, but this torch does not see it",
                "Install torch for CUDA, or probe with --cpu",
            )
            raise UserError(Problem("cluster-not-here", rule, path="cluster.device", value=kind, fix=fix))
        measure_matmul(device, dtype, WARM_S)
    else:
        torch.set_num_threads(1)  # as many as a rank has
    side, large = suite.large_gemm_size, {}
    for name, other in dtypes.items():
        forward_s = machine.time_linear(device, other, (side, side, side), seconds)[0]
        large[name] = 2.0 * side**3 / forward_s
        tell(f"  {name} product of {side} x {side} x {side}: {large[name] / TERA:.3g} TFLOP/s")
    jobs = [run.plan.job for run in runs]
    gemms = []
    for sizes in list_gemms(suite, jobs):
        times = machine.time_linear(device, dtype, sizes, seconds)
        gemms.append(GemmTime(suite.precision, *sizes, *map(_round, times)))
        tell(f"  products of {_describe(sizes, times)}")
    gemms += _time_fp8_gemms(output, suite, device, jobs)
    attention = []
    for heads in list_attention(suite, jobs):
        both = machine.time_attention(device, dtype, heads[1:4], (heads.batch, heads.seq_len), seconds)
        attention.append(AttentionTime(suite.precision, *heads, *map(_round, both)))
        rate = 7.0 * heads.batch * heads.heads * heads.seq_len**2 * heads.head_size / sum(both)
        shape = f"{heads.batch} x {heads.seq_len}, {heads.heads} heads of {heads.head_size}"
        tell(f"  attention of {shape}: {rate / TERA:.3g} TFLOP/s")
    copy = machine.measure_copy(device, suite.copy_elements, seconds)
    update = machine.measure_adamw(device, jobs[0], suite.optimizer_elements, seconds)
    tell(f"  copy {format_bytes(copy)}/s, AdamW {format_bytes(update)}/s")
    own: dict[str, Any] = {}
    if ours := [job for job in jobs if uses_triton_blocks(job)]:
        took_s = machine.time_triton_kernels(device, ours[0], seconds)
        moved = count_block_bytes(ours[0])
        own["triton_elementwise"] = _round(took_s * copy / moved)
        tell(f"  our own kernels {format_bytes(round(moved / took_s))}/s")
    probed = Probed(
        device=kind,
        gemms=tuple(gemms),
        attention=tuple(attention),
        copy_bytes_per_s=_round(copy),
        optimizer_bytes_per_s=_round(update),
        launch_s=_round(machine.measure_launch(device, seconds)),
        compiled=suite.compiled,
        multiprocessors=machine.count_multiprocessors(device),
        **own,
    )
    return probed, large


def _time_fp8_gemms(
    output: Output, suite: ProbeSuite, device: torch.device, jobs: list[Job]
) -> list[GemmTime]:
    """Products in 8 bits, where a device has them: all that are wanted, or none."""
    from meshwright.verify.bench import machine  # noqa: PLC0415

    found = []
    for sizes in list_fp8_gemms(suite, jobs):
        try:
            times = machine.time_fp8_linear(device, sizes, suite.seconds)
        except Exception as error:
            output.warn(
                f"no products in 8 bits, so that steps in fp8 are not predicted: {_first_line(error)}"
            )
            return []
        found.append(GemmTime("fp8", *sizes, *map(_round, times)))
        output.errors.print(f"  products in 8 bits of {_describe(sizes, times)}, casts included")
    return found


def _describe(sizes: GemmShape, times: Sequence[float]) -> str:
    """Three products of a linear layer, and their rate."""
    rate = 6.0 * sizes.rows * sizes.columns * sizes.depth / sum(times)
    return f"{sizes.rows} x {sizes.columns} x {sizes.depth}: {rate / TERA:.3g} TFLOP/s"


def _fit_to_steps(output: Output, runs: Sequence[ProbeRun], probed: Probed) -> tuple[Probed, list[StepCheck]]:
    """Real steps of the small models, and what they say of the rest; without them nothing is fitted."""
    from meshwright.verify.bench import machine  # noqa: PLC0415

    found = []
    for run in runs:
        output.errors.print(f"  real steps of {run.layers} layers, {run.block_backend} blocks")
        try:
            found.append(machine.time_steps(run.plan))
        except Exception as error:
            what = "no real steps, so that all other bytes are taken at the rate of a copy"
            output.warn(f"{what}: {_first_line(error)}")
            return probed, []
        output.errors.print(f"    {format_seconds(found[-1].step_s)} each")
    block_s = choose_block_s(
        {run.block_backend: steps.block_s for run, steps in zip(runs, found, strict=True)}
    )
    if block_s is not None:
        probed = dataclasses.replace(probed, block_s=_round(block_s))
    timed = [run.measured_step(steps.step_s) for run, steps in zip(runs, found, strict=True)]
    probed = fit_steps(probed, timed)
    return probed, [
        StepCheck(
            run.layers,
            run.block_backend,
            count_work(with_probed(one.job, probed), one.micro_batches, one.touched_bytes).total_s(probed),
            steps.step_s,
            run.plan.ranks[0].peak_bytes,
            steps.peak_bytes,
        )
        for run, one, steps in zip(runs, timed, found, strict=True)
    ]


def choose_block_s(issued: Mapping[str, float | None]) -> float | None:
    """The host's time for a block, of those by kernels: our own launch more, and are what is used."""
    return issued.get("triton") or issued.get("compile")


def _rates(cluster: Cluster, probed: Probed, large: dict[str, float]) -> dict[str, Any]:
    """The cluster's own rates, for steps that are not of the probed kind."""
    rates = {f"{name}_flops_per_s": _round(rate) for name, rate in large.items()}
    if cluster.device == "cpu":  # what passes over activations reach in real steps
        return rates | {"memory_bytes_per_s": _round(probed.copy_bytes_per_s / probed.elementwise)}
    # A GPU's is that of its data sheet, which a copy does not reach; of an unknown one there is none.
    return rates | {"memory_bytes_per_s": max(cluster.memory_bytes_per_s, probed.copy_bytes_per_s)}


def _show(output: Output, before: Cluster, after: Cluster, checked: Sequence[StepCheck]) -> None:
    keys = ("fp32_flops_per_s", "bf16_flops_per_s", "memory_bytes_per_s")
    cells = [(key, f"{getattr(before, key):.3g}", f"{getattr(after, key):.3g}") for key in keys]
    probed = after.probed
    assert probed is not None, "it was just measured"
    names = ["copy_bytes_per_s", "optimizer_bytes_per_s", "launch_s", "elementwise", "block_s", "step_s"]
    names += ["triton_elementwise"] if probed.device == "cuda" else []
    cells += [(f"probed.{name}", "", f"{getattr(probed, name):.3g}") for name in names]
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
    columns = ("layers", "blocks", "step, of these times", "measured", "peak, planned", "measured")
    output.table("Steps that the rest was fitted to", columns, rows)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _round(value: float) -> float:
    """Four digits: no measurement is better."""
    return float(f"{value:.4g}")
