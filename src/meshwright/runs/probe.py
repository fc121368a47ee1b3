"""Probes this machine: times single operations and real steps, and writes a cluster file with them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from meshwright.core.errors import MeshwrightError, Problem, UserError
from meshwright.core.packages import require_packages
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
from meshwright.report.collective_curves import bus_factor, list_curves
from meshwright.runs.cluster_file import require_writable, write_cluster
from meshwright.runs.collective_bench import OPS, bench_collectives
from meshwright.runs.measure import processor_name
from meshwright.runs.ranks import require_devices
from meshwright.runs.reporter import Reporter
from meshwright.spec.cluster import Cluster, count_cores
from meshwright.spec.execution import uses_triton_blocks
from meshwright.spec.job import Job
from meshwright.spec.probed import AttentionTime, CollectiveOp, CollectiveTime, GemmTime, Probed

if TYPE_CHECKING:
    import torch

WARM_S = 1.5
"""A GPU reaches its sustained clocks under load before anything is timed."""
TERA = 1e12
LEAST_LATENCY_S = 1e-7
TRANSPORTS: dict[str, Literal["gloo", "shared_memory", "nccl"]] = {
    "gloo": "gloo",
    "shm": "shared_memory",
    "nccl": "nccl",
}
"""Names of ``train.transport`` for those of the benchmark."""


@dataclass(frozen=True)
class StepCheck:
    """A small model's step, predicted from the probed times and measured."""

    layers: int
    block_backend: str
    """``train.block_backend`` of the step."""
    predicted_s: float
    measured_s: float
    predicted_peak_bytes: int
    measured_peak_bytes: int | None


@dataclass(frozen=True)
class ProbeResult:
    """The measured cluster, and how well it predicts the small steps."""

    out: Path
    """The cluster file."""
    before: Cluster
    """With assumed rates."""
    cluster: Cluster
    """With measured rates."""
    checked: list[StepCheck]
    seconds: float
    date: str

    def as_dict(self) -> dict[str, Any]:
        """The object of ``meshwright probe --json``."""
        return {
            "cluster_file": str(self.out),
            "cluster": {k: v for k, v in dataclasses.asdict(self.cluster).items() if v is not None},
            "checked": [dataclasses.asdict(row) for row in self.checked],
            "seconds": self.seconds,
            "date": self.date,
        }


def probe_machine(out: Path, cpu_only: bool, reporter: Reporter) -> ProbeResult:
    """Measure, fit, and write the cluster file."""
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="probe")
    require_writable(out, "probe")
    started, cluster = time.perf_counter(), find_cluster(cpu_only)
    on_gpu, suite = cluster.device == "cuda", PROBE_SUITES[cluster.device]
    prepare_environment(threads=count_cores() if on_gpu else 1)
    # MFU is not needed here: a peak of 1 avoids measuring it first.
    runs = list_runs(suite, dataclasses.replace(cluster, matmul_flops_per_s=1.0))
    require_devices(runs[0].plan.job, 1)
    where = cluster.device_name if on_gpu else processor_name()
    reporter.progress(f"probing {where}")
    probed, large = _time_operations(suite, cluster.device, runs, reporter)
    probed, checked = _fit_to_steps(runs, probed, reporter)
    if suite.collective_sizes and cluster.world_size > 1:
        try:
            probed = dataclasses.replace(probed, collectives=tuple(_time_collectives(suite, reporter)))
        except MeshwrightError as error:
            reporter.warning(f"collectives were not measured: {error}")
    import torch  # noqa: PLC0415  (after the environment is set)

    date = datetime.now(UTC).isoformat(timespec="seconds")
    basis = f"measured by meshwright probe on {where}, torch {torch.__version__}, {date[:10]}"
    found = dataclasses.replace(cluster, **_rates(cluster, probed, large), probed=probed, basis=basis)
    write_cluster(out, found, "probe")
    return ProbeResult(out, cluster, found, checked, time.perf_counter() - started, date)


def _time_operations(
    suite: ProbeSuite, kind: Literal["cpu", "cuda"], runs: Sequence[ProbeRun], reporter: Reporter
) -> tuple[Probed, dict[str, float]]:
    """Times of single operations, and the rate of a large GEMM by precision."""
    import torch  # noqa: PLC0415

    from meshwright.train.throughput import measure_matmul  # noqa: PLC0415
    from meshwright.verify.bench import machine  # noqa: PLC0415

    log, seconds, device = reporter.progress, suite.seconds, torch.device(kind)
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
        log(f"  {name} GEMM of {side} x {side} x {side}: {large[name] / TERA:.3g} TFLOP/s")
    jobs = [run.plan.job for run in runs]
    gemms = []
    for sizes in list_gemms(suite, jobs):
        times = machine.time_linear(device, dtype, sizes, seconds)
        gemms.append(GemmTime(suite.precision, *sizes, *map(_round, times)))
        log(f"  linear layer of {_describe(sizes, times)}")
    gemms += _time_fp8_gemms(suite, device, jobs, reporter)
    attention = []
    for heads in list_attention(suite, jobs):
        both = machine.time_attention(device, dtype, heads[1:4], (heads.batch, heads.seq_len), seconds)
        attention.append(AttentionTime(suite.precision, *heads, *map(_round, both)))
        rate = 7.0 * heads.batch * heads.heads * heads.seq_len**2 * heads.head_size / sum(both)
        shape = f"{heads.batch} x {heads.seq_len}, {heads.heads} heads of {heads.head_size}"
        log(f"  attention of {shape}: {rate / TERA:.3g} TFLOP/s")
    copy = machine.measure_copy(device, suite.copy_elements, seconds)
    update = machine.measure_adamw(device, jobs[0], suite.optimizer_elements, seconds)
    log(f"  copy {format_bytes(copy)}/s, AdamW {format_bytes(update)}/s")
    own: dict[str, Any] = {}
    if ours := [job for job in jobs if uses_triton_blocks(job)]:
        took_s = machine.time_triton_kernels(device, ours[0], seconds)
        moved = count_block_bytes(ours[0])
        own["triton_elementwise"] = _round(took_s * copy / moved)
        log(f"  Triton kernels {format_bytes(round(moved / took_s))}/s")
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


