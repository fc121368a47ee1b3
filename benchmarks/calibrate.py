"""Fits the rates of ``plan/time/calibration.toml`` to published runs, and reports fit and held-out errors.

The rates start from the priors below, which are estimates from data sheets. Each stage fits a few rates to
the rows of its stacks that the fixed split (``validation/split.py``) allows; the Korthikanti rows are never
fitted. The loss is the mean relative error, with families weighted by the root of their rows, plus a small
penalty for leaving a prior. A rate belongs to a device, a stack, or a stack on a device; never to a row, a
model or a family.

    python benchmarks/calibrate.py --runs MORE.csv --write    # MORE.csv: rows that are not in the package
    python benchmarks/calibrate.py --only meshwright --write  # one stack, from rows in the package
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.time.engine import estimate_step
from meshwright.plan.time.rates import calibrated_device, load_calibration, merge_rates
from meshwright.validation.published import Case, read_rows
from meshwright.validation.split import is_held_out

Tables = dict[str, dict[str, float]]
DATA = Path(__file__).parents[1] / "src/meshwright/plan/time"
TABLES = Path(__file__).parents[1] / "src/meshwright/validation/tables"
PRIORS: Tables = {
    "default": {
        "matmul": 0.9,
        "matmul_fp8": 0.75,
        "matmul_fp4": 0.55,
        "block_scaled": 0.95,
        "row_scaled": 0.75,
        "expert_matmul": 0.8,
        "attention": 0.6,
        "attention_ramp": 700.0,
        "memory": 0.85,
        "elementwise": 1.0,
        "compiled": 0.6,
        "operand_bytes": 0.7,
        "launch_s": 5e-6,
        "host_s": 4e-4,
        "expert_host_s": 1e-3,
        "link": 0.8,
        # NCCL's all-reduce on 2 to 8 A100s (published curves): 45 to 75 microseconds; 229 of 300 GB/s.
        # The presets of GPUs have 20 microseconds within a node and 40 between nodes.
        "link_latency": 1.75,
        "nic": 0.9,
        "nic_latency": 0.25,
        "overlap": 0.8,
        "tp_overlap": 0.5,
        "all_to_all": 0.7,
        "contention": 0.05,
        "step_s": 0.02,
    },
    "device.A100": {"matmul": 0.94, "attention": 0.55, "link": 0.76},
    "device.V100": {"link": 0.89},
    # Blackwell lowers its clock under load, depending on the cooling.
    "device.B200": {"matmul": 0.7, "attention": 0.5},
    "device.B300": {"matmul": 0.75, "attention": 0.55},
    # CPUs: set by hand on five small models on a 2-core Xeon virtual machine (November 2026), not fitted.
    "device.cpu": {
        "matmul": 0.8,
        "expert_matmul": 1.0,
        "memory": 1.0,
        "compiled": 1.0,
        "host_s": 5e-4,
        "expert_host_s": 0.0,
        "link": 1.0,
        "link_latency": 1.0,
        "nic": 1.0,
        "nic_latency": 1.0,
        "overlap": 0.5,
        "all_to_all": 1.0,
        "contention": 0.0,
        "step_s": 0.0,
    },
    # DeepSpeed's ZeRO-3 as of 2021 gathered parameter by parameter: about one network adapter per node.
    "stack.deepspeed-zero": {"nic": 0.1},
    # PyTorch's own fused attention on Hopper before cuDNN's was the default.
    "stack.torchtitan": {"elementwise": 2.0},
    # A float32 residual stream, one kernel per operation; host time from examples/quickstart.toml on an H200,
    # 39 ms for 32 passes, so that row of ours was used to set it.
    "stack.meshwright": {"elementwise": 3.0, "host_s": 8.5e-4},
    "stack.meshwright.H100": {"attention": 0.45},
    # Fused kernels, a 16-bit residual stream, and cuDNN's attention.
    "stack.meshwright-compiled": {"elementwise": 1.0, "compiled": 0.9, "step_s": 2e-3},
    "stack.meshwright-compiled.H100": {"attention": 0.6},
    "stack.torchtitan.H100": {"attention": 0.35},
    "stack.composer-fsdp.H100": {"attention": 0.35},
}
BOUNDS = {
    "matmul": (0.4, 0.98),
    "matmul_fp8": (0.3, 0.98),
    "matmul_fp4": (0.2, 0.98),
    "block_scaled": (0.7, 1.0),
    "row_scaled": (0.4, 1.0),
    "expert_matmul": (0.2, 1.0),
    "attention": (0.15, 0.95),
    "elementwise": (0.5, 4.0),
    "compiled": (0.3, 1.0),
    "operand_bytes": (0.2, 1.0),
    "link": (0.3, 1.0),
    "nic": (0.05, 1.0),
    "all_to_all": (0.2, 1.0),
    "overlap": (0.2, 0.98),
    "tp_overlap": (0.1, 0.9),
    "contention": (0.005, 0.2),
    "host_s": (5e-5, 3e-3),
    "expert_host_s": (1e-4, 5e-3),
    "step_s": (1e-3, 0.2),
}
PRICE = 0.004
"""Penalty for changing a rate by a factor e."""
ROUNDS = 5
FIRST_STEP = 0.4
"""First change of a rate, in log space; halved each round."""
INFORMING = 0.3
"""Weight of informative rows, which do not gate."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Rates that are fitted together, and their rows."""

    stacks: tuple[str, ...]
    rates: tuple[tuple[str, str], ...]
    wanted: Callable[[Case], bool] = lambda case: True


