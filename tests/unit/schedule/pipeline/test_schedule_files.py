"""Schedule files: round trips with Meshwright and torch; errors name the line."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, get_schedule_class
from torch.distributed.pipelining.stage import PipelineStage

from meshwright.core.errors import CheckFailedError, UserError
from meshwright.schedule.pipeline.actions import Action, Kind
from meshwright.schedule.pipeline.build import build_schedule
from meshwright.schedule.pipeline.files import load_schedule, write_schedule
from meshwright.schedule.pipeline.proof import prove_schedule
from meshwright.spec.layout import SCHEDULES


def torch_schedule(name: str, pp: int, stages: int, micro_batches: int):
    """One of torch's schedules, with mocked stages and without processes."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod = 0, pp, None
    stage.num_stages = pp * stages
    make = _PipelineScheduleRuntime if name == "" else get_schedule_class(name)
    return make([stage] * stages, micro_batches)


def write_text(folder: Path, text: str) -> Path:
    """Write the text to my.csv."""
    path = folder / "my.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (3, 9)])
def test_schedule_file_round_trips(tmp_path, name, pp, micro_batches):
    schedule = build_schedule(name, pp, micro_batches)
    write_schedule(schedule, tmp_path / "my.csv")
    loaded = load_schedule(tmp_path / "my.csv")
    assert loaded.ranks == schedule.ranks
    assert loaded.stage_ranks == schedule.stage_ranks
    assert (loaded.micro_batches, loaded.split_backward) == (micro_batches, schedule.split_backward)
    assert loaded.name == "my.csv"


def test_adjacent_split_backward_is_written_as_full_backward(tmp_path):
    write_schedule(build_schedule("zb-h1", 1, 2), tmp_path / "my.csv")
    assert (tmp_path / "my.csv").read_text(encoding="utf-8") == "0F0,0B0,0F1,0B1\n"
    assert load_schedule(tmp_path / "my.csv").ranks == build_schedule("1f1b", 1, 2).ranks


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_loads_written_schedules(tmp_path, name):
    """Torch checks the order. Every action is on the same rank."""
    schedule = build_schedule(name, 4, 8)
    write_schedule(schedule, tmp_path / "my.csv")
    runtime = torch_schedule("", 4, schedule.virtual_stages, 8)
    runtime._load_csv(str(tmp_path / "my.csv"), format="compute_only")
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.stage_ranks))
    forwards = {r: [str(a) for a in row if "F" in str(a)] for r, row in runtime.pipeline_order.items()}
    assert forwards == {
        rank: [f"{a.stage}F{a.micro_batch}" for a in row if a.kind is Kind.FORWARD]
        for rank, row in enumerate(schedule.ranks)
    }


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("Interleaved1F1B", False),
        ("LoopedBFS", False),
        ("InterleavedZeroBubble", True),
        ("ZBVZeroBubble", True),
        ("DualPipeV", True),
    ],
)
def test_schedules_dumped_by_torch_are_loaded_and_proved(tmp_path, name, split):
    torchs = torch_schedule(name, 4, 2, 8)
    torchs._dump_csv(str(tmp_path / "torch.csv"), format="compute_only")
    schedule = load_schedule(tmp_path / "torch.csv")
    assert (schedule.pp, schedule.stages, schedule.micro_batches) == (4, 8, 8)
    assert schedule.split_backward is split
    assert prove_schedule(schedule).proved
    if name == "DualPipeV":
        assert schedule.ranks == build_schedule("dualpipe-v", 4, 8).ranks


def test_empty_cells_lines_and_comments_are_ignored(tmp_path):
    text = "\ufeff# two ranks\n\n0F0, ,0F1,0B0,0B1  # rank 0\n ,1F0,1B0,,1F1,1B1,\n"
    schedule = load_schedule(write_text(tmp_path, text))
    assert schedule.ranks[1] == build_schedule("1f1b", 2, 2).ranks[1]
    assert schedule.stage_ranks == (0, 1)


def test_stages_may_be_on_any_rank(tmp_path):
    text = "2F0,2B0\n0F0,1F0,3F0,3B0,1B0,0B0\n"
    schedule = load_schedule(write_text(tmp_path, text))
    assert schedule.stage_ranks == (1, 1, 0, 1)
    assert (schedule.pp, schedule.virtual_stages, schedule.stages_of(1)) == (2, 3, (0, 1, 3))


