"""``plan`` and ``schema``, and behaviour common to all commands: exit status, ``--json``, error codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.output import Output
from meshwright.plan.contract import read_plan

EXAMPLES = Path(__file__).parents[3] / "examples"
LOCAL = ("cluster.preset=local", "cluster.device=cpu", "cluster.devices_per_node=8")
"""Eight CPU ranks."""
SMALL = ("data.seq_len=32", "train.global_batch=8")
QUICK_PRESETS = ("llama3-70b", "mpt-7b", "resnet50", "tiny")
"""The matrix of the planner (``test_plan_matrix``) has all presets, on one device too."""


# plan


@pytest.mark.parametrize("preset", ["tiny", "demo-2m", "llama3.2-1b"])
def test_planning_a_preset_shows_ledger_reasons_and_collectives(cli, preset):
    ran = cli("plan", preset, "--on", "8xh100-sxm", "-v")
    assert ran.status == 0
    assert ran.err == ""
    for words in (
        preset,
        "parameters on",
        "  step    ",
        "Memory of every rank",
        "peak, steady step",
        "peak, first step",
        "limited by the ",
        "Collectives per rank",
        "micro_batch=",
    ):
        assert words in ran.out
    assert "Layouts, recommended first" in ran.out


def test_plan_reports_settings_without_effect_as_text_and_as_json(cli):
    given = (*LOCAL, *SMALL, "layout.tp=2", "compression.kind=bf16")
    assert "warning: compression.kind=bf16 has no effect: " in cli("plan", "tiny", *given).err
    (unused,) = cli("plan", "tiny", *given, "--json").json["layouts"][0]["unused_settings"]
    assert (unused["key"], unused["value"]) == ("compression.kind", "bf16")
    assert cli("plan", "tiny", *given[:-1], "--json").json["layouts"][0]["unused_settings"] == []
    two = (*given[:-2], given[-1], "cluster.devices_per_node=2")
    assert "compression.kind" in cli("plan", "tiny", *two, "--why", "layout.tp=2").err


@pytest.mark.parametrize("preset", QUICK_PRESETS)
def test_a_preset_is_planned_or_refused_with_a_reason(cli, preset):
    ran = cli("plan", preset, "--on", "h200-sxm", "--json", "--top", "1")
    assert ran.status in (0, 2)
    assert ran.codes == ([] if ran.status == 0 else ["plan-nothing-fits"])
    if ran.status == 2:
        assert "Use " in ran.json["errors"][0]["fix"]


def test_a_pipeline_plan_shows_stages_bubble_and_memory_of_each_pp_rank(cli, tmp_path):
    """The breakdown is that of the rank with the highest need. The other rank is listed with its total."""
    given = (*LOCAL, *SMALL, "layout.pp=2", "model.num_layers=5", "layout.stage_layers=[3,2]")
    picture = tmp_path / "plan.svg"
    ran = cli("plan", "tiny", *given, "--picture", str(picture), "-v")
    assert ran.status == 0, ran.err
    for words in ("layers per stage 3, 2: given in the job", "bubble", "0 to 2 (3)", "3 to 4 (2)"):
        assert words in ran.out
    for words in ("Memory of stage 0 (rank 0)", "needed by the other ranks: stage 1 (rank 1) ", "pp rank"):
        assert words in ran.out
    drawn = picture.read_text()
    assert "stage 1" in drawn
    assert "Pipeline of the recommended layout, simulated" in drawn
    found = cli("plan", "tiny", *given, "--json").json["layouts"][0]
    assert set(found["memory_bytes"]) == {"stage 0 (rank 0)", "stage 1 (rank 1)"}
    assert "bubble" in found["breakdown_s"]


def test_plan_json_is_one_object_with_the_documented_keys(cli, good):
    ran = cli("plan", good, *LOCAL, "--json")
    assert ran.status == 0
    found = ran.json
    assert set(found) >= {
        "evaluated",
        "pruned",
        "illegal",
        "may_fit",
        "checked",
        "fit",
        "search_s",
        "layouts",
    }
    assert found["evaluated"] >= found["may_fit"] >= found["fit"] >= len(found["layouts"]) == 50
    assert not found["stopped_early"]
    assert found["usable_share"] == 0.97
    first, *rest = [layout["step_s"] for layout in found["layouts"]]
    assert rest == sorted(rest), "best first, after the recommended one"
    assert first <= rest[0] * 1.1
    for layout in found["layouts"]:
        assert layout["fits"]
        assert layout["exact"]
        assert layout["reasons"]
        assert layout["needed_bytes"] <= found["usable_bytes"]
        for rank in layout["memory_bytes"].values():
            assert rank["needed"] >= max(rank["peak"], rank["first_step"])


def test_with_json_the_text_goes_to_standard_error(cli, good):
    ran = cli("plan", good, *LOCAL, "--json")
    assert ran.err.startswith("good fits: ")
    assert "good fits: " not in ran.out


def test_a_plan_with_more_ranks_than_devices_names_both_counts(cli, good):
    """Ranks may share devices."""
    few = ("cluster.preset=local", "cluster.device=cpu", "cluster.devices_per_node=2")
    shown = cli("plan", good, *few, "layout.mode=given", "layout.dp_replicate=4").out
    assert "in 4 ranks on 2 devices" in shown
    assert "on 1 of 2 devices" in cli("plan", good, *few, "layout.mode=given", "layout.dp_replicate=1").out


def test_top_limits_the_layouts(cli, good):
    assert len(cli("plan", good, "--json", "--top", "3").json["layouts"]) == 3


def test_a_plan_written_with_o_can_be_read_and_planned_again(cli, good, tmp_path):
    ran = cli("plan", good, "-o", "plan.toml", "layout.dp_replicate=2")
    assert ran.status == 0
    assert "plan: plan.toml" in ran.out
    assert read_plan(tmp_path / "plan.toml").world_size == 2
    again = cli("plan", "plan.toml", "--json")
    assert again.status == 0
    assert again.json["layouts"][0]["layout"]["dp_replicate"] == 2


def test_train_refuses_a_plan_whose_layout_does_not_run_and_names_the_nearest(cli, good, tmp_path):
    """`plan` may write a layout that `train` refuses. No process starts and no file is written."""
    assert cli("plan", good, "-o", "plan.toml", "layout.dp_replicate=2").status == 0
    path = tmp_path / "plan.toml"
    path.write_text(path.read_text().replace('\noffload = "none"\n', '\noffload = "all"\n'))
    assert read_plan(path, to_run=False).job.layout.offload == "all"
    ran = cli("train", "plan.toml", "--json")
    assert (ran.status, ran.codes) == (2, ["layout-offload-not-built"])
    assert ran.json["notes"][0].startswith("nearest layout that runs: layout.dp_replicate=2 ")
    assert not (tmp_path / "runs").exists()


def test_an_ep_that_does_not_divide_the_experts_is_refused_with_a_nearest_layout(cli, tmp_path):
    ran = cli("train", str(EXAMPLES / "moe-quickstart.toml"), "layout.dp_shard=3", "layout.ep=3", "--json")
    assert (ran.status, ran.codes) == (2, ["layout-ep-experts"])
    assert ran.json["notes"][0].startswith("nearest layout that runs: layout.dp_shard=3 ")
    assert not (tmp_path / "runs").exists()


def test_a_plan_that_cannot_be_written_exits_with_a_code(cli, good):
    assert cli("plan", good, "-o", "gone/plan.toml").codes == ["plan-not-writable"]


def test_nothing_fits_exits_2_with_the_need_and_writes_no_plan(monkeypatch, cli, tmp_path):
    monkeypatch.setattr("meshwright.plan.search.failure.SUGGEST_S", 30.0)  # the machine may be busy
    monkeypatch.setattr("meshwright.plan.search.failure.TRY_S", 10.0)
    small = ("--on", "8xh100-sxm", "cluster.memory_bytes=60000000000")
    ran = cli("plan", "llama3-405b", *small, "-o", "plan.toml", "--json")
    assert ran.status == 2
    assert ran.codes == ["plan-nothing-fits"]
    (error,) = ran.json["errors"]
    assert error["code"] == "plan-nothing-fits"
    assert "The closest is" in error["message"]
    assert "offloaded state needs" in error["message"], "with all state offloaded the CPU memory is too small"
    assert "cluster.nodes=" in error["fix"]
    assert list(tmp_path.glob("plan*")) == []


def test_overrides_and_on_are_applied_to_the_plan(cli, good):
    ran = cli(
        "plan", good, "model.num_layers=1", "--on", "2x2xa100-80g-sxm", "layout.dp_replicate=4", "--json"
    )
    (layout,) = ran.json["layouts"]
    assert layout["layout"]["dp_replicate"] == 4
    assert "4 of 4 devices" in ran.err


# Nearest legal layout


@pytest.mark.parametrize(
    "override",
    [
        "layout.cp=3",
        "layout.tp=3",
        "layout.dp_replicate=9",
    ],
)
def test_an_illegal_layout_names_the_nearest_legal_one_with_its_prediction(cli, good, override):
    ran = cli("train", good, override, "--json")
    assert ran.status == 2
    assert all(code.startswith("layout-") for code in ran.codes)
    note = ran.json["notes"][0]
    ranks = min(int(override.partition("=")[2]), 8)
    assert note.startswith(f"nearest layout that runs: layout.dp_replicate={ranks} layout.micro_batch=")
    assert "/step, " in note
    assert note.endswith("B per rank)")
    assert note in ran.err


def test_the_nearest_layout_is_accepted_by_plan(cli, good):
    note = cli("train", good, "layout.cp=3", "--json").json["notes"][0]
    overrides = note.removeprefix("nearest layout that runs: ").partition(" (")[0].split()
    assert cli("plan", good, *overrides).status == 0


def test_the_nearest_layout_can_be_appended_to_the_refused_command(cli, good):
    """Its overrides name every key that must change, defaults included, and keep the others."""
    asked = ("layout.cp=3", "layout.context=ulysses", "layout.recompute=full")
    ran = cli("train", good, *asked, "--json")
    near = ran.json["nearest"][0]
    assert near["runs"]
    assert near["layout"] in ran.json["notes"][0]
    assert near["step_s"] > 0
    assert near["needed_bytes"] > 0
    assert near["fits"]
    again = cli("plan", good, *asked, *near["layout"].split(), "--json")
    assert again.status == 0, again.err
    chosen = again.json["layouts"][0]["layout"]
    assert (chosen["cp"], chosen["context"], chosen["recompute"]) == (1, "ring", "full")
    asked = ("layout.dp_replicate=2", "layout.recompute=selective")
    (changed,) = cli("plan", "resnet-tiny", *asked, "--json").json["notes"]
    assert " layout.recompute=none (" in changed


def test_a_setting_that_needs_another_layout_names_that_layout(cli, good):
    """The refused key is train.optimizer. Muon needs unsharded parameters."""
    ran = cli("train", good, "layout.dp_shard=2", "train.optimizer=muon", "--json")
    assert ran.codes == ["train-muon-not-built"]
    (near,) = ran.json["nearest"]
    assert near["layout"].startswith("layout.dp_replicate=2 ")
    assert cli("plan", good, "layout.dp_shard=2", "train.optimizer=muon", *near["layout"].split()).status == 0


def test_an_error_that_no_layout_fixes_names_no_layout(cli, good):
    ran = cli("train", good, "train.beta1=0.9", "train.optimizer=sgd", "--json")
    assert "nearest" not in ran.json


def test_the_nearest_layout_reduces_a_micro_batch_that_is_too_large(cli, good):
    notes = cli("train", good, "layout.cp=3", "layout.micro_batch=8", "--json").json["notes"]
    assert notes[0].startswith("nearest layout that runs: layout.dp_replicate=3 layout.micro_batch=3 ")


def test_a_nearest_layout_that_does_not_fit_is_marked(cli):
    ran = cli("plan", "llama3-70b", "--on", "8xh100-sxm", "layout.dp_replicate=9")
    assert "nearest layout that runs: layout.dp_replicate=8" in ran.err
    assert "; does not fit: first step needs " in ran.err


def test_an_incomplete_job_gets_no_nearest_layout(cli, tmp_path):
    """A prediction from placeholder values would be wrong."""
    (tmp_path / "half.toml").write_text(
        '[model]\npreset = "tiny"\n[cluster]\npreset = "h100-sxm"\n[layout]\ntp = 2\n'
    )
    ran = cli("plan", "half.toml", "--json")
    assert ran.status == 2
    assert ran.json["notes"] == []


def test_an_error_outside_the_layout_gets_no_nearest_layout(cli, good):
    assert cli("plan", good, "train.steps=0", "--json").json["notes"] == []


# Errors


def test_all_errors_are_reported_at_once_with_one_line_each(cli, good):
    ran = cli("plan", good, "train.stepps=4", "train.lr=[]", "layout.tp=3", "data.seq_len=0")
    assert ran.status == 2
    assert sorted(ran.codes) == ["job-out-of-range", "job-unknown-key", "job-wrong-type", "layout-tp-heads"]
    assert ran.out == ""


def test_an_error_is_one_json_object_with_every_problem(cli, good):
    ran = cli("plan", good, "train.steps=0", "train.precision=bf61", "--json")
    assert ran.status == 2
    found = ran.json
    assert found["status"] == "error"
    assert {(e["code"], e["path"]) for e in found["errors"]} == {
        ("job-out-of-range", "train.steps"),
        ("job-not-a-choice", "train.precision"),
    }
    assert all(e["message"].endswith(f"[{e['code']}]") for e in found["errors"])


def test_an_error_line_is_not_wrapped_in_a_narrow_terminal(cli, good):
    ran = cli("plan", good, "cluster.preset=h100")
    (line,) = [text for text in ran.err.splitlines() if text]
    assert len(line) > 80
    assert line.endswith("[cluster-unknown-preset]")


def test_square_brackets_in_a_value_are_printed_literally(cli):
    ran = cli("plan", "[bold]gone[/bold].toml")
    assert "[bold]gone[/bold].toml" in ran.err
    assert ran.codes == ["job-missing-file"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "tiny", "--nope"),
        ("plan",),
        ("plan", "tiny", "--top", "0"),
        ("plan", "tiny", "--top", "many"),
        ("fly",),
        ("audit",),
        ("generate", "run", "--temperature", "-1"),
        ("schema", "extra"),
        ("--nope",),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_exits_2_with_usage_and_a_code(cli, arguments):
    ran = cli(*arguments)
    assert ran.status == 2
    assert ran.codes == ["cli-usage"]
    assert ran.err.startswith("Usage: ")
    assert ran.out == ""


def test_a_wrong_command_line_with_json_prints_an_object(cli):
    ran = cli("plan", "tiny", "--nope", "--json")
    assert ran.status == 2
    assert ran.json["errors"][0]["code"] == "cli-usage"


def test_a_command_line_without_arguments_shows_the_help(cli):
    ran = cli()
    assert "Commands:" in ran.out + ran.err
    assert "error:" not in ran.err


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_exits_0(cli, option):
    ran = cli(option)
    assert ran.status == 0
    assert "Commands:" in ran.out


def test_version_exits_0_and_prints_one_line(cli):
    ran = cli("--version")
    assert ran.status == 0
    assert ran.out.startswith("meshwright ")
    assert ran.out.count("\n") == 1


def test_nonfinite_losses_are_written_as_strict_json(cli, capsys):
    """The output of a diverged run must be readable by every JSON parser."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    Output(as_json=True).result({"losses": [1.0, float("nan"), float("inf")]})
    json.loads(capsys.readouterr().out, parse_constant=refuse)


