"""How many devices a deadline or a budget allows, their cost, and the time lost to failures.

How long a training takes with failures is simulated (``simulate.run_length``). The planner is below the
simulator, which uses its assumptions: the caller passes the function.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_bytes, format_cost, format_days, format_plural, format_seconds
from meshwright.layout.checkpoint_interval import failure_rate
from meshwright.layout.parameters import count_parameters
from meshwright.plan.predict import Prediction
from meshwright.plan.search.find import find_layouts, with_cluster
from meshwright.spec.job import Job
from meshwright.spec.numbers import divisors

ASSUMED_STORAGE_BYTES_PER_S = 1e9
"""Per node, if the cluster does not define it."""
RESTART_S = 600.0
"""From a failure to the next step: detection, restart, reading the checkpoint."""
CHECKPOINT_BYTES = 12
"""Per parameter: float32 weight and two Adam moments."""
MOST_DOUBLINGS = 14
"""The number of nodes is doubled at most this often."""
STEPS_PER_DOUBLING = 8
"""Sizes per doubling of the nodes. More would give node counts with few divisors."""
MOST_SAVED = 0.08
"""Share of the device hours that a size may save over the better of the two doublings around it.

The largest in 8B and 70B models on 8 to 512 H100s is 6%.
"""
SIZE_CHECKED = 4
"""Layouts that fit exactly after which the search of a size ends."""
SIZE_S = 3.0
"""Longest search of a size, in seconds."""


@dataclass(frozen=True)
class RunLength:
    """Length of a training with checkpoints and failures; infinite where it makes no progress."""

    wall_s: float
    """The mean."""
    low_s: float
    """5% of the simulated runs are shorter."""
    high_s: float
    """5% of the simulated runs are longer."""
    lost_share: float
    """Share of it lost to checkpoints, repeated work and restarts."""


RunLengthOf = Callable[[Job, float], RunLength]
"""Length of a training by a job on a cluster, and by its length without failures."""


@dataclass(frozen=True)
class ClusterSize:
    """One number of devices with its best layout."""

    devices: int
    nodes: int
    prediction: Prediction
    length: RunLength
    """Length of the whole training, failures included."""
    cost: float | None

    @property
    def wall_s(self) -> float:
        """Mean time of the whole training."""
        return self.length.wall_s

    @property
    def lost_share(self) -> float:
        """Share of it lost to checkpoints, repeated work and restarts."""
        return self.length.lost_share


@dataclass(frozen=True)
class Goal:
    """The requirements for a cluster."""

    tokens: float
    """Number of tokens to train on."""
    deadline_s: float | None = None
    """Longest time of the whole training."""
    max_cost: float | None = None
    """Most that it may cost, in USD."""

    def met_by(self, wall_s: float, cost: float | None) -> bool:
        """Whether a training of this length and cost keeps the deadline and the budget."""
        in_time = self.deadline_s is None or wall_s <= self.deadline_s
        return in_time and (self.max_cost is None or (cost is not None and cost <= self.max_cost))

    def is_better(self, devices: int, wall_s: float, answer: ClusterSize | None) -> bool:
        """Whether a size is better than an answer: fewer devices; without a deadline, 1% faster."""
        if answer is None:
            return True
        return devices < answer.devices if self.deadline_s is not None else wall_s < 0.99 * answer.wall_s


@dataclass(frozen=True)
class Sizing:
    """All cluster sizes tried, and the answer."""

    goal: Goal
    tried: tuple[ClusterSize, ...]
    """Cluster sizes that hold the model, ordered by number of devices."""
    too_small: tuple[int, ...]
    """Numbers of devices on which no layout was found to fit."""
    answer: ClusterSize | None
    """The fewest devices that meet the goal; without a deadline, the fastest size within the budget."""
    assumptions: tuple[str, ...]

    @property
    def fastest(self) -> ClusterSize:
        """The fastest size, whether it meets the goal or not; ties: the smallest."""
        return min(self.tried, key=lambda size: (size.wall_s, size.devices))

    @property
    def cheapest(self) -> ClusterSize:
        """The size with the least cost, whether it meets the goal or not."""
        return min(self.tried, key=lambda size: (math.inf if size.cost is None else size.cost, size.wall_s))

    def summary(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "tokens": self.goal.tokens,
            "deadline_s": self.goal.deadline_s,
            "max_cost": self.goal.max_cost,
            "devices": None if self.answer is None else self.answer.devices,
            "nodes": None if self.answer is None else self.answer.nodes,
            "wall_s": None if self.answer is None else self.answer.wall_s,
            "wall_s_low": None if self.answer is None else self.answer.length.low_s,
            "wall_s_high": None if self.answer is None else self.answer.length.high_s,
            "cost": None if self.answer is None else self.answer.cost,
            "lost_share": None if self.answer is None else self.answer.lost_share,
            "tried": [
                {
                    "devices": size.devices,
                    "step_s": size.prediction.step_s,
                    "mfu": size.prediction.mfu,
                    "wall_s": size.wall_s,
                    "wall_s_low": size.length.low_s,
                    "wall_s_high": size.length.high_s,
                    "lost_share": size.lost_share,
                    "cost": size.cost,
                }
                for size in self.tried
            ],
            "too_small": list(self.too_small),
            "assumptions": list(self.assumptions),
        }


def checkpoint_write_s(job: Job, nodes: int) -> float:
    """Time to write or read a checkpoint: its size over the bandwidth of the storage."""
    rate = job.cluster.storage_bytes_per_s or ASSUMED_STORAGE_BYTES_PER_S * nodes
    return CHECKPOINT_BYTES * count_parameters(job.model) / rate


def list_assumptions(job: Job) -> tuple[str, ...]:
    """Values assumed for what the cluster does not define."""
    cluster, found = job.cluster, []
    if cluster.failure_hours is None:
        found.append(failure_rate(cluster, cluster.devices_per_node).basis.removeprefix("assumed: "))
    if cluster.storage_bytes_per_s is None:
        found.append(f"checkpoints written at {format_bytes(ASSUMED_STORAGE_BYTES_PER_S)}/s per node")
    found.append(f"{format_seconds(RESTART_S)} from a failure to the next step")
    found.append(f"checkpoints of {CHECKPOINT_BYTES} bytes per parameter, written synchronously")
    found.append("failed nodes replaced at once (spare nodes: simulate failures)")
    if cluster.cost_per_hour is None:
        found.append("price unknown: set cluster.cost_per_hour")
    return tuple(found)


def size_cluster(
    job: Job,
    goal: Goal,
    pins: dict[str, Any],
    length_of: RunLengthOf,
    progress: Callable[[int], None] = lambda devices: None,
) -> Sizing:
    """Try doublings of the devices, then the sizes between them that may be better.

    Args:
        job: With a decoder; its number of nodes is ignored.
        goal: Tokens, and a deadline or a budget.
        pins: Layout keys that keep their value.
        length_of: How long a training takes with failures.
        progress: Called with each number of devices before its search.
    """
    search = _SizeSearch(job, goal.tokens, pins, length_of, progress)
    answer = search.find(goal)
    if answer is None and goal.deadline_s is not None and goal.max_cost is not None:
        search.find(dataclasses.replace(goal, deadline_s=None))  # for the error: what each limit alone allows
        search.find(dataclasses.replace(goal, max_cost=None))
    sizes = tuple(size for _, size in sorted(search.tried.items()) if size is not None)
    too_small = tuple(devices for devices, size in sorted(search.tried.items()) if size is None)
    return Sizing(goal, sizes, too_small, answer, list_assumptions(job))


class _SizeSearch:
    """Tries cluster sizes, each once."""

    def __init__(
        self,
        job: Job,
        tokens: float,
        pins: dict[str, Any],
        length_of: RunLengthOf,
        progress: Callable[[int], None],
    ) -> None:
        self.tried: dict[int, ClusterSize | None] = {}
        self._job, self._tokens, self._pins, self._progress = job, tokens, pins, progress
        self._length_of = length_of

    def find(self, goal: Goal) -> ClusterSize | None:
        """The best size for a goal; None if none meets it."""
        answer: ClusterSize | None = None

        def attempt(devices: int) -> ClusterSize | None:
            nonlocal answer
            size = self._try(devices)
            if size is not None and goal.met_by(size.wall_s, size.cost):
                answer = size if goal.is_better(devices, size.wall_s, answer) else answer
            return size

        cluster, doubled = self._job.cluster, dict[int, ClusterSize | None]()
        doublings = [*divisors(cluster.devices_per_node)]
        if cluster.nic_bytes_per_s:
            doublings += [cluster.devices_per_node * 2**power for power in range(1, MOST_DOUBLINGS + 1)]
        for devices in doublings:
            doubled[devices] = attempt(devices)
            if (answer is not None and goal.deadline_s is not None) or _has_peaked(goal, [*doubled.values()]):
                break
        between = [
            (devices, _device_seconds(doubled[low], doubled[high]) * (1 - MOST_SAVED))
            for low, high in pairwise(doubled)
            for devices in _sizes_between(low, high, cluster.devices_per_node)
        ]
        for devices, device_s in between if goal.deadline_s is not None else reversed(between):
            wall_s, price = device_s / devices, cluster.cost_per_hour
            cost = None if price is None else price * device_s / 3600
            if goal.met_by(wall_s, cost) and goal.is_better(devices, wall_s, answer):
                attempt(devices)
        return answer

    def _try(self, devices: int) -> ClusterSize | None:
        if devices not in self.tried:
            self._progress(devices)
            self.tried[devices] = _best_on(self._job, devices, self._tokens, self._pins, self._length_of)
        return self.tried[devices]


def _sizes_between(low: int, high: int, per_node: int) -> range:
    """Numbers of devices between two doublings: whole nodes, in equal steps."""
    if low < per_node:
        return range(0)
    step = max(1, (high - low) // per_node // STEPS_PER_DOUBLING) * per_node
    return range(low + step, high, step)


def _device_seconds(*sizes: ClusterSize | None) -> float:
    """The least of several sizes; infinite if none holds the model."""
    return min((size.devices * size.wall_s for size in sizes if size is not None), default=math.inf)


def _has_peaked(goal: Goal, sizes: list[ClusterSize | None]) -> bool:
    """Whether more devices do not help: the cost is above the budget and grows, or the time does not shrink.

    Args:
        goal: With or without a budget.
        sizes: By number of devices, each about twice the one before it.
    """
    held = [size for size in sizes if size is not None]
    if len(held) < 2:
        return False
    before, last = held[-2:]
    if goal.max_cost is not None and before.cost is not None:
        cost = math.inf if last.cost is None else last.cost
        if cost > before.cost and cost * (1 - MOST_SAVED) > goal.max_cost:
            return True
    best = min(size.wall_s for size in held[:-3]) if len(held) > 3 else math.inf
    return all(size.wall_s >= 0.99 * best for size in held[-3:])


def _best_on(
    job: Job, devices: int, tokens: float, pins: dict[str, Any], length_of: RunLengthOf
) -> ClusterSize | None:
    per_node = job.cluster.devices_per_node
    nodes = max(1, devices // per_node)
    resized = with_cluster(job, nodes=nodes, devices_per_node=min(devices, per_node))
    found = find_layouts(resized, pins, SIZE_CHECKED, worlds=[devices], budget_s=SIZE_S)
    if not found.best:
        return None
    best = found.best[0]
    steps = math.ceil(tokens / (job.train.global_batch * job.data.seq_len))
    length = length_of(resized, steps * best.step_s)
    price = job.cluster.cost_per_hour
    cost = None if price is None or math.isinf(length.wall_s) else price * devices * length.wall_s / 3600
    return ClusterSize(devices, nodes, best, length, cost)


def explain_size(sizing: Sizing, kind: str) -> str:
    """The answer as text."""
    goal, answer = sizing.goal, sizing.answer
    if answer is None:
        numbers = sorted([*sizing.too_small, *(size.devices for size in sizing.tried)])
        return f"none of the sizes tried ({', '.join(map(str, numbers))} x {kind}) {_describe_goal(goal)}"
    low, high = format_days(answer.length.low_s), format_days(answer.length.high_s)
    time = format_days(answer.wall_s)
    time += "" if low == high else f" ({low} to {high})"
    time += "" if goal.deadline_s is None else f" of {format_days(goal.deadline_s)}"
    cost = "price unknown" if answer.cost is None else format_cost(answer.cost)
    cost += "" if goal.max_cost is None else f" of {format_cost(goal.max_cost)}"
    lost = f"{answer.lost_share:.1%} lost to checkpoints and failures"
    nodes = format_plural(answer.nodes, "node")
    who = f"one {kind} is enough: it" if answer.devices == 1 else f"{answer.devices} x {kind} ({nodes})"
    verb = "trains" if answer.devices == 1 else "train"
    return f"{who} {verb} {goal.tokens:.3g} tokens in {time}, {cost}, {lost}"


def _describe_goal(goal: Goal) -> str:
    within = [] if goal.deadline_s is None else [f"in {format_days(goal.deadline_s)}"]
    within += [] if goal.max_cost is None else [f"for {format_cost(goal.max_cost)}"]
    return f"trains {goal.tokens:.3g} tokens {' and '.join(within)}"


def unmet_goal_error(sizing: Sizing, kind: str) -> UserError:
    """The error for a goal that no size meets; it names what each limit alone allows."""
    goal = sizing.goal
    named = [] if goal.max_cost is None else [_name_within_budget(sizing, goal)]
    named += [] if goal.deadline_s is None else [_name_in_time(sizing, goal)]
    limit = "deadline" if goal.max_cost is None else "max_cost"
    fix = "Raise the limit or train on fewer tokens"
    fix += "; more devices do not help with this train.global_batch" if goal.max_cost is None else ""
    rule = f"cannot be met: {explain_size(sizing, kind)}; {'; '.join(named)}"
    return UserError(Problem("plan-goal-unmet", rule, path=limit, fix=fix, is_argument=True))


def _name_within_budget(sizing: Sizing, goal: Goal) -> str:
    """The fastest size within the budget; the cheapest one if none is."""
    budget = dataclasses.replace(goal, deadline_s=None)
    within = [size for size in sizing.tried if budget.met_by(size.wall_s, size.cost)]
    if not within:
        return f"the cheapest is {_describe_size(sizing.cheapest)}"
    fastest = min(within, key=lambda size: (size.wall_s, size.devices))
    return f"the fastest within the budget is {_describe_size(fastest)}"


def _name_in_time(sizing: Sizing, goal: Goal) -> str:
    """The fewest devices that meet the deadline; the fastest size if none does."""
    deadline = dataclasses.replace(goal, max_cost=None)
    in_time = [size for size in sizing.tried if deadline.met_by(size.wall_s, size.cost)]
    if not in_time:
        return f"the fastest of all is {_describe_size(sizing.fastest)}"
    fewest = min(in_time, key=lambda size: size.devices)
    return f"the deadline needs {_describe_size(fewest)}"


def _describe_size(size: ClusterSize) -> str:
    cost = "" if size.cost is None else f", {format_cost(size.cost)}"
    return f"{format_plural(size.devices, 'device')}: {format_days(size.wall_s)}{cost}"
