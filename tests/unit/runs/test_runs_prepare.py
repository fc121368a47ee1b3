"""What a resume keeps of the attempt before."""

from __future__ import annotations

from meshwright.launch.assignment import Assignment
from meshwright.plan.build import build_plan
from meshwright.plan.contract import PLAN_FILE, read_earlier_plans, write_plan
from meshwright.runs.prepare import _keep_plan


def test_a_plan_is_kept_only_if_its_attempt_has_a_generation(tmp_path, make_job):
    """An attempt that was stopped before it began would give its plan to the generation of the next one."""
    plan, _ = build_plan(make_job())
    write_plan(plan, tmp_path / PLAN_FILE)
    Assignment(str(tmp_path), "data", "checkpoints", generation=3).write()
    _keep_plan(tmp_path, generation=3)
    assert read_earlier_plans(tmp_path) == {}
    _keep_plan(tmp_path, generation=4)
    assert list(read_earlier_plans(tmp_path)) == [3]