# schema


def test_schema_is_json_and_the_same_with_and_without_the_flag(cli):
    text, as_json = cli("schema"), cli("schema", "--json")
    assert text.status == as_json.status == 0
    assert json.loads(text.out) == as_json.json
    assert "layout" in as_json.json["properties"]


# Without torch


BLOCKED = (
    "import sys\n"
    "for name in ('torch', 'tokenizers', 'safetensors', 'transformers'): sys.modules[name] = None\n"
    "from meshwright.cli import main\n"
    "sys.argv = ['meshwright', *sys.argv[1:]]\n"
    "main()\n"
)


def without_torch(tmp_path, *arguments):
    command = [sys.executable, "-W", "error", "-c", BLOCKED, *map(str, arguments)]
    return subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ), check=False
    )


def test_planning_works_without_torch(tmp_path):
    asked = ("plan", "tiny", *SMALL, "--on", "2xh100-sxm", "-o", "plan.toml", "--json")
    ran = without_torch(tmp_path, *asked)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["fit"] >= 2
    assert read_plan(tmp_path / "plan.toml", to_run=False).job.name == "tiny"


def test_training_without_torch_names_the_extra(tmp_path, good):
    ran = without_torch(tmp_path, "train", good, "--json")
    assert ran.returncode == 2, ran.stderr
    (error,) = json.loads(ran.stdout)["errors"]
    assert error["code"] == "install-missing-extra"
    assert "meshwright[run]" in error["fix"]


NODES = (
    "cluster.nodes=2",
    "cluster.devices_per_node=2",
    "cluster.nic_bytes_per_s=1e6",
    "cluster.nic_latency_s=1e-5",
)


def test_placement_has_its_reason_and_the_ranks_of_each_node(cli, job_file):
    """Few tokens per step: replicas are on one node."""
    layout = ("layout.tp=2", "layout.dp_replicate=2", "train.global_batch=2")
    shown = cli("plan", job_file, *NODES, *layout, "-v").out
    assert "ranks are not placed in rank order: dp_replicate inside nodes, tp between nodes" in shown
    rows = shown.partition("Placement\n")[2].splitlines()
    assert [row.split() for row in rows[1:3]] == [["0", "0,", "2"], ["1", "1,", "3"]]
    found = cli("plan", job_file, *NODES, *layout, "--json").json["layouts"][0]
    assert found["placement"] == [[0, 0], [1, 0], [0, 1], [1, 1]]
    ordered = cli("plan", job_file, *NODES, *layout, "layout.placement=rank-order", "-v")
    assert "placement: rank order, 2 slots per node" in ordered.out
