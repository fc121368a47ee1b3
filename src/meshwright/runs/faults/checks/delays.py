"""Fault test 22: delays and stalls of all packets, and connections to the supervisor that are reset.

A switch in user space delays frames, a TCP proxy resets connections. No rank may be lost, and all losses must
equal those of a run without faults.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from meshwright.plan.contract import PLAN_FILE, read_plan
from meshwright.runs.faults.checks.check import CheckRun, require
from meshwright.runs.faults.checks.node_run import NODES, NodeRun, started

ONE_WAY_S = 0.1
"""Delay of each frame: the round trip takes 200 ms."""
ALL_REDUCE_S = 2 * (NODES - 1) * 2 * ONE_WAY_S
"""Latency of gloo's ring: each of its messages waits for the receiver, and so takes a round trip."""
SLOW_LINKS = (f"cluster.nic_latency_s={ALL_REDUCE_S / math.log2(NODES)}", "cluster.nic_bytes_per_s=1e8")
"""What the planner is told; it multiplies the latency with the logarithm of the nodes."""
ESTIMATE = 0.25
"""Largest relative error of the predicted step time."""
STALLS, STALL_S = 0.01, 1.0
STEPS = 15
"""In each condition."""
RESETS = 2


def check_delays(check: CheckRun) -> None:
    """Delay, stalls and resets, in two runs."""
    for name, test in (("delay and stalls", check_delay_and_stalls), ("resets", check_resets)):
        check.progress(name)
        folder = check.folder / name.replace(" ", "-")
        folder.mkdir()
        one = replace(check, folder=folder, figures=[])
        test(one)
        check.figures += one.figures


def check_delay_and_stalls(check: CheckRun) -> None:
    """A round trip of 200 ms; then 1% of the frames stall for 1 s, with all that follow them."""
    with started(check, overrides=SLOW_LINKS, slow=True) as run:
        assert run.nodes.slow_switch is not None, "the run has a slow network"
        before_s = _measure_step(run, STEPS)
        run.nodes.slow_switch.configure(ONE_WAY_S)
        run.wait_for_step(run.steps_done() + 2)
        delayed_s = _measure_step(run, STEPS)
        run.nodes.slow_switch.configure(0.0, STALLS, STALL_S)
        run.wait_for_step(run.steps_done() + 2)
        _measure_step(run, STEPS)
        run.nodes.slow_switch.configure(0.0)
        _require_all_alive(run)
        check.count("step", 1000 * before_s, unit="ms")
        check.count("step with a round trip of 200 ms", 1000 * delayed_s, unit="ms")
        predicted_s = read_plan(run.nodes.run_dir / PLAN_FILE).step_s
        check.count("predicted by the plan", 1000 * predicted_s, unit="ms")
        check.limit("error of the prediction", 100 * abs(predicted_s / delayed_s - 1), 100 * ESTIMATE, "%")
        run.finish()


def _measure_step(run: NodeRun, steps: int) -> float:
    """The median time of the next steps."""
    first = run.steps_done()
    run.wait_for_step(first + steps)
    found: list[float] = [e["step_s"] for e in run.events("step") if e["rank"] == 0 and e["step"] > first]
    return statistics.median(found)


def _require_all_alive(run: NodeRun) -> None:
    for name in ("rank_lost", "hang", "minority", "node_refused"):
        require(not run.events(name), f"a false alarm: {run.events(name)[:1]}")
    pids = {event["pid"] for event in run.events("started")}
    require(len(pids) == NODES, f"{len(pids)} processes of ranks were started, {NODES} expected")


def check_resets(check: CheckRun) -> None:
    """All connections of agents to the supervisor are reset, twice: the ranks keep their processes."""
    with started(check, via_proxy=True) as run:
        assert run.proxy is not None, "the agents join through it"
        for _ in range(RESETS):
            run.wait_for_step(run.steps_done() + STEPS)
            count = run.proxy.reset()
            require(count == NODES - 1, f"{count} connections were reset, {NODES - 1} expected")
        run.wait_for_step(run.steps_done() + STEPS)
        _require_all_alive(run)
        check.count("resets without a death", RESETS * (NODES - 1))
        run.finish()