def _rates(section: str, names: str) -> tuple[tuple[str, str], ...]:
    return tuple((section, name) for name in names.split())


def _experts(case: Case) -> bool:
    return case.workload.model.num_experts is not None


STAGES = (
    Stage(
        ("megatron-lm", "megatron-deepspeed"),
        _rates("device.A100", "matmul link")
        + _rates("device.V100", "matmul")
        + _rates("default", "operand_bytes")
        + _rates("stack.megatron-lm", "elementwise host_s step_s")
        + _rates("stack.megatron-deepspeed", "elementwise host_s step_s nic")
        + _rates("stack.megatron-deepspeed.A100", "matmul"),
    ),
    Stage(("deepspeed-zero",), _rates("stack.deepspeed-zero", "nic overlap")),
    Stage(
        ("composer-fsdp",),
        _rates("stack.composer-fsdp.A100", "matmul attention")
        + _rates("stack.composer-fsdp.H100", "matmul attention matmul_fp8")
        + _rates("stack.composer-fsdp", "elementwise overlap nic host_s step_s contention"),
    ),
    Stage(
        ("torchtitan", "torchtitan-2025"),
        _rates("stack.torchtitan.H100", "matmul attention matmul_fp8")
        + _rates("stack.torchtitan.A100", "matmul attention")
        + _rates("stack.torchtitan", "row_scaled tp_overlap elementwise compiled overlap"),
    ),
    Stage(
        ("megatron-core",),
        _rates("stack.megatron-core.B200", "matmul attention link")
        + _rates("stack.megatron-core.H100", "matmul attention")
        + _rates("stack.megatron-core", "overlap tp_overlap elementwise step_s expert_matmul all_to_all"),
    ),
    Stage(
        ("megatron-bridge", "megatron-bridge-26.06"),
        _rates("stack.megatron-bridge.H100", "matmul_fp8 attention")
        + _rates("stack.megatron-bridge.B200", "matmul_fp8 matmul_fp4 attention")
        + _rates("stack.megatron-bridge.B300", "matmul_fp8 matmul_fp4 attention")
        + _rates("stack.megatron-bridge", "overlap tp_overlap block_scaled elementwise host_s step_s"),
        wanted=lambda case: not _experts(case),
    ),
    Stage(
        ("megatron-bridge", "megatron-bridge-26.06"),
        _rates("stack.megatron-bridge", "expert_matmul expert_host_s all_to_all")
        + _rates("stack.megatron-bridge-26.06", "expert_matmul expert_host_s all_to_all elementwise")
        + _rates("stack.megatron-bridge.H100", "matmul")
        + _rates("stack.megatron-bridge.B200", "matmul")
        + _rates("stack.megatron-bridge.B300", "matmul"),
        wanted=_experts,
    ),
    Stage(
        ("meshwright",),
        _rates("stack.meshwright.H100", "matmul attention")
        + _rates("stack.meshwright", "elementwise host_s step_s"),
        wanted=lambda case: not case.workload.compiled,
    ),
    Stage(
        ("meshwright",),
        _rates("stack.meshwright-compiled.H100", "matmul attention matmul_fp8")
        + _rates("stack.meshwright-compiled", "compiled step_s row_scaled"),
        wanted=lambda case: case.workload.compiled,
    ),
)


class Rows:
    """Cases, grouped by workload."""

    def __init__(self, cases: Sequence[Case]) -> None:
        together: dict[object, list[Case]] = collections.defaultdict(list)
        for case in cases:
            together[case.workload].append(case)
        self.groups = [
            (group[0].workload, Grid.of([c.layout for c in group]), group) for group in together.values()
        ]
        self.cases = [case for _, _, group in self.groups for case in group]
        counts = collections.Counter(case.family for case in self.cases)
        self.weights = np.array(
            [(1.0 if case.gates else INFORMING) / math.sqrt(counts[case.family]) for case in self.cases]
        )

    def errors(self, tables: Tables) -> npt.NDArray[np.float64]:
        """Predicted / measured - 1."""
        found = []
        for workload, grid, group in self.groups:
            device = calibrated_device(workload.cluster.device_name)
            rates = merge_rates(tables, workload.profile.calibrations, device)
            found.append(
                estimate_step(workload, grid, rates).step_s / [c.step_s or math.nan for c in group] - 1
            )
        return np.concatenate(found) if found else np.zeros(0)


