"""``meshwright schedule collective`` and ``simulate collective``: text, JSON, pictures, refused arguments."""

from __future__ import annotations

import pytest

from meshwright.report import collective_plot
from meshwright.schedule.collective import proof
from meshwright.schedule.collective.proof import Proof, Violation, ViolationKind

RING = ("schedule", "collective", "--op", "all_reduce", "--algorithm", "ring", "--ranks", 5)


def test_json_has_actions_steps_bytes_and_proof(cli):
    found = cli(*RING, "--size", "1MB", "--json").json
    assert found["proved"] is True
    assert found["steps"] == 8
    assert found["bytes_per_rank"] == [1_600_000] * 5
    assert found["reduced_bytes_per_rank"] == [800_000] * 5
    assert [len(row) for row in found["actions"]] == [8] * 5
    assert found["actions"][0][0] == {
        "round": 0,
        "sends": [{"peer": 1, "start": 4, "stop": 5}],
        "receives": [{"peer": 4, "start": 3, "stop": 4, "combine": "reduce"}],
    }
    assert found["time_s"] is None


def test_text_lists_each_step(cli):
    ran = cli(*RING)
    assert ran.status == 0
    assert "step   0  0→1:4+  1→2:0+  2→3:1+  3→4:2+  4→0:3+" in ran.out
    assert "steps      8" in ran.out
    assert "1.6 x the tensor of 1 MB" in ran.out
    assert "proved     40 messages" in ran.out


def test_picture_has_every_rank_and_step(cli, tmp_path):
    assert cli(*RING, "-o", tmp_path / "ring.svg").status == 0
    drawn = (tmp_path / "ring.svg").read_text(encoding="utf-8")
    assert all(f">{name}<" in drawn for name in ("rank 4", "start", "step 7", "Σ5", "message, added"))
    assert ">step 8<" not in drawn


def test_legend_of_an_operation_without_a_reduction_names_no_sums(cli, tmp_path):
    assert cli("schedule", "collective", "--op", "all_gather", "-o", tmp_path / "all.svg").status == 0
    drawn = (tmp_path / "all.svg").read_text(encoding="utf-8")
    assert ">message, copied<" in drawn
    assert ">message, added<" not in drawn


def test_long_schedules_are_cut_in_text_and_picture(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(collective_plot, "MOST_ROUNDS", 3)
    assert cli(*RING, "-o", tmp_path / "ring.svg").status == 0
    drawn = (tmp_path / "ring.svg").read_text(encoding="utf-8")
    assert ">all_reduce by ring, 5 ranks, first 3 of 8 steps<" in drawn
    assert ">step 3<" not in drawn
    assert "and 4 more" in cli("schedule", "collective", "--ranks", 12).out


def test_cluster_gives_a_time(cli):
    flat, deep = (
        cli("schedule", "collective", "--algorithm", *options, "--ranks", 16, "--size", "64MB", "--on",
            "2x8xh100-sxm", "--json").json["time_s"]
        for options in (["ring"], ["hierarchical", "--ranks-per-node", 8])
    )  # fmt: skip
    assert deep < flat


def test_one_rank_is_empty(cli):
    found = cli("schedule", "collective", "--ranks", 1, "--json").json
    assert (found["steps"], found["actions"], found["bytes_per_rank"]) == (0, [[]], [0])


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--op", "sum"], "collective-op", "--op='sum' is not a collective operation. Use broadcast"),
        (["--algorithm", "star"], "collective-algorithm", "--algorithm='star'"),
        (
            ["--algorithm", "tree", "--op", "all_gather"],
            "collective-pair",
            "Use naive, ring, recursive_doubling",
        ),
        (["--ranks", 0], "collective-ranks", "--ranks=0 is too few"),
        (["--root", 1], "collective-root", "--root=1 does not fit all_reduce"),
        (["--algorithm", "hierarchical"], "collective-groups", "--ranks-per-node is missing"),
        (["--order", "0,1,2"], "collective-order", "is not an order"),
        (["--order", "a,b"], "collective-numbers", "For example 0,2,1,3"),
        (["--size", "3q"], "collective-size", "--size='3q'"),
        (["--segments", 3], "collective-segments", "--segments=3"),
        (["--ranks", 9, "--on", "1x8xh100-sxm"], "collective-cluster", "has 8 devices"),
        (["--ranks", 40, "-o", "x.svg"], "collective-picture", "32 at most"),
        (["-o", "x.txt"], "picture-kind", "is not a picture"),
        (["--on", "nowhere"], "cluster-unknown-preset", "nowhere"),
    ],
)
def test_bad_arguments_are_refused(cli, arguments, code, says):
    ran = cli("schedule", "collective", *arguments)
    assert ran.status == 2
    assert f"[{code}]" in ran.err
    assert says in " ".join(ran.err.split())


def test_failed_proof_exits_3_with_rank_and_step(cli, monkeypatch):
    bad = Proof((Violation(ViolationKind.DOUBLED, 2, 3, "counts twice"),), 4, 8)
    monkeypatch.setattr(proof, "prove_collective", lambda schedule: bad)
    ran = cli(*RING)
    assert ran.status == 3
    assert "rank 2, step 3: counts twice. [collective-not-proved]" in ran.err


def test_comparison_as_table_picture_and_json(cli, tmp_path):
    arguments = ("simulate", "collective", "--on", "2x8xh100-sxm", "--ranks", "8,16", "--sizes", "1KiB,256MB")
    found = cli(*arguments, "--json", "-o", tmp_path / "wins.svg").json
    assert [(row["ranks"], row["size_bytes"]) for row in found["fastest"]] == [
        (8, 1024),
        (8, 256_000_000),
        (16, 1024),
        (16, 256_000_000),
    ]
    assert found["fastest"][-1]["algorithm"] == "hierarchical"
    assert ">hierarchical<" in (tmp_path / "wins.svg").read_text(encoding="utf-8")
    assert "Fastest algorithm of all_reduce on 2x8xh100-sxm" in cli(*arguments).out


def test_comparison_refuses_more_ranks_than_devices(cli):
    ran = cli("simulate", "collective", "--on", "1x8xh100-sxm", "--ranks", "16")
    assert ran.status == 2
    assert "--ranks=16 must be 2 to 8" in ran.err
