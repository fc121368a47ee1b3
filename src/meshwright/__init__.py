"""Meshwright plans, runs and audits distributed training.

The public API is in :mod:`meshwright.api`; its names are imported here when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.core.version import __version__ as __version__

if TYPE_CHECKING:
    from meshwright.api import (
        FailureSettings,
        Job,
        Plan,
        ProvedCollective,
        Reporter,
        Run,
        SimulatedSchedule,
        WrittenJob,
        bench_collectives,
        build_collective,
        build_schedule,
        compare_collectives,
        copy_checkpoints,
        count_words,
        draw_comparison,
        evaluate,
        export_checkpoint,
        find_hang,
        find_nearest_legal,
        generate,
        job_schema,
        join_run,
        list_checkpoints,
        list_runs,
        load_job,
        load_run,
        load_schedule,
        prepare_corpus,
        probe,
        prove_collective,
        prove_schedule,
        prune_checkpoints,
        run_faults,
        simulate_schedule,
        validate,
        validate_collectives,
        write_job,
        write_trace,
    )
    from meshwright.core.errors import (
        CheckFailedError,
        InterruptedRunError,
        MeshwrightError,
        RunFailedError,
        UserError,
    )

__all__ = [
    "CheckFailedError",
    "FailureSettings",
    "InterruptedRunError",
    "Job",
    "MeshwrightError",
    "Plan",
    "ProvedCollective",
    "Reporter",
    "Run",
    "RunFailedError",
    "SimulatedSchedule",
    "UserError",
    "WrittenJob",
    "bench_collectives",
    "build_collective",
    "build_schedule",
    "compare_collectives",
    "copy_checkpoints",
    "count_words",
    "draw_comparison",
    "evaluate",
    "export_checkpoint",
    "find_hang",
    "find_nearest_legal",
    "generate",
    "job_schema",
    "join_run",
    "list_checkpoints",
    "list_runs",
    "load_job",
    "load_run",
    "load_schedule",
    "prepare_corpus",
    "probe",
    "prove_collective",
    "prove_schedule",
    "prune_checkpoints",
    "run_faults",
    "simulate_schedule",
    "validate",
    "validate_collectives",
    "write_job",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(
        import_module("meshwright.core.errors" if name.endswith("Error") else "meshwright.api"), name
    )


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
