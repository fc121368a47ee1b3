"""``meshwright schedule pipeline``: timeline as text, JSON and picture; arguments that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.schedule.pipeline import proof
from meshwright.schedule.pipeline.proof import Proof, Violation, ViolationKind
from meshwright.spec.layout import SCHEDULES

FIGURES = Path(__file__).parents[3] / "docs" / "figures"


def test_json_has_proof_bubble_peaks_and_actions(cli):
    found = cli(
        "schedule", "pipeline", "--schedule", "1f1b", "--stages", 4, "--micro-batches", 8, "--json"
    ).json
    assert found["proved"] is True
    assert found["bubble"] == pytest.approx(3 / 11)
    assert found["peak_in_flight"] == [4, 3, 2, 1]
    assert [len(row) for row in found["actions"]] == [16] * 4
    assert found["actions"][0][0] == {"kind": "F", "stage": 0, "micro_batch": 0, "start": 0.0, "end": 1.0}
    assert found["makespan"] == found["predicted_makespan"] == 33


def test_json_has_work_idle_time_and_peaks_of_each_rank(cli):
    found = cli("schedule", "pipeline", "--stages", 2, "--micro-batches", 3, "--forward", "1,2", "--backward",
                "1+1,2+2", "--transfer", "0.5", "--json").json  # fmt: skip
    assert found["stage_ranks"] == [0, 1]
    assert found["split_backward"] is False
    assert found["work"] == [9, 18]
    assert found["idle"] == [found["makespan"] - 9, found["makespan"] - 18]
    assert found["bubble"] == pytest.approx(sum(found["idle"]) / (2 * found["makespan"]))
    assert found["peak_by_stage"] == [2, 1]


def test_a_saved_schedule_gives_the_same_results_when_loaded(cli, tmp_path):
    saved = cli(
        "schedule", "pipeline", "--schedule", "dualpipe-v", "--save", tmp_path / "my.csv", "--json"
    ).json
    assert saved["saved"] == str(tmp_path / "my.csv")
    loaded = cli("schedule", "pipeline", "--file", tmp_path / "my.csv", "--json").json
    assert loaded["schedule"] == "my.csv"
    assert loaded["predicted_makespan"] is None, "a schedule file has no closed form"
    for key in ("actions", "bubble", "makespan", "idle", "peak_in_flight", "stage_ranks", "proved"):
        assert loaded[key] == saved[key]


def test_a_schedule_file_may_have_any_number_of_stages_per_rank(cli, tmp_path):
    (tmp_path / "my.csv").write_text("2F0,2B0\n0F0,1F0,3F0,3B0,1B0,0B0\n", encoding="utf-8")
    ran = cli("schedule", "pipeline", "--file", tmp_path / "my.csv", "--forward", "1,1,2,1")
    assert ran.status == 0
    assert "my.csv, 4 stages on 2 ranks, 1 micro-batches" in ran.out
    assert "F0a F0b · · F0c" in " ".join(ran.out.split())
    assert "idle       69.2% 30.8%" in ran.out


def test_a_schedule_file_that_cannot_run_exits_3_with_line_and_action(cli, tmp_path):
    (tmp_path / "my.csv").write_text("# mine\n0F0,0B0\n1B0,1F0\n", encoding="utf-8")
    ran = cli("schedule", "pipeline", "--file", tmp_path / "my.csv")
    assert ran.status == 3
    assert set(ran.codes) == {"schedule-not-proved"}
    assert "my.csv:3 is not proved: rank 1, B(stage 1, micro-batch 0): comes before F(stage 1" in ran.err


def test_the_text_timeline_has_a_row_per_rank_and_a_cell_per_action(cli):
    ran = cli("schedule", "pipeline", "--stages", 2, "--micro-batches", 2)
    assert ran.status == 0
    rows = [line for line in ran.out.splitlines() if line.startswith("rank ")]
    assert rows[0].split() == ["rank", "0", "F0", "F1", "·", "·", "B0───", "·", "B1───"]
    assert rows[1].split() == ["rank", "1", "·", "F0", "B0───", "F1", "B1───"]
    assert "bubble     33.3%" in ran.out
    assert "in flight  2 1" in ran.out
    assert "proved     8 actions" in ran.out


def test_a_wide_text_timeline_is_shortened_with_a_note(cli):
    ran = cli("schedule", "pipeline", "--micro-batches", 64)
    rows = [line for line in ran.out.splitlines() if line.startswith("rank ")]
    assert all(len(row) <= 140 for row in rows)
    assert "more characters to the right; -o picture.svg has all" in ran.out


def test_uneven_stages_are_simulated_and_have_no_closed_form(cli):
    ran = cli("schedule", "pipeline", "--stages", 2, "--micro-batches", 1, "--forward", "1,3", "--backward",
              "2,1.5+0.5", "--transfer", "0.25", "--json").json  # fmt: skip
    assert ran["makespan"] == 1 + 0.25 + 3 + 2 + 0.25 + 2
    assert ran["predicted_makespan"] is None


def test_blocking_sends_lengthen_the_makespan(cli):
    common = ("schedule", "pipeline", "--schedule", "gpipe", "--transfer", "0.5", "--json")
    free, blocked = cli(*common).json, cli(*common, "--blocking").json
    assert blocked["makespan"] > free["makespan"]
    assert blocked["makespan"] == pytest.approx(blocked["predicted_makespan"])


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("PNG", b"\x89PNG"), ("pdf", b"%PDF")])
def test_the_picture_may_be_svg_png_or_pdf(cli, tmp_path, suffix, start):
    assert cli("schedule", "pipeline", "-o", tmp_path / f"p.{suffix}").status == 0
    assert (tmp_path / f"p.{suffix}").read_bytes().startswith(start)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_figures_of_the_documentation_are_up_to_date(cli, tmp_path, name):
    cli("schedule", "pipeline", "--schedule", name, "-o", tmp_path / "now.svg")
    committed = (FIGURES / f"schedule-{name}.svg").read_text(encoding="utf-8")
    assert (tmp_path / "now.svg").read_text(encoding="utf-8") == committed


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--schedule", "dualpipe-v", "--micro-batches", 7), "schedule-micro-batches"),
        (("--schedule", "ring"), "schedule-unknown"),
        (("--schedule", "interleaved", "--micro-batches", 6), "schedule-micro-batches"),
        (("--virtual-stages", 2), "schedule-virtual-stages"),
        (("--stages", 0), "schedule-size"),
        (("--micro-batches", 10**9), "schedule-size"),
        (("--forward", "1,2"), "schedule-times"),
        (("--forward", "-1"), "schedule-times"),
        (("--forward", "1+1"), "schedule-times"),
        (("--backward", "nan"), "schedule-times"),
        (("--transfer", "fast"), "schedule-times"),
        (("-o", "nowhere/picture.svg"), "picture-not-written"),
        (("-o", "picture.jpg"), "picture-kind"),
        (("--save", "nowhere/my.csv"), "schedule-file"),
        (("--file", "nowhere.csv"), "schedule-file"),
        (("--file", "nowhere.csv", "--stages", 4), "schedule-file-and-sizes"),
        (("--file", "nowhere.csv", "--schedule", "1f1b"), "schedule-file-and-sizes"),
        (("--micro-batches", 4000, "-o", "large.svg"), "picture-too-large"),
    ],
)
def test_bad_arguments_are_refused_with_codes(cli, arguments, code):
    ran = cli("schedule", "pipeline", *arguments, "--json")
    assert ran.status == 2
    assert ran.codes == [code]
    assert ran.json["errors"][0]["code"] == code


def test_a_schedule_that_fails_its_proof_exits_3_with_every_violation(cli, monkeypatch):
    """Every generated schedule passes its proof, so the proof is replaced."""

    def refuse(schedule) -> Proof:
        action = schedule.ranks[1][0]
        return Proof((Violation(ViolationKind.DEADLOCK, 1, action, "waits"),), 0, (0,), (0,))

    monkeypatch.setattr(proof, "prove_schedule", refuse)
    ran = cli("schedule", "pipeline")
    assert ran.status == 3
    assert ran.codes == ["schedule-not-proved"]
    assert "rank 1, F(stage 1, micro-batch 0): waits" in ran.err