def _time_collectives(suite: ProbeSuite, reporter: Reporter) -> list[CollectiveTime]:
    """Collectives between ranks on all cores, over both transports."""
    bench = bench_collectives(
        ranks=None,
        ops=OPS,
        algorithms=(),
        sizes=suite.collective_sizes,
        budget_s=suite.collective_s,
        cpu_only=True,
        reporter=reporter,
    )
    found = []
    for curve in list_curves(bench.rows):
        first, line = curve.rows[0], curve.fit_idle()
        if line is None or not line[1]:
            continue
        alpha_s, beta = line
        op, transport = cast(CollectiveOp, first.op), TRANSPORTS[first.transport]
        found.append(CollectiveTime(op, transport, first.ranks, _round(alpha_s), _round(1 / beta)))
        what = f"{first.op} over {transport}, {first.ranks} ranks"
        rate = f"{format_bytes(1 / beta)}/s"
        reporter.progress(f"  {what}: {format_seconds(alpha_s)} + bytes / {rate}")
    return found


def _time_fp8_gemms(
    suite: ProbeSuite, device: torch.device, jobs: list[Job], reporter: Reporter
) -> list[GemmTime]:
    """FP8 GEMMs, if the device has them: all shapes or none."""
    from meshwright.verify.bench import machine  # noqa: PLC0415

    found = []
    for sizes in list_fp8_gemms(suite, jobs):
        try:
            times = machine.time_fp8_linear(device, sizes, suite.seconds)
        except Exception as error:
            reporter.warning(f"no FP8 GEMMs, so steps in fp8 are not predicted: {_first_line(error)}")
            return []
        found.append(GemmTime("fp8", *sizes, *map(_round, times)))
        reporter.progress(f"  FP8 linear layer of {_describe(sizes, times)}, casts included")
    return found


def _describe(sizes: GemmShape, times: Sequence[float]) -> str:
    """Shape of a linear layer and the rate of its three GEMMs (forward, input grad, weight grad)."""
    rate = 6.0 * sizes.rows * sizes.columns * sizes.depth / sum(times)
    return f"{sizes.rows} x {sizes.columns} x {sizes.depth}: {rate / TERA:.3g} TFLOP/s"


def _fit_to_steps(
    runs: Sequence[ProbeRun], probed: Probed, reporter: Reporter
) -> tuple[Probed, list[StepCheck]]:
    """Run real steps of small models and fit what single operations do not explain."""
    from meshwright.verify.bench import machine  # noqa: PLC0415

    found = []
    for run in runs:
        reporter.progress(f"  real steps of {run.layers} layers, {run.block_backend} blocks")
        try:
            found.append(machine.time_steps(run.plan))
        except Exception as error:
            what = "no real steps, so all other memory traffic is predicted at copy bandwidth"
            reporter.warning(f"{what}: {_first_line(error)}")
            return probed, []
        reporter.progress(f"    {format_seconds(found[-1].step_s)} each")
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
    """CPU time to launch a block, by backend. Triton blocks launch more kernels and are the default."""
    return issued.get("triton") or issued.get("compile")


def _rates(cluster: Cluster, probed: Probed, large: dict[str, float]) -> dict[str, Any]:
    """The cluster's rates, for steps that probed times do not cover."""
    rates = {f"{name}_flops_per_s": _round(rate) for name, rate in large.items()}
    if cluster.device == "cpu":  # the bandwidth that elementwise passes reach in real steps
        rates |= {"memory_bytes_per_s": _round(probed.copy_bytes_per_s / probed.elementwise)}
        return rates | _link_rates(probed)
    # A GPU keeps its data sheet's bandwidth, which a copy does not reach; an unknown GPU has none.
    return rates | {"memory_bytes_per_s": max(cluster.memory_bytes_per_s, probed.copy_bytes_per_s)}


def _link_rates(probed: Probed) -> dict[str, float]:
    """The link of an all-reduce over the default transport, as a ring."""
    found = {one.transport: one for one in probed.collectives if one.op == "all_reduce"}
    one = found.get("shared_memory") or found.get("gloo")
    if one is None:
        return {}
    width = one.bytes_per_s * bus_factor(one.op, one.ranks)
    return {"link_bytes_per_s": _round(width), "link_latency_s": _round(max(one.alpha_s, LEAST_LATENCY_S))}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _round(value: float) -> float:
    """Four digits: measurements are not more precise."""
    return float(f"{value:.4g}")
