"""The interface of an engine: it runs tasks, groups rows by bucket and sorts them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from meshwright.core.errors import Problem
from meshwright.data.engines.stages import MapStage, ShuffleStage
from meshwright.data.engines.work_folder import WorkFolder, mistakes_of_tasks

Show = Callable[[str, int], None]
"""Called with the name of a stage and the number of its finished tasks."""

ENGINE_FAILED = "data-engine-failed"
"""The code of an error of the system or of an engine, not of the corpus."""

_POLL_S = 0.5


def engine_problem(reason: str) -> Problem:
    """Why an engine could not go on."""
    return Problem(
        "data-engine-failed",
        f"the preparation could not go on: {reason}",
        fix="Run the same command again: it goes on where it was",
    )


class Engine(Protocol):
    """Runs stages."""

    name: str
    parallelism: int

    def run_map(self, stage: MapStage, folder: Path, tasks: Sequence[tuple[int, Any]]) -> None:
        """Run ``run_task(folder, number, stage, task)`` for each numbered task, in any order."""

    def run_shuffle(self, stage: ShuffleStage, folder: Path, inputs: Sequence[Path]) -> None:
        """Read the rows of files, bring those of a bucket together, sort them, and run ``run_buckets``."""

    def close(self) -> None:
        """End processes and sessions that the engine started."""


def map_tasks(
    engine: Engine, work: WorkFolder, stage: MapStage, tasks: Sequence[Any], show: Show
) -> list[Path]:
    """Run the tasks that have no result yet; the files of all, in the order of the tasks."""
    left = work.missing(stage.name, len(tasks))
    folder = work.stage(stage.name)
    if left:
        with _watched(work, stage.name, show), mistakes_of_tasks(folder):
            engine.run_map(stage, folder, [(number, tasks[number]) for number in left])
        missing = work.missing(stage.name, len(tasks))
        assert not missing, f"the engine {engine.name} left out tasks {missing[:5]} of {stage.name}"
        work.note(stage=stage.name, tasks=len(left), of=len(tasks), engine=engine.name)
    show(stage.name, len(tasks))
    return work.results(stage.name)


def shuffle_rows(
    engine: Engine, work: WorkFolder, stage: ShuffleStage, inputs: Sequence[Path], show: Show
) -> list[Path]:
    """Run a shuffle, unless it is complete; the files of its buckets, in order."""
    if not work.is_done(stage.name):
        folder = work.restart(stage.name)
        if inputs:
            with _watched(work, stage.name, show):
                engine.run_shuffle(stage, folder, inputs)
        work.mark_done(stage.name)
        work.note(stage=stage.name, inputs=len(inputs), engine=engine.name)
    results = work.results(stage.name)
    show(stage.name, len(results))
    return results


@contextmanager
def _watched(work: WorkFolder, name: str, show: Show) -> Iterator[None]:
    """Report the number of results while an engine is at work: the same on every engine."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_S):
            show(name, len(work.results(name)))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
