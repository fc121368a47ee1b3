"""Built schedules equal those of torch with the same name."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from meshwright.schedule.pipeline.actions import Action, Kind
from meshwright.schedule.pipeline.build import build_schedule

OURS = {"F": (Kind.FORWARD,), "B": (Kind.BACKWARD, Kind.WEIGHT), "I": (Kind.BACKWARD,), "W": (Kind.WEIGHT,)}
"""Torch's letters of a split schedule: B is the full backward, I the input gradient."""


def convert_actions(ops, split: bool) -> tuple[tuple[Action, ...], ...]:
    """Convert torch's actions. Overlapped pairs and full backwards become separate actions."""
    rows = []
    for row in ops:
        single = [part for op in row if op is not None for part in op.sub_actions or (op,)]
        found = [
            Action(kind, part.stage_index, part.microbatch_index)
            for part in single
            for kind in OURS[part.computation_type.value]
        ]
        rows.append(tuple(a for a in found if split or a.kind is not Kind.WEIGHT))
    return tuple(rows)


@pytest.mark.parametrize(
    ("name", "torchs"), [("interleaved", "Interleaved1F1B"), ("dualpipe-v", "DualPipeV")]
)
@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 2), (2, 4), (3, 9), (4, 8), (5, 20), (8, 16)])
def test_built_schedule_equals_torchs_action_by_action(name, torchs, pp, micro_batches):
    ours = build_schedule(name, pp, micro_batches)
    assert ours.ranks == convert_actions(get_schedule_ops(torchs, pp, micro_batches), ours.split_backward)
