"""A checkpoint of 4 ranks is loaded and saved again by 3, 1, 2 and 4 ranks: fault test 18."""

from __future__ import annotations

import random

import pytest

from meshwright.runs.faults.checks.check import CheckRun
from meshwright.runs.faults.checks.resharding import REPLICATED, SHARDED, check_resharding


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(SHARDED, id="ZeRO-3, ZeRO-1, one rank, tensor parallel"),
        pytest.param(REPLICATED, id="tensor parallel and replicas, replicas, one rank, pipeline"),
    ],
)
def test_18_tensors_are_equal_bit_by_bit_after_each_hop_and_so_are_the_losses(tmp_path, layouts):
    """Four hops. Each loads what the hop before has saved, saves it again, and then trains 20 steps."""
    check = CheckRun(tmp_path, random.Random(0))
    check_resharding(check, [layouts])
    assert all(figure.ok for figure in check.figures), check.figures
