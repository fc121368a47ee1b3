"""What tests of layouts compare: losses with those of one process."""

from __future__ import annotations

import shutil

from safetensors.torch import load_file

TEN = ("train.steps=10", "train.eval_every=5")
REFERENCE: dict[tuple[str, ...], list[float]] = {}


def relative(ours, theirs):
    """The largest difference of two curves, as a share."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def reference(train, *overrides):
    """The losses of one process; trained once for all cases with the same settings."""
    if overrides not in REFERENCE:
        REFERENCE[overrides] = train("layout.dp_replicate=1", *TEN, *overrides).losses
    return REFERENCE[overrides]


class Resumed:
    """Runs of six steps with a checkpoint in the middle, and others that go on from there."""

    def __init__(self, train, folder, *settings):
        self._train, self._folder = train, folder
        self._common = ("train.steps=6", "checkpoint.every_steps=3", "checkpoint.keep_last=9", *settings)
        self._straight, self._resumed = {}, 0

    def straight(self, *layout):
        """A run without a break; made once for each layout."""
        if layout not in self._straight:
            self._straight[layout] = self._train(*self._common, *layout)
        return self._straight[layout]

    def again(self, source, layout):
        """Go on from the third step of a straight run; returns the folder of checkpoints and the run."""
        self._resumed += 1
        folder = self._folder / f"resumed-{self._resumed}"
        saved = self.straight(*source).run_dir / "checkpoints" / "step-00000003"
        shutil.copytree(saved, folder / "step-00000003")
        return folder, self._train(*self._common, *layout, f"checkpoint.dir={folder}", resume=True)

    def require_the_same_bits(self, layout):
        """A layout that goes on from its own checkpoint is the one that never stopped."""
        folder, again = self.again(layout, layout)
        straight = self.straight(*layout)
        assert again.losses == straight.losses[3:]
        for name in ("model.safetensors", "optimizer.safetensors"):
            ours = load_file(folder / "step-00000006" / name)
            theirs = load_file(straight.run_dir / "checkpoints" / "step-00000006" / name)
            assert ours.keys() == theirs.keys()
            assert all((ours[key] == theirs[key]).all() for key in ours), name

    def require_the_same_curve(self, source, layout):
        """Another layout goes on up to rounding, and says that it is another."""
        _, other = self.again(source, layout)
        assert relative(other.losses, self.straight(*source).losses[3:]) < 1e-5
        assert "the sharding was" in other.messages


def phases_of(train, axis, layout, job, tolerance):
    """Hold ten steps of a layout to one process and to its plan; in which phases it spoke over an axis."""
    asked = tuple(job.split())
    split = train(*(f"layout.{key}" for key in layout.split()), *TEN, *asked)
    assert relative(split.losses, reference(train, *asked)) < tolerance
    result = split.result
    assert result["audit_ok"], result["differences"]
    assert result["state_bytes"] == result["predicted_state_bytes"]
    assert all(row["calls"] > 0 for row in result["collectives"]), "a promise about nothing"
    return {row["phase"] for row in result["collectives"] if row["axis"] == axis}
