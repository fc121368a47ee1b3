"""The session of a single rank without a launcher, for benchmarks that time its steps.

It imports torch: set the environment first.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.core.events import EVENTS_FILE, EventWriter
from meshwright.launch.assignment import Assignment
from meshwright.plan.contract import build_plan
from meshwright.run.collectives.counter import CollectiveCounter
from meshwright.run.mesh import join_ranks
from meshwright.run.session import Session, build_session
from meshwright.spec.job import Job


def build_rank(job: Job, folder: Path, data_dir: Path) -> Session:
    """A session as a rank builds it.

    Args:
        job: With a layout of one process.
        folder: Where its events go.
        data_dir: A prepared folder.
    """
    plan, _ = build_plan(job)
    counter = CollectiveCounter()
    counter.install()
    assignment = Assignment(str(folder), str(data_dir), str(folder / "checkpoints"))
    events = EventWriter(folder / EVENTS_FILE, 0)
    return build_session(plan, assignment, join_ranks(plan.job, counter), counter, events)
