"""Probes this machine: times single operations and real steps, and writes a cluster file with them."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import TypeAdapter

from meshwright.core.errors import MeshwrightError, Problem, RunFailedError, UserError, name_interruption
from meshwright.core.events import Event
from meshwright.core.packages import require_packages
from meshwright.core.units import format_bytes, format_seconds, round_measured
from meshwright.launch.environment import prepare_environment
from meshwright.plan.contract import write_plan
from meshwright.plan.probe_runs import (
    PROBE_SUITES,
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
from meshwright.runs.collective_bench import MOST_RANKS, OPS, bench_collectives, build_bench_tree
from meshwright.runs.measure import processor_name
from meshwright.runs.ranks import build_launch, require_devices
from meshwright.runs.reporter import Reporter
from meshwright.spec.cluster import Cluster, count_cores
from meshwright.spec.execution import uses_triton_blocks
from meshwright.spec.job import Job
from meshwright.spec.load import build_job
from meshwright.spec.probed import CollectiveOp, CollectiveTime, GemmTime, OperationTimes, Probed

if TYPE_CHECKING:
    import torch

    from meshwright.verify.bench.operations import Operations

WARM_S = 1.5
"""A GPU reaches its sustained clocks under load before anything is timed."""
ALL_CORES_ENTRY = "meshwright.verify.bench.operations:run_rank"
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
    if suite.all_cores and cluster.world_size > 1:
        try:
            busy = _measure_all_cores(suite, runs, min(cluster.world_size, MOST_RANKS), probed, reporter)
            probed = dataclasses.replace(probed, all_cores=busy)
        except RunFailedError as error:
            reporter.warning(f"all cores at once were not measured: {error}")
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
    from meshwright.verify.bench.operations import DTYPES, time_operations  # noqa: PLC0415

    log, seconds, device = reporter.progress, suite.seconds, torch.device(kind)
    if kind == "cuda":
        if not torch.cuda.is_available():
            rule, fix = (
                "is here, but this torch does not see it",
                "Install torch for CUDA, or probe with --cpu",
            )
            raise UserError(Problem("cluster-not-here", rule, path="cluster.device", value=kind, fix=fix))
        measure_matmul(device, DTYPES[suite.precision], WARM_S)
    else:
        torch.set_num_threads(1)  # as many as a rank has
    side, large, timer = suite.large_gemm_size, {}, machine.build_timer(device, seconds)
    for name, other in DTYPES.items():
        forward_s = machine.time_linear(device, other, (side, side, side), timer)[0]
        large[name] = 2.0 * side**3 / forward_s
        log(f"  {name} GEMM of {side} x {side} x {side}: {large[name] / TERA:.3g} TFLOP/s")
    jobs = [run.plan.job for run in runs]
    times = time_operations(device, _list_operations(suite, jobs), jobs[0], timer, log)
    copy = times.copy_bytes_per_s
    log(f"  copy {format_bytes(copy)}/s, AdamW {format_bytes(times.optimizer_bytes_per_s)}/s")
    fp8_gemms = _time_fp8_gemms(suite, device, jobs, reporter)
    own: dict[str, Any] = {}
    if ours := [job for job in jobs if uses_triton_blocks(job)]:
        took_s = machine.time_triton_kernels(device, ours[0], timer)
        moved = count_block_bytes(ours[0])
        own["triton_elementwise"] = round_measured(took_s * copy / moved)
        log(f"  Triton kernels {format_bytes(round(moved / took_s))}/s")
    times = dataclasses.replace(times, gemms=(*times.gemms, *fp8_gemms))
    probed = Probed(
        **{one.name: getattr(times, one.name) for one in dataclasses.fields(times)},
        device=kind,
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
        first, line = curve.rows[0], curve.fit_uncontended()
        if line is None or not line[1]:
            continue
        alpha_s, beta = line
        op, transport = cast(CollectiveOp, first.op), TRANSPORTS[first.transport]
        found.append(
            CollectiveTime(op, transport, first.ranks, round_measured(alpha_s), round_measured(1 / beta))
        )
        what = f"{first.op} over {transport}, {first.ranks} ranks"
        rate = f"{format_bytes(1 / beta)}/s"
        reporter.progress(f"  {what}: {format_seconds(alpha_s)} + bytes / {rate}")
    return found


def _time_fp8_gemms(
    suite: ProbeSuite, device: torch.device, jobs: list[Job], reporter: Reporter
) -> list[GemmTime]:
    """FP8 GEMMs, if the device has them: all shapes or none."""
    from meshwright.verify.bench import machine  # noqa: PLC0415
    from meshwright.verify.bench.operations import describe_gemm  # noqa: PLC0415

    found, timer = [], machine.build_timer(device, suite.seconds)
    for sizes in list_fp8_gemms(suite, jobs):
        try:
            times = machine.time_fp8_linear(device, sizes, timer)
        except Exception as error:
            reporter.warning(f"no FP8 GEMMs, so steps in fp8 are not predicted: {_first_line(error)}")
            return []
        found.append(GemmTime("fp8", *sizes, *map(round_measured, times)))
        reporter.progress(f"  FP8 linear layer of {describe_gemm(sizes, times)}, casts included")
    return found


def _list_operations(suite: ProbeSuite, jobs: list[Job]) -> Operations:
    from meshwright.verify.bench.operations import Operations  # noqa: PLC0415

    return Operations(
        suite.precision,
        list_gemms(suite, jobs),
        list_attention(suite, jobs),
        suite.copy_elements,
        suite.optimizer_elements,
    )


def _measure_all_cores(
    suite: ProbeSuite, runs: Sequence[ProbeRun], world_size: int, probed: Probed, reporter: Reporter
) -> OperationTimes:
    """The same operations and steps with all cores busy, one rank each."""
    from meshwright.verify.bench.operations import Task  # noqa: PLC0415

    job = build_job(build_bench_tree(world_size, cpu_only=True))
    names = [f"plan-of-model-{number}.toml" for number in range(len(runs))]
    task = Task(_list_operations(suite, [run.plan.job for run in runs]), suite.seconds, names, world_size)
    reporter.progress(f"  the same on {world_size} cores at once")
    found: list[Event] = []

    def listen(event: Event) -> None:
        if event["event"] == "probed":
            found.append(event)

    with tempfile.TemporaryDirectory(prefix="meshwright-probe-") as name:
        for run, file in zip(runs, names, strict=True):
            write_plan(run.plan, Path(name) / file)
        task.write(Path(name))
        stops = build_launch(ALL_CORES_ENTRY, job, Path(name), listen).run()
    if stops:
        raise name_interruption(stops, Problem("bench-interrupted", "interrupted while measuring all cores"))
    times = TypeAdapter(OperationTimes).validate_python(found[0]["operations"])
    timed = [run.measured_step(step_s) for run, step_s in zip(runs, found[0]["step_s"], strict=True)]
    busy = dataclasses.replace(probed, all_cores=times).select(world_size)
    fitted = fit_steps(busy, timed)
    rates = [format_bytes(rate) for rate in (fitted.copy_bytes_per_s, fitted.optimizer_bytes_per_s)]
    steps = ", ".join(format_seconds(one.step_s) for one in timed)
    reporter.progress(f"    copy {rates[0]}/s, AdamW {rates[1]}/s, steps {steps}")
    return OperationTimes(
        **{one.name: getattr(fitted, one.name) for one in dataclasses.fields(OperationTimes)}
    )


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
        probed = dataclasses.replace(probed, block_s=round_measured(block_s))
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
    """CPU launch time of a block, by backend. Triton blocks launch more kernels and are the default."""
    return issued.get("triton") or issued.get("compile")


def _rates(cluster: Cluster, probed: Probed, large: dict[str, float]) -> dict[str, Any]:
    """The cluster's rates, for steps that probed times do not cover."""
    rates = {f"{name}_flops_per_s": round_measured(rate) for name, rate in large.items()}
    if cluster.device == "cpu":  # the bandwidth that elementwise passes reach in real steps
        rates |= {"memory_bytes_per_s": round_measured(probed.copy_bytes_per_s / probed.elementwise)}
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
    return {
        "link_bytes_per_s": round_measured(width),
        "link_latency_s": round_measured(max(one.alpha_s, LEAST_LATENCY_S)),
    }


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
