"""A checkpoint of 4 ranks is loaded and saved again by 3, 1, 2 and 4 ranks: fault test 18."""

from __future__ import annotations

import shutil

import pytest
import torch

from meshwright.checkpoint.manifest import read_manifest
from meshwright.runs.train import ENTRY
from saved_checkpoints import load_tensors, require_equal_files

NAME = "step-00000004"
STEPS = ("train.steps=24", "checkpoint.every_steps=4", "checkpoint.keep_last=9", "train.warmup=2")
ROUNDING = 1e-6
"""Relative difference of a loss between layouts: sums are grouped differently (float32). Seen: 1.2e-7."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(
            (
                ("dp_shard=4", "zero=3"),
                ("dp_shard=3", "zero=1"),
                (),
                ("tp=2",),
                ("dp_shard=4", "zero=3"),
            ),
            id="ZeRO-3, ZeRO-1, one rank, tensor parallel",
        ),
        pytest.param(
            (
                ("dp_replicate=2", "tp=2"),
                ("dp_replicate=3",),
                (),
                ("pp=2",),
                ("dp_replicate=2", "tp=2"),
            ),
            id="tensor parallel and replicas, replicas, one rank, pipeline",
        ),
    ],
)
def test_18_tensors_are_equal_bit_by_bit_after_each_hop_and_so_are_the_losses(
    train, tmp_path, monkeypatch, layouts
):
    """Four hops. Each loads what the hop before has saved, saves it again, and then trains 20 steps.

    All tensors (weights, both moments, step counts) and the position in the data are equal after each hop.
    The losses are equal up to rounding, and bit by bit in the layout of the first run, after all the others.
    """
    first = tuple(f"layout.{key}" for key in layouts[0])
    straight = train(*STEPS, *first)
    assert len(straight.losses) == 24
    before = straight.run_dir / "checkpoints" / NAME
    expected, position = load_tensors(before), read_manifest(before).position
    assert position == 4 * 12
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:save_what_was_resumed")
    for number, layout in enumerate(layouts[1:]):
        root = tmp_path / f"hop-{number}"
        shutil.copytree(before, root / NAME)
        hop = train(
            *STEPS,
            *(f"layout.{key}" for key in layout),
            f"checkpoint.dir={root}",
            f"run_dir={root}-run",
            resume=True,
        )
        before = root / f"{NAME}.1"
        manifest, saved = read_manifest(before), load_tensors(before)
        assert (manifest.step, manifest.position) == (4, position)
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], expected[name]) for name in expected)
        assert hop.losses == pytest.approx(straight.losses[4:], rel=ROUNDING)
    assert manifest.world_size == 4
    assert hop.losses == straight.losses[4:], "the layout of the first run: bit by bit"
    monkeypatch.setattr("meshwright.runs.train.ENTRY", ENTRY)
    require_equal_files(before, straight.run_dir / "checkpoints" / NAME)
