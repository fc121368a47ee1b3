"""Fault test 21: nodes that are cut off, in one direction or both, and a partition that heals.

Three nodes have a rank each, and a fourth one waits as a spare. The side with the supervisor and a
majority of the nodes goes on; no other side commits anything.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace

from meshwright.runs.faults.checks.check import CheckRun, require
from meshwright.runs.faults.checks.node_run import NodeRun, now, started

GOES_ON_S = 15.0
CUT_S = 30.0
IN_FLIGHT_S = 1.0
"""Packets that were in flight when the network was cut may still complete a step."""
FIRST_STEP = 25
"""After the first checkpoint: snapshots of a lost node are lost with it."""
CUT_OFF = 2
"""The node that is cut off, whose agent becomes a spare when it comes back."""


def check_partitions(check: CheckRun) -> None:
    """All four, each in a run of its own."""
    for name, test in (
        ("black-holed", check_black_hole),
        ("cannot send", lambda one: check_one_way(one, sends=False)),
        ("cannot receive", lambda one: check_one_way(one, sends=True)),
        ("minority with the supervisor", check_minority),
    ):
        check.progress(name)
        folder = check.folder / name.replace(" ", "-")
        folder.mkdir()
        one = replace(check, folder=folder, figures=[])
        test(one)
        check.figures += [replace(figure, name=f"{name}: {figure.name}") for figure in one.figures]


def check_black_hole(check: CheckRun) -> None:
    """Nothing reaches one node, and nothing comes from it, for 30 s."""
    with _started_with_spare(check) as run:
        others = [node for node in range(4) if node != CUT_OFF]
        run.nodes.separate([CUT_OFF], others)
        _require_majority_goes_on(run)


def check_one_way(check: CheckRun, sends: bool) -> None:
    """One node only sends, or only receives, for 30 s."""
    with _started_with_spare(check) as run:
        others = [node for node in range(4) if node != CUT_OFF]
        if sends:
            run.nodes.lose(others, [CUT_OFF])
        else:
            run.nodes.lose([CUT_OFF], others)
        _require_majority_goes_on(run)


@contextlib.contextmanager
def _started_with_spare(check: CheckRun) -> Iterator[NodeRun]:
    with started(check, more=1) as run:
        run.nodes.join(3)
        run.wait(lambda: run.events("node_spare"), 60, "no agent became a spare")
        run.wait_for_step(FIRST_STEP)
        yield run


def _require_majority_goes_on(run: NodeRun) -> None:
    """Check that the others continue with the spare in time, and the lost node returns without commits."""
    cut_at = now()
    first = run.wait_for_generation(1)
    run.check.limit("next step after", first["time"] - cut_at, GOES_ON_S)
    time.sleep(max(0.0, cut_at + CUT_S - now()))  # the length of the fault
    late = run.commits_between(cut_at + IN_FLIGHT_S, now(), CUT_OFF)
    require(not late, f"the node that was cut off has committed {late[:1]}")
    run.nodes.heal()
    run.wait(lambda: len(run.events("node_spare")) == 2, 60, "the node did not come back as a spare")
    require(not run.events("minority"), "the majority was taken for a minority")
    recovered = run.events("recovered")
    require(len(recovered) == 1, f"{len(recovered)} recoveries")
    run.finish()


def check_minority(check: CheckRun) -> None:
    """The supervisor keeps one node of three for 20 s: no rank commits. Then all ranks go on."""
    with started(check) as run:
        run.wait_for_step(FIRST_STEP)
        run.nodes.separate([0], [1, 2])
        cut_at = now()
        run.wait(lambda: run.events("minority"), GOES_ON_S, "the supervisor did not notice")
        noticed_s = run.events("minority")[0]["time"] - cut_at
        check.limit("noticed after", noticed_s, GOES_ON_S)
        time.sleep(max(0.0, cut_at + 20.0 - now()))  # the length of the fault
        for node in range(3):
            late = run.commits_between(cut_at + IN_FLIGHT_S, now(), node)
            require(not late, f"node {node} has committed {late[:1]}")
        run.nodes.heal()
        healed_at = now()
        first = run.wait_for_generation(1)
        check.count("next step after the network healed", first["time"] - healed_at, unit="s")
        run.finish()