def inherited(tables: Tables, section: str, name: str) -> float:
    """The value of a rate before its section overrides it."""
    kind, _, rest = section.partition(".")
    chain = ["default"]
    if kind == "stack":
        stack, device = _split(rest)
        base = stack.split("-26.")[0]
        chain += [f"device.{device}", f"stack.{base}", f"stack.{base}.{device}", f"stack.{stack}"]
    return next(tables[s][name] for s in [section, *reversed(chain)] if name in tables.get(s, {}))


def _split(rest: str) -> tuple[str, str]:
    stack, _, device = rest.rpartition(".")
    return (stack, device) if stack and device[:1].isupper() else (rest, "")


def fit(stage: Stage, cases: Sequence[Case], tables: Tables) -> Tables:
    """Coordinate search: one rate after the other, up and down, in halving steps."""
    rows, tables = Rows(cases), copy.deepcopy(tables)
    if not cases:
        return tables
    for section, name in stage.rates:
        value = inherited(tables, section, name)
        tables.setdefault(section, {})[name] = value
    priors = {rate: tables[rate[0]][rate[1]] for rate in stage.rates}

    def loss() -> float:
        error = np.minimum(np.abs(rows.errors(tables)), 1.5)
        moved = sum(abs(math.log(tables[s][n] / priors[s, n])) for s, n in stage.rates)
        return float((rows.weights * error).sum() / rows.weights.sum()) + PRICE * moved

    best = loss()
    for round_ in range(ROUNDS):
        change = FIRST_STEP / 2**round_
        for section, name in stage.rates:
            for factor in (math.exp(change), math.exp(-change)):
                while True:
                    old = tables[section][name]
                    low, high = BOUNDS[name]
                    tables[section][name] = min(max(old * factor, low), high)
                    tried = loss()
                    if tables[section][name] == old or tried >= best - 1e-6:
                        tables[section][name] = old
                        break
                    best = tried
    return tables


def report(cases: Sequence[Case], tables: Tables) -> str:
    """Mean errors by family, of fitted and of held-out rows."""
    rows = Rows(cases)
    by_family: dict[str, list[tuple[bool, float]]] = collections.defaultdict(list)
    for case, error in zip(rows.cases, rows.errors(tables), strict=True):
        by_family[case.family].append((is_held_out(case.id), abs(float(error))))
    lines = [f"{'family':22} {'rows':>5} {'fit':>7} {'held out':>9}"]
    for family, errors in sorted(by_family.items()):
        parts = [[e for held, e in errors if held == side] for side in (False, True)]
        shown = [f"{sum(part) / len(part):.1%}" if part else "-" for part in parts]
        lines.append(f"{family:22} {len(errors):5} {shown[0]:>7} {shown[1]:>9}")
    return "\n".join(lines)


def write(tables: Tables, path: Path) -> None:
    """Write the calibration file."""
    lines = [
        "# Rates that devices and software stacks reach. Written by benchmarks/calibrate.py from published",
        "# runs; plan/time/rates.py says what each is. Later sections override earlier ones: default,",
        "# device, stack, stack on a device.",
    ]
    order = sorted(tables, key=lambda name: (name != "default", name.split(".")[0], name))
    for section in order:
        lines.append(f"\n[{section}]" if "." not in section else f'\n["{section}"]')
        lines += [f"{name} = {value:.4g}" for name, value in tables[section].items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Fit all stages, print the errors, write on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, action="append", default=[], help="more published rows")
    parser.add_argument("--write", action="store_true", help="write calibration.toml")
    parser.add_argument("--only", metavar="STACK", help="fit this stack only")
    arguments = parser.parse_args()
    paths = [TABLES / "published_runs.csv", TABLES / "measured_runs.csv", *arguments.runs]
    read = {row.id: row.case for path in paths for row in read_rows(path)}
    cases = [case for case in read.values() if case is not None and case.step_s]
    tables = copy.deepcopy(PRIORS)
    if arguments.only:
        mine = f"stack.{arguments.only}"
        kept = {name: table for name, table in load_calibration().items() if not name.startswith(mine)}
        tables = kept | {name: table for name, table in tables.items() if name.startswith(mine)}
    for stage in STAGES:
        if arguments.only not in (None, *stage.stacks):
            continue
        mine = [c for c in cases if c.workload.profile.name in stage.stacks and stage.wanted(c)]
        tables = fit(stage, [c for c in mine if not is_held_out(c.id)], tables)
        print(f"\n{', '.join(stage.stacks)}\n{report(mine, tables)}", flush=True)
    print(f"\nall\n{report(cases, tables)}")
    if arguments.write:
        write(tables, DATA / "calibration.toml")


if __name__ == "__main__":
    main()
