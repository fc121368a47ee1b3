"""The alloc/free walker: live bytes at every snapshot; every step frees what it allocates."""

from __future__ import annotations

import pytest

from meshwright.plan.memory.block import BlockSequence
from meshwright.plan.memory.triton_block import TritonBlock
from meshwright.plan.memory.walker import StepWalker


def test_a_snapshot_adds_its_own_buffers_to_the_live_bytes():
    walker = StepWalker(gradients=7)
    walker.alloc(activations=100, temporary=10)
    walker.snapshot("forward", "100", temporary=5, at=(3, ""))
    walker.free(activations=60, temporary=10)
    walker.ready_grads = 2
    walker.snapshot("backward", "40", activations=1, gradients=3, at=(2, "block"))
    forward, backward = walker.snapshots
    assert (forward.activations, forward.temporary, forward.gradients) == (100, 15, 7)
    assert (forward.bytes, forward.layer, forward.backward) == (122, 3, False)
    assert (backward.activations, backward.temporary, backward.gradients) == (41, 0, 10)
    assert (backward.ready_grads, backward.layer, backward.backward) == (2, 2, True)


def test_saved_bytes_and_formulas_follow_the_blocks():
    dense, routed = (TritonBlock(0, 0, saved, f"{saved} per block", ()) for saved in (3, 5))
    blocks = BlockSequence((dense, dense, routed, routed, routed))
    assert [blocks.saved(count) for count in range(6)] == [0, 3, 6, 11, 16, 21]
    assert blocks.formula() == "2 blocks, 3 per block, 3 blocks, 5 per block"
    assert blocks.formula(2) == "2 blocks, 3 per block"


@pytest.mark.parametrize(("window", "listed"), [(0, {0, 1, 2, 7}), (1, {0, 1, 2, 3, 6, 7})])
def test_only_the_ends_of_a_run_of_equal_blocks_can_be_the_peak(window, listed):
    one, other = (TritonBlock(0, 0, saved, "", ()) for saved in (3, 5))
    assert BlockSequence((one, one, *[other] * 6)).find_extremes(window) == listed
