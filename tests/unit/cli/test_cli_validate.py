"""``meshwright validate``: tables of published runs, printed errors, pictures, and invalid tables."""

from __future__ import annotations

import csv
from xml.etree import ElementTree

import pytest

from meshwright.validation.evaluate import bundled_tables

FIGURES = {"rows", "mape", "median", "bias", "worst", "within_10pct"}


@pytest.fixture
def few(tmp_path):
    """``few(n, cells)``: the first n rows of the bundled table, with some cells of the first row changed."""

    def make(count: int, cells: dict[str, str] | None = None, name: str = "few.csv"):
        with bundled_tables()[0].open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))[:count]
        rows[0] |= cells or {}
        path = tmp_path / name
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        return path

    return make


def test_the_bundled_table_is_the_default(cli):
    ran = cli("validate", "--json")
    assert ran.status == 0
    found = ran.json
    assert len(found["rows"]) == sum(family["rows"] for family in found["families"].values()) == 1737
    bloom = found["families"]["bloom"]
    assert set(bloom["time"]) == set(bloom["memory"]) == FIGURES
    assert {"rows", "expressed", "not_expressed", "time", "memory", "tau"} <= set(bloom)
    assert set(found["totals"]) == {"all", "dense", "experts", "interval", "ranking"}
    assert found["out_of_memory"]["balanced_accuracy"] > 0.9
    row = found["rows"][0]
    assert {"id", "predicted_step_s", "step_s", "predicted_memory_gb", "memory_gb", "reason"} <= set(row)


def test_the_text_has_a_line_per_family_and_the_worst_rows(cli):
    ran = cli("validate")
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert any(line.startswith("korthikanti22 ") for line in lines)
    assert any(line.startswith("Worst rows") for line in lines)
    assert any(line.startswith("  models with experts: mean time error") for line in lines)
    assert any(line.startswith("memory limits: ") for line in lines)


def test_several_tables_are_combined(cli, few):
    ran = cli("validate", "--runs", few(3), "--runs", few(5, name="more.csv"), "--json")
    assert len(ran.json["rows"]) == 8


def test_own_rows_are_compared_with_the_intervals_of_plans(cli, few):
    assert "80% intervals of plans hold " in cli("validate", "--runs", few(24)).out
    assert "80% intervals" not in cli("validate").out


def test_a_bad_cell_is_named_and_other_rows_are_evaluated(cli, few):
    table = few(4, {"tp": "four"})
    ran = cli("validate", "--runs", table)
    assert ran.status == 0
    assert "bad cell in line 2, column tp: 'four' is not a number" in ran.err
    rows = cli("validate", "--runs", table, "--json").json["rows"]
    assert [row["expressed"] for row in rows] == [False, True, True, True]


def test_reasons_for_rows_without_a_prediction_are_counted(cli, few):
    ran = cli("validate", "--runs", few(4, {"num_gpus": "", "tp": "", "pp": "", "dp": ""}))
    assert "rows without a prediction: " in ran.out
    assert "rows without a prediction" not in cli("validate", "--runs", few(4)).out


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n"])
def test_a_file_without_the_columns_is_refused(cli, tmp_path, content):
    (tmp_path / "bad.csv").write_text(content)
    ran = cli("validate", "--runs", "bad.csv")
    assert (ran.status, ran.codes) == (2, ["validate-columns"])


def test_a_missing_file_is_refused(cli):
    ran = cli("validate", "--runs", "nowhere.csv", "--json")
    assert (ran.status, ran.codes) == (2, ["validate-unreadable"])
    assert ran.json["errors"][0]["path"] == "nowhere.csv"


def test_a_picture_has_a_point_for_each_compared_row(cli, few, tmp_path):
    ran = cli("validate", "--runs", few(16), "--picture", "out.svg", "--json")
    assert ran.status == 0
    tree = ElementTree.parse(tmp_path / "out.svg")
    texts = [text.text for text in tree.iter("{http://www.w3.org/2000/svg}text")]
    compared = [row["id"] for row in ran.json["rows"] if row["predicted_step_s"] and row["step_s"]]
    assert len(compared) == 16
    counts = [int(text.rpartition("(")[2][:-1]) for text in texts if text and text.endswith(")")]
    assert sum(counts) == len(compared), "the legend has every family with its number of points"


def test_a_picture_that_cannot_be_written_is_refused(cli, few):
    ran = cli("validate", "--runs", few(1), "--picture", "no/such/folder/out.svg")
    assert (ran.status, ran.codes) == (2, ["picture-not-written"])


def test_collectives_are_validated_by_machine(cli):
    ran = cli("validate", "--collectives")
    assert ran.status == 0
    assert "A100-SXM (NVLink3)" in ran.out
    assert "100.0% within 20%" in ran.out
    assert "V100 (NVLink2) on 5 ranks, which no ring of links connects" in " ".join(ran.out.split())
    assert cli("validate", "--collectives", "--json").json["held_out"]["rows"] == 77


def test_collectives_take_no_table_of_runs(cli, few):
    assert cli("validate", "--collectives", "--runs", few(1)).codes == ["validate-collectives"]