def test_full_backward_in_a_split_file_becomes_both_parts(tmp_path):
    schedule = load_schedule(write_text(tmp_path, "0F0,0F1,0B0,0I1,0W1\n"))
    assert schedule.split_backward
    b, w = Kind.BACKWARD, Kind.WEIGHT
    assert schedule.ranks[0][2:] == (Action(b, 0, 0), Action(w, 0, 0), Action(b, 0, 1), Action(w, 0, 1))


LARGE = "\n".join(f"{n}F{n},{n}B{n}" for n in range(1200))
"""Each stage has another micro-batch: few cells, and millions of missing actions."""


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("", "schedule-file", "has no actions"),
        ("# nothing\n\n", "schedule-file", "has no actions"),
        ("0F0,0X0,0B0\n", "schedule-file-cell", "my.csv:1='0X0' is not an action"),
        ("# a\n0F0,0B0,forward\n", "schedule-file-cell", "my.csv:2='forward'"),
        ("0F0,0SEND_F0,0B0\n", "schedule-file-cell", "'0SEND_F0'"),
        ("0F0,0F,0B0\n", "schedule-file-cell", "'0F'"),
        ("0F0,-1F0,0B0\n", "schedule-file-cell", "'-1F0'"),
        ("(0F0;0Q0)OVERLAP_F_B\n", "schedule-file-cell", "'(0F0;0Q0)OVERLAP_F_B'"),
        ("0F0,0B0\n\n0F1,0B1\n", "schedule-file-stage", "my.csv:3 has stage 0, which is also on line 1"),
        ("0F0,0B0\n2F0,2B0\n", "schedule-file-stage", "my.csv:2 has stage 2 and no stage 1"),
        ("0F0,0B0\n,,\n", "schedule-file-stage", "my.csv:2 has no actions"),
        ("0F1,0B1\n", "schedule-file-micro-batches", "has micro-batch 1 and no micro-batch 0"),
        ("0F0,0B0,0F999999999\n", "schedule-file-micro-batches", "no micro-batch 1;"),
        ("0F0,0F1\n", "schedule-file-backward", "only forward passes"),
        (LARGE, "schedule-size", "1,200 stages and 1,200 micro-batches"),
    ],
)
def test_invalid_schedule_file_is_refused_with_its_line(tmp_path, text, code, says):
    with pytest.raises(UserError) as refused:
        load_schedule(write_text(tmp_path, text))
    assert {problem.code for problem in refused.value.problems} == {code}
    assert says in str(refused.value.problems[0])


def test_all_invalid_cells_are_reported(tmp_path):
    with pytest.raises(UserError) as refused:
        load_schedule(write_text(tmp_path, "0F0,a\n1F0,b,c\n"))
    assert [problem.value for problem in refused.value.problems] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("0F0,0F1,0B0,0B1\n1F0,1B0\n", 2, "rank 1, F(stage 1, micro-batch 1): is missing"),
        ("0F0,0B0\n# second\n1B0,1F0\n", 3, "rank 1, B(stage 1, micro-batch 0): comes before F(stage 1"),
        ("0F0,0F0,0B0\n", 1, "rank 0, F(stage 0, micro-batch 0): occurs more than once"),
        ("0F0,0F1,0I0,0W0,0I1\n", 1, "rank 0, W(stage 0, micro-batch 1): is missing"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", 2, "rank 1, F(stage 1, micro-batch 1): waits for F(stage 0"),
    ],
)
def test_schedule_that_cannot_run_is_refused_with_line_and_action(tmp_path, text, line, says):
    with pytest.raises(CheckFailedError) as refused:
        load_schedule(write_text(tmp_path, text))
    assert {problem.code for problem in refused.value.problems} == {"schedule-not-proved"}
    lines = [str(problem) for problem in refused.value.problems]
    assert any(f"my.csv:{line} is not proved: {says}" in each for each in lines), lines


def test_unreadable_and_unwritable_files_are_refused(tmp_path):
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    for path, says in ((tmp_path / "none.csv", "No such file"), (tmp_path / "bytes.csv", "not UTF-8 text")):
        with pytest.raises(UserError) as refused:
            load_schedule(path)
        assert says in str(refused.value)
        assert refused.value.problems[0].code == "schedule-file"
    with pytest.raises(UserError) as refused:
        write_schedule(build_schedule("1f1b", 2, 2), tmp_path / "none" / "my.csv")
    assert refused.value.problems[0].code == "schedule-file"
