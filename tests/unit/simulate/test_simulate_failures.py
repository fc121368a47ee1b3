"""The simulator against closed forms, a step-by-step reference and published runs."""

from __future__ import annotations

import dataclasses
import heapq
import math

import numpy as np
import pytest

from meshwright.layout.checkpoint_interval import daly_interval_s, lost_share
from meshwright.simulate.choices import best_interval, best_spares, try_intervals, try_spares
from meshwright.simulate.downtime import Events, find_downtime
from meshwright.simulate.failures import KINDS, FailureModel, draw_failures
from meshwright.simulate.outcomes import LOSSES, evaluate, simulate

HOUR, DAY = 3600.0, 86_400.0
SOFTWARE_ONLY = {"software": 1 / (10 * HOUR)}


def model_of(**changes) -> FailureModel:
    """Failures of software every 10 h: no repairs, so the assumptions of Young and Daly hold."""
    plain = FailureModel(
        wall_s=300 * DAY, nodes=64, rates_per_s=SOFTWARE_ONLY, detect_s=5.0, restart_s=200.0, load_s=95.0,
        save_s=20.0, interval_s=1200.0, repair_s=DAY, spares=0,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def exact_goodput(model: FailureModel) -> float:
    """The exact expectation with failures also in saves and restarts (Daly 2006, complete model).

    tau / (M e^(R/M) (e^((tau + d) / M) - 1))
    """
    between, restore = model.mtbf_s, model.detect_s + model.restart_s + model.load_s
    cycle = model.interval_s + model.save_s
    return model.interval_s / (between * math.exp(restore / between) * math.expm1(cycle / between))


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


@pytest.mark.parametrize("changes", [{}, {"save_s": 200.0, "interval_s": 4 * HOUR}, {"restart_s": 3 * HOUR}])
def test_goodput_equals_the_exact_expectation(changes):
    """Within four standard errors, also where failures hit saves and restarts."""
    model = model_of(**changes)
    mean, error = mean_and_error(simulate(model, 400, seed=1).goodput)
    edge = (model.interval_s + model.save_s + model.restart_s) / model.wall_s  # start and end of a run
    assert abs(mean - exact_goodput(model)) < 4 * error + edge
    assert 4 * error + edge < 0.01


def test_waste_equals_the_first_order_formula_where_its_assumptions_hold():
    """Saves and restarts are short against the time between failures: second-order terms are below 3%."""
    model = model_of(rates_per_s={"software": 1 / (100 * HOUR)}, wall_s=3000 * DAY)
    mean, error = mean_and_error(simulate(model, 200, seed=2).goodput)
    restore_s = model.detect_s + model.restart_s + model.load_s
    waste = lost_share(model.interval_s, model.save_s, model.mtbf_s, restore_s)
    assert 1 - mean == pytest.approx(waste, rel=0.03)
    assert 4 * error < 0.03 * waste


@pytest.mark.parametrize(("save_s", "hours"), [(20.0, 10.0), (300.0, 24.0), (300.0, 6.0)])
def test_the_best_interval_of_the_sweep_is_dalys(save_s, hours):
    model = model_of(rates_per_s={"software": 1 / (hours * HOUR)}, save_s=save_s)
    daly_s = daly_interval_s(save_s, model.mtbf_s)
    events = Events.of(next(draw_failures(model, 600, seed=3)), model)
    points = try_intervals(model, events, 0, base_s=1.3 * daly_s)  # not centred on the answer
    assert best_interval(points).interval_s == pytest.approx(daly_s, rel=0.15)


def test_without_failures_only_saves_are_lost():
    model = model_of(rates_per_s={"software": 0.0})
    outcomes = simulate(model, 3, seed=0)
    saves = math.floor(model.wall_s / (model.interval_s + model.save_s))
    rest = model.wall_s - saves * (model.interval_s + model.save_s)
    saved_s = saves * model.save_s + max(0.0, rest - model.interval_s)
    assert outcomes.goodput == pytest.approx([1 - saved_s / model.wall_s] * 3, rel=1e-12)
    assert outcomes.interruptions.tolist() == [0, 0, 0]
    assert all(outcomes.lost_s[reason].max() < 1e-6 for reason in LOSSES[1:])


def test_useful_and_lost_time_add_up_to_the_whole():
    """Every second of every run has one use, with waits and failures during restarts."""
    model = model_of(rates_per_s=dict.fromkeys(KINDS, 1 / (8 * HOUR)), wall_s=30 * DAY, spares=3)
    outcomes = simulate(model, 300, seed=4)
    whole = outcomes.goodput * model.wall_s + sum(outcomes.lost_s.values())
    assert whole == pytest.approx(np.full(300, model.wall_s), rel=1e-9)
    assert all(lost_s.min() > -1e-3 for lost_s in outcomes.lost_s.values())
    assert outcomes.lost_s["waiting for nodes"].mean() > 0


class Walk:
    """One run, event by event, in plain Python: an independent reference for the arrays."""

    def __init__(self, model: FailureModel, spares: int) -> None:
        self.model, self.in_service = model, model.nodes + spares
        self.active, self.ready, self.found, self.source = model.nodes, 0.0, 0.0, "saved"
        self.useful = self.waited = self.lost = self.carried = self.carried_work = 0.0
        self.failures = 0

    def usable(self, in_service: int) -> int:
        if in_service >= self.model.nodes:
            return self.model.nodes
        whole = in_service // self.model.nodes_per_replica * self.model.nodes_per_replica
        if not self.model.replans or whole < self.model.min_nodes:
            return 0
        planned = [(share, -nodes) for nodes, share in self.model.throughput if nodes <= whole]
        return -max(planned)[1] if planned else whole

    @property
    def speed(self) -> float:
        planned = dict(self.model.throughput)
        if self.active in planned or not planned:
            return planned.get(self.active, self.active / self.model.nodes)
        return self.active / min(planned) * planned[min(planned)]

    def run(self, events) -> None:
        """Events: time, kind, mark, seconds until the nodes are back."""
        queue = [(at, 0, kind, mark, out_s) for at, kind, mark, out_s in events]
        heapq.heapify(queue)
        while queue:
            at, taken, kind, mark, out_s = heapq.heappop(queue)
            if kind == "back":
                self.give_back(at, taken)
            elif self.fail(at, kind, mark):
                taken = {"software": 0, "switch": self.model.nodes_per_switch}.get(kind, 1)
                self.in_service -= taken
                self.active = self.usable(self.in_service)
                self.restore(at, kind)
                if taken and at + out_s < self.model.wall_s:
                    heapq.heappush(queue, (at + out_s, taken, "back", 0.0, 0.0))
        self.close(self.model.wall_s, "saved")
        self.useful += self.carried_work

    def fail(self, at: float, kind: str, mark: float) -> bool:
        can_fail = self.active if kind == "software" else min(self.in_service, self.model.nodes)
        if mark * self.model.nodes >= can_fail:
            return False
        self.failures += 1
        source = "checkpoint"
        if self.model.snapshot_s and kind in ("device", "software"):
            source = "snapshot"
        if kind == "preemption" and self.model.notice_s >= self.model.save_s:
            source = "saved"
        self.close(at, source)
        self.source = source
        return True

    def restore(self, at: float, kind: str) -> None:
        planned = kind == "preemption" and self.source == "saved"
        self.found = at + (self.model.save_s if planned else self.model.detect_s)
        load_s = self.model.snapshot_load_s if self.source == "snapshot" else self.model.load_s
        self.ready = self.found + self.model.restart_s + load_s

    def give_back(self, at: float, taken: int) -> None:
        self.in_service += taken
        more = self.usable(self.in_service)
        if more <= self.active:
            return
        was_up = self.active > 0
        self.close(at, "saved" if was_up else self.source)
        self.source = "saved" if was_up else self.source
        self.active, self.found = more, max(at, self.found)
        load_s = self.model.snapshot_load_s if self.source == "snapshot" else self.model.load_s
        self.ready = self.found + (self.model.save_s if was_up else 0) + self.model.restart_s + load_s

    def close(self, at: float, source: str) -> None:
        """The work of a segment that ends at this time: kept, carried in a snapshot, or lost."""
        if not self.active:
            self.waited += max(0.0, at - self.found)
        left = max(0.0, at - self.ready) if self.active else 0.0
        speed, model = self.speed, self.model
        unsaved = snapped = 0.0
        to_save, to_snap = model.interval_s, model.snapshot_s or math.inf
        while left > 0:
            trained = min(left, to_save, to_snap)
            unsaved += trained
            left, to_save, to_snap = left - trained, to_save - trained, to_snap - trained
            if to_snap == 0 and to_save > 0:
                copied = min(left, to_save, model.snapshot_cost_s)
                left, to_save = left - copied, to_save - copied
                if copied == model.snapshot_cost_s:
                    snapped, to_snap = unsaved, model.snapshot_s
            if to_save == 0 and left >= model.save_s:
                left -= model.save_s
                self.useful += unsaved * speed + self.carried_work
                unsaved = snapped = self.carried = self.carried_work = 0.0
                to_save, to_snap = model.interval_s, model.snapshot_s or math.inf
            elif to_save == 0:
                left = 0.0
        if source == "saved":
            self.useful += unsaved * speed + self.carried_work
            self.carried = self.carried_work = 0.0
        elif source == "snapshot":
            self.lost += unsaved - snapped
            self.carried, self.carried_work = self.carried + snapped, self.carried_work + snapped * speed
        else:
            self.lost += unsaved + self.carried
            self.carried = self.carried_work = 0.0


WALKED = {
    "wait": {},
    "several nodes per switch": {"nodes_per_switch": 3},
    "exponential repairs": {"repair": "exponential"},
    "snapshots": {"snapshot_s": 300.0, "snapshot_cost_s": 7.0, "snapshot_load_s": 1.0},
    "re-planning": {"replans": True, "min_nodes": 4, "nodes_per_replica": 2},
    "re-planning, snapshots": {"replans": True, "min_nodes": 3, "snapshot_s": 400.0, "interval_s": 9000.0},
    "layouts for fewer nodes": {
        "replans": True, "min_nodes": 3, "throughput": ((4, 0.45), (6, 0.9), (7, 0.7), (8, 1.0)),
    },
    "preemption": {"notice_s": 30.0, "replace_s": 4 * HOUR},
    "preemption without a save": {"notice_s": 5.0, "replace_s": 4 * HOUR, "replans": True, "min_nodes": 2},
    "everything": {
        "replans": True, "min_nodes": 2, "repair": "exponential", "snapshot_s": 250.0, "notice_s": 60.0,
        "snapshot_cost_s": 3.0, "nodes_per_switch": 4, "replace_s": HOUR, "interval_s": 6 * HOUR,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WALKED)
@pytest.mark.parametrize("spares", [0, 2])
def test_arrays_equal_a_walk_over_the_events(name, spares):
    """A run of 8 nodes in which two nodes are missing most of the time."""
    plain = model_of(
        rates_per_s=dict.fromkeys(KINDS, 1 / (20 * HOUR)), wall_s=20 * DAY, repair_s=15 * HOUR, nodes=8
    )
    model = dataclasses.replace(plain, **WALKED[name])
    failures = next(draw_failures(model, 40, seed=5))
    outcomes = evaluate(find_downtime(Events.of(failures, model), model, spares), model, model.interval_s)
    for run in range(40):
        mine = failures.run == run
        drawn = (failures.at_s, [KINDS[k] for k in failures.kind], failures.mark, failures.out_s)
        walk = Walk(model, spares)
        walk.run(
            [event for event, is_mine in zip(zip(*drawn, strict=True), mine, strict=True) if is_mine][1:]
        )
        assert outcomes.interruptions[run] == walk.failures
        assert outcomes.goodput[run] * model.wall_s == pytest.approx(walk.useful, abs=1.0)
        assert outcomes.lost_s["lost work"][run] == pytest.approx(walk.lost, abs=1.0)
        assert outcomes.lost_s["waiting for nodes"][run] == pytest.approx(walk.waited, abs=1.0)
    assert outcomes.lost_s["lost work"].max() > 0


def test_kinds_and_numbers_of_failures_follow_the_rates():
    rates = {"device": 8e-5, "node": 0.0, "switch": 1e-5, "software": 1e-5, "preemption": 2e-5}
    model = model_of(rates_per_s=rates, wall_s=10 * DAY)
    failures = next(draw_failures(model, 2000, seed=6))
    counts = np.bincount(failures.kind + 1, minlength=6)[1:]
    expected = 2000 * model.wall_s * np.array([rates[kind] for kind in KINDS])
    assert counts[1] == 0
    assert np.all(np.abs(counts - expected) <= 5 * np.sqrt(expected))


def test_a_seed_repeats_and_alternatives_meet_the_same_failures():
    model = model_of()
    once, again, other = (simulate(model, 20, seed).goodput for seed in (7, 7, 8))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)
    shorter = simulate(dataclasses.replace(model, interval_s=60.0, spares=5), 20, 7)
    assert shorter.interruptions.tolist() == simulate(model, 20, 7).interruptions.tolist()


def test_chunks_do_not_change_what_is_simulated(monkeypatch):
    """Mean goodput of many small chunks and of one: the same distribution, as many runs."""
    model = model_of(wall_s=30 * DAY)
    whole = simulate(model, 500, seed=9)
    monkeypatch.setattr("meshwright.simulate.failures.CHUNK_EVENTS", 1000)
    parts = simulate(model, 500, seed=9)
    assert len(parts.goodput) == 500
    errors = math.hypot(mean_and_error(whole.goodput)[1], mean_and_error(parts.goodput)[1])
    assert abs(whole.goodput.mean() - parts.goodput.mean()) < 5 * errors


def test_spares_end_the_waiting_and_too_many_are_not_worth_their_price():
    model = model_of(rates_per_s={"node": 1 / DAY}, wall_s=60 * DAY, repair_s=2 * DAY)
    points = try_spares(model, Events.of(next(draw_failures(model, 500, seed=10)), model), model.interval_s)
    goodput = [point.goodput for point in points]
    best = best_spares(points)
    assert goodput == sorted(goodput)  # under the same failures a spare never harms
    assert goodput[0] < 0.4
    assert best.goodput > 0.9
    assert 2 < best.spares < points[-1].spares  # two nodes are in repair on average
