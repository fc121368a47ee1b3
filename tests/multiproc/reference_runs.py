"""Reference runs that tests of layouts compare with: one process, and uninterrupted runs."""

from __future__ import annotations

import shutil

from saved_checkpoints import require_equal_files

TEN_STEPS = ("train.steps=10", "train.eval_every=5")
REFERENCE_LOSSES: dict[tuple[str, ...], list[float]] = {}


def max_relative_diff(ours, theirs):
    """Largest max_relative_diff difference of two lists of numbers."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def reference_losses(train, *overrides):
    """Losses of one process. Cached by settings."""
    if overrides not in REFERENCE_LOSSES:
        REFERENCE_LOSSES[overrides] = train("layout.dp_replicate=1", *TEN_STEPS, *overrides).losses
    return REFERENCE_LOSSES[overrides]


class ResumeChecker:
    """Compares runs resumed from step 3 with uninterrupted runs of six steps."""

    def __init__(self, train, folder, *settings):
        self._train, self._folder = train, folder
        self._common = ("train.steps=6", "checkpoint.every_steps=3", "checkpoint.keep_last=9", *settings)
        self._uninterrupted, self._resumed = {}, 0

    def uninterrupted(self, *layout):
        """A run of six steps. Cached by layout."""
        if layout not in self._uninterrupted:
            self._uninterrupted[layout] = self._train(*self._common, *layout)
        return self._uninterrupted[layout]

    def resume(self, source, layout):
        """Resume the source layout's run from step 3; returns the checkpoint folder and the run."""
        self._resumed += 1
        folder = self._folder / f"resumed-{self._resumed}"
        saved = self.uninterrupted(*source).run_dir / "checkpoints" / "step-00000003"
        shutil.copytree(saved, folder / "step-00000003")
        return folder, self._train(*self._common, *layout, f"checkpoint.dir={folder}", resume=True)

    def require_bit_identical(self, layout):
        """Resumed in the same layout: losses, weights and optimizer state are bit-identical."""
        folder, resumed = self.resume(layout, layout)
        uninterrupted = self.uninterrupted(*layout)
        assert resumed.losses == uninterrupted.losses[3:]
        require_equal_files(folder / "step-00000006", uninterrupted.run_dir / "checkpoints" / "step-00000006")

    def require_equal_losses(self, source, layout):
        """Resumed in another layout: the losses are equal up to rounding, and a message names the change."""
        _, resumed = self.resume(source, layout)
        assert max_relative_diff(resumed.losses, self.uninterrupted(*source).losses[3:]) < 1e-5
        assert "the sharding was" in resumed.messages


def require_equal_losses_and_plan(train, axis, layout, job, tolerance):
    """Ten losses equal those of one process; state and collectives equal the plan; the audit passes.

    Returns the phases in which the layout calls collectives over an axis.
    """
    overrides = tuple(job.split())
    trained = train(*(f"layout.{key}" for key in layout.split()), *TEN_STEPS, *overrides)
    assert max_relative_diff(trained.losses, reference_losses(train, *overrides)) < tolerance
    result = trained.result
    assert result["audit_ok"], result["differences"]
    assert result["state_bytes"] == result["predicted_state_bytes"]
    assert all(row["calls"] > 0 for row in result["collectives"]), "a planned collective without a call"
    return {row["phase"] for row in result["collectives"] if row["axis"] == axis}
