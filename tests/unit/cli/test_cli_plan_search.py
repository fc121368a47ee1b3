"""``plan`` for decoders: the search, ``--why``, ``--by``, cluster sizing, pictures, invalid arguments."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshwright.cli.plan import parse_duration
from meshwright.cli.plan_text import shorten_reasons
from meshwright.core.errors import UserError
from meshwright.plan.contract import read_plan
from meshwright.plan.search.find import CHECKED, find_layouts, no_progress
from meshwright.spec.load import load_job

SMALL = ("data.seq_len=512", "train.global_batch=32")
ON = ("--on", "2x4xh100-sxm")
LLAMA = ("plan", "llama3-8b", *SMALL, *ON)


@pytest.fixture(scope="module", autouse=True)
def _equal_searches_run_once():
    """Most tests look at the same search: a search with equal arguments is run once."""
    found = {}

    def find(job, pins, top=CHECKED, objective="time", progress=no_progress, worlds=None, budget_s=None):
        key = repr((job, pins, top, objective, worlds, budget_s))
        if key not in found:
            found[key] = find_layouts(job, pins, top, objective, progress, worlds, budget_s)
        return dataclasses.replace(found[key], best=list(found[key].best))

    with pytest.MonkeyPatch.context() as patch:
        for module in ("meshwright.runs.explain", "meshwright.plan.search.planner"):
            patch.setattr(f"{module}.find_layouts", find)
        yield


# The search


def test_the_first_lines_answer_and_the_reasons_are_at_most_twelve(cli):
    """Fits, layout, step with its interval, memory of the usable, cost; tables only with -v."""
    ran = cli(*LLAMA)
    fits, layout, step, memory, cost, blank, *reasons, more = ran.out.splitlines()
    assert fits == "llama3-8b fits: 8.03 G parameters on 8 of 8 devices (H100-80GB-SXM, h100-sxm)"
    assert re.fullmatch(r"  layout  .*micro_batch=\d+", layout)
    assert re.fullmatch(r"  step    \S+ m?s \(\S+ m?s to \S+ m?s\), \S+ tok/s, MFU \S+%", step)
    assert re.fullmatch(
        r"  memory  \S+ GB of 77.6 GB per device \(upper bound: compiled blocks need less\)", memory
    )
    assert re.fullmatch(r"  cost    24.00 USD/h, \S+ USD per billion tokens", cost)
    assert blank == ""
    assert 1 < len(reasons) <= 12
    assert more.startswith("  -v: ")


def test_rejected_layouts_are_the_first_reasons_to_be_left_out():
    reasons = ["best", *(f"rejected {n}" for n in range(20)), "warning: long"]
    shown = shorten_reasons(reasons)
    assert len(shown) == 12
    assert shown == ["best", *(f"rejected {n}" for n in range(10)), "warning: long"]
    assert shorten_reasons(["note"] * 15) == ["note"] * 12


def test_only_layouts_that_train_can_run_are_ranked(cli):
    """Layouts that are not built are planned when they are named, and never recommended."""
    layouts = cli(*LLAMA, "--json").json["layouts"]
    for entry in layouts:
        keys = [f"layout.{k}={str(v).lower()}" for k, v in entry["layout"].items() if k != "stage_layers"]
        load_job("llama3-8b", [*SMALL, *keys], "2x4xh100-sxm", to_run=True)


def test_plan_shows_memory_step_time_collectives_reasons_and_a_table(cli):
    ran = cli(*LLAMA, "-v")
    assert ran.status == 0
    assert ran.err == ""
    for words in (
        "8.03 G parameters on 8 of 8 devices",
        " checked layouts that fit",
        "  rejected tp=",
        "interval: ",
        "overrides: layout.",
        "peak, steady step",
        "peak, first step",
        "allocator",
        "usable: 97% of 80 GB, 77.6 GB",
        "Step time",
        "Collectives per rank and phase",
        "Layouts, recommended first",
        "layouts evaluated in",
    ):
        assert words in ran.out, words


def test_json_has_the_keys_and_counts_of_the_search(cli):
    found = cli(*LLAMA, "--json").json
    assert found["evaluated"] >= found["fit"] >= len(found["layouts"]) == 50
    assert found["pruned"] > 0
    assert found["illegal"] > 0
    first, *rest = [layout["step_s"] for layout in found["layouts"]]
    assert rest == sorted(rest)
    assert first <= rest[0] * 1.01, "the simplest within 1% of the shortest step is recommended"
    for layout in found["layouts"]:
        assert layout["step_s_low"] <= layout["step_s"] <= layout["step_s_high"]
        assert sum(layout["breakdown_s"].values()) == pytest.approx(layout["step_s"])
        assert 0 < layout["mfu"] < 1
        assert layout["reasons"]
        assert ("bubble" in layout) == (layout["layout"]["pp"] > 1)
        needs = [rank["needed"] for rank in layout["memory_bytes"].values()]
        assert layout["needed_bytes"] == max(needs) <= found["usable_bytes"] == 77.6e9
        assert layout["exact"]


def test_the_best_layout_has_the_same_prediction_if_given(cli):
    best = cli(*LLAMA, "--json", "--top", "1").json["layouts"][0]
    settled = ("mode", "bucket_mb", "stage_layers")
    keys = [f"layout.{k}={str(v).lower()}" for k, v in best["layout"].items() if k not in settled]
    (again,) = cli(*LLAMA, *keys, "--json").json["layouts"]
    assert again["layout"] == best["layout"], "layers per stage included"
    assert again["step_s"] == best["step_s"]
    assert again["memory_bytes"] == best["memory_bytes"]
    assert again["collectives"] == best["collectives"]


@pytest.mark.parametrize(
    ("by", "key"),
    [("time", "step_s"), ("cost", "device_s"), pytest.param("memory", "needed", marks=pytest.mark.slow)],
)
def test_the_ranking_can_be_by_time_cost_or_memory(cli, by, key):
    layouts = cli(*LLAMA, "--by", by, "--top", "12", "--json").json["layouts"]

    def value(entry):
        if key == "needed":
            return entry["needed_bytes"]
        degrees = entry["layout"]
        world = degrees["pp"] * degrees["dp_replicate"] * degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
        return entry["step_s"] * (world if key == "device_s" else 1)

    first, *rest = [value(entry) for entry in layouts]
    assert rest == sorted(rest)
    assert first <= rest[0] * (1 if by == "memory" else 1.01)


def test_given_layout_keys_that_are_not_degrees_are_kept(cli):
    layouts = cli(*LLAMA, "layout.recompute=full", "layout.micro_batch=2", "--top", "8", "--json").json[
        "layouts"
    ]
    assert {(e["layout"]["recompute"], e["layout"]["micro_batch"]) for e in layouts} == {("full", 2)}
    named = cli(*LLAMA, "layout.recompute=none", "--top", "8", "--json").json["layouts"]
    assert {e["layout"]["recompute"] for e in named} == {"none"}, "a given default is kept, too"


def test_a_given_layout_is_the_only_one_evaluated(cli):
    found = cli(*LLAMA, "layout.tp=4", "layout.dp_shard=2", "--json").json
    (layout,) = found["layouts"]
    assert (found["evaluated"], layout["layout"]["tp"], layout["layout"]["zero"]) == (1, 4, 3)
    assert "given in the job" in layout["reasons"][0]


def test_a_moe_model_is_planned(cli):
    found = cli("plan", "mixtral-8x7b", *SMALL, "--on", "2x8xh100-sxm", "--top", "3", "--json").json
    assert found["fit"] > 0


def test_a_layout_that_is_not_built_is_planned_and_refused_by_train(cli, tmp_path):
    ran = cli(*LLAMA, "layout.tp=8", "layout.offload=all", "-o", "plan.toml")
    assert ran.status == 0
    assert "plan only" in ran.out
    plan = read_plan(tmp_path / "plan.toml", to_run=False)
    assert not plan.exact
    assert plan.world_size == 8
    refused = cli("train", "plan.toml")
    assert refused.status == 2
    assert "layout-offload-not-built" in refused.codes


def test_a_layout_that_runs_has_an_exact_plan(cli, tmp_path):
    ran = cli(
        "plan", "tiny", "data.seq_len=32", "train.global_batch=8", "--on", "h100-sxm", "-o", "plan.toml"
    )
    assert ran.status == 0
    ran = cli("plan", "tiny", *SMALL, "--on", "1xh100-sxm", "-o", "plan.toml")
    plan = read_plan(tmp_path / "plan.toml")
    assert plan.exact
    assert len(plan.ranks) == plan.world_size == 1
    assert plan.ranks[0].state_bytes["parameters"] == 4 * plan.parameters


# Nothing fits


def test_a_given_layout_that_does_not_fit_names_changes_that_fit(cli):
    ran = cli(*LLAMA, "data.seq_len=8192", "layout.tp=8", "layout.micro_batch=32", "--json")
    assert ran.codes == ["plan-nothing-fits"]
    assert "Use layout." in ran.json["errors"][0]["fix"]


def test_a_model_that_fits_no_layout_names_the_nodes_it_needs(monkeypatch, cli):
    monkeypatch.setattr("meshwright.plan.search.failure.SUGGEST_S", 30.0)  # the machine may be busy
    monkeypatch.setattr("meshwright.plan.search.failure.TRY_S", 10.0)
    ran = cli("plan", "llama3-70b", *SMALL, "--on", "2xh100-sxm", "layout.offload=none", "--json")
    assert ran.codes == ["plan-nothing-fits"]
    (error,) = ran.json["errors"]
    assert "B per rank)" in error["fix"]
    assert "cluster.nodes=" in error["fix"] or "layout.offload" in error["fix"]


# --why


def test_why_compares_a_legal_layout_with_the_best(cli):
    ran = cli(*LLAMA, "--why", "layout.tp=4", "layout.dp_shard=2")
    assert not re.search(r"\de[+-]\d", ran.out), "differences of times have the units of the times"
    assert ran.status == 0
    assert "as given" in ran.out
    assert "Against the best layout" in ran.out
    found = cli(*LLAMA, "--why", "layout.tp=4", "layout.dp_shard=2", "--json").json
    why = found["why"]
    assert why["legal"]
    (asked,) = found["layouts"]
    assert asked["layout"]["tp"] == 4
    difference = asked["step_s"] - why["best"]["step_s"]
    assert difference >= 0
    assert sum(why["against_best_s"].values()) == pytest.approx(difference, rel=1e-6, abs=1e-9)


def test_why_names_the_rule_that_an_illegal_layout_breaks(cli):
    ran = cli(*LLAMA, "--why", "layout.tp=3", "--json")
    assert ran.status == 0
    why = ran.json["why"]
    assert not why["legal"]
    assert [problem["code"] for problem in why["problems"]] == ["layout-tp-heads"]
    (nearest,) = ran.json["layouts"]
    assert nearest["layout"]["dp_replicate"] * nearest["layout"]["tp"] == 3, "as many ranks as given"
    assert why["nearest_layouts"][0]["needed_bytes"] == nearest["needed_bytes"]
    assert "nearest layout that runs: " in ran.err


def test_why_names_the_missing_memory_and_changes_that_fit(cli):
    ran = cli(*LLAMA, "--why", "layout.dp_replicate=8")
    assert "does not fit: " in ran.out
    assert " more than usable" in ran.out
    assert "it would fit with layout." in ran.out


def test_why_judges_a_layout_with_idle_devices_if_all_degrees_are_given(cli):
    given = ("layout.tp=4", "layout.dp_shard=1", "layout.dp_replicate=1", "layout.pp=1", "layout.cp=1")
    ran = cli(*LLAMA, "--why", *given)
    assert "as given" in ran.out
    assert "it leaves 4 of 8 devices idle" in ran.out


def test_why_judges_the_best_layout_with_the_given_degrees_on_all_devices(cli):
    """tp=2 alone leaves six of eight devices idle; nobody would run that."""
    ran = cli(*LLAMA, "--why", "layout.tp=2", "layout.pp=1", "--json")
    why, (asked,) = ran.json["why"], ran.json["layouts"]
    full = why["best_with_degrees"]
    assert asked["layout"] == full["layout"]
    degrees = full["layout"]
    world = degrees["pp"] * degrees["dp_replicate"] * degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    assert (degrees["tp"], degrees["pp"], world) == (2, 1, 8)
    assert full["fits"]
    assert full["against_best"] == pytest.approx(full["step_s"] / why["best"]["step_s"] - 1)
    assert full["against_best"] >= 0
    judged = "the best with pp=1 tp=2 on all 8 devices; pp=1 tp=2 alone leaves 6 of them idle"
    assert asked["reasons"][0].endswith(judged)
    searched = cli(*LLAMA, "--json", "--top", "50").json["layouts"]
    same = [e["step_s"] for e in searched if (e["layout"]["tp"], e["layout"]["pp"]) == (2, 1)]
    assert full["step_s"] <= min(same, default=full["step_s"]) * 1.01, "the simplest within 1%"


def test_why_without_a_degree_explains_the_best_layout_with_that_setting(cli):
    """layout.recompute is not a degree. The layout is not that of one device."""
    ran = cli(*LLAMA, "--why", "layout.recompute=full", "--json")
    (asked,) = ran.json["layouts"]
    assert asked["layout"]["recompute"] == "full"
    searched = cli(*LLAMA, "layout.recompute=full", "--json", "--top", "1").json["layouts"][0]
    assert asked["step_s"] == pytest.approx(searched["step_s"], rel=0.02), "schedules may tie"
    assert "the best with recompute=full" in ran.err


def test_why_names_changes_that_fit_where_the_nearest_legal_layout_does_not(cli):
    """Each change fits if it is planned."""
    ran = cli(*LLAMA, "--why", "layout.tp=3", "--json")
    (nearest,) = ran.json["layouts"]
    assert not nearest["fits"]
    named = [line.partition("it would fit with ")[2] for line in ran.err.splitlines()]
    changes = [text.partition(" (")[0].split() for text in named if text]
    assert changes
    for overrides in changes:
        assert cli(*LLAMA, *overrides, "--json").json["layouts"][0]["fits"]


def test_why_on_this_machine_agrees_with_plan(cli, good):
    local = ("cluster.preset=local", "cluster.device=cpu", "cluster.devices_per_node=2")
    planned = cli("plan", good, *local, "layout.dp_replicate=2", "--json").json["layouts"][0]
    (asked,) = cli("plan", good, *local, "--why", "layout.dp_replicate=2", "--json").json["layouts"]
    assert asked["step_s"] == planned["step_s"]
    refused = cli("plan", good, *local, "--why", "layout.tp=3", "--json").json
    assert [problem["code"] for problem in refused["why"]["problems"]] == ["layout-tp-heads"]
    assert cli("plan", good, *local, "layout.tp=3").codes == ["layout-tp-heads"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("zero", 1, marks=pytest.mark.slow),
        ("zero", 3),
        pytest.param("schedule", "zb-h1", marks=pytest.mark.slow),
        pytest.param("schedule", "interleaved", marks=pytest.mark.slow),
        pytest.param("virtual_stages", 4, marks=pytest.mark.slow),
        pytest.param("sequence_parallel", True, marks=pytest.mark.slow),
        pytest.param("context", "ulysses", marks=pytest.mark.slow),
        pytest.param("accumulate", "deferred", marks=pytest.mark.slow),
        pytest.param("prefetch", 2, marks=pytest.mark.slow),
    ],
)
def test_a_setting_that_needs_a_degree_is_kept_in_the_search(cli, key, value):
    """The planner chooses a degree for which the setting has an effect."""
    ran = cli(*LLAMA, f"layout.{key}={str(value).lower()}", "--top", "5", "--json")
    assert {layout["layout"][key] for layout in ran.json["layouts"]} == {value}


def test_settings_without_a_legal_layout_are_refused(cli):
    ran = cli("plan", "llama3-8b", *SMALL, "--on", "1xh100-sxm", "layout.schedule=zbv")
    assert ran.codes == ["plan-no-layout"]


def test_missing_cpu_memory_is_named(cli):
    """175B parameters with all state in CPU memory need 351 GB per device. A node has 250 GB."""
    ran = cli("plan", "gpt3-175b", *SMALL, "--on", "8xh100-sxm", "--json")
    assert ran.codes == ["plan-nothing-fits"]
    rule = ran.json["errors"][0]["rule"]
    assert "offloaded state needs " in rule
    assert "GB more than cluster.host_memory_bytes" in rule


# Sizing


def test_sizing_names_devices_time_cost_and_assumptions(cli):
    asked = ("--tokens", "2e10", "--deadline", "3d")
    ran = cli(
        "plan", "llama3-8b", *SMALL, "--on", "8xh100-sxm", "cluster.cost_per_hour=2.5", *asked, "--json"
    )
    assert ran.status == 0
    sizing = ran.json["sizing"]
    assert sizing["wall_s"] <= 3 * 86400
    assert set(sizing["too_small"]).isdisjoint(size["devices"] for size in sizing["tried"])
    assert sizing["cost"] == pytest.approx(2.5 * sizing["devices"] * sizing["wall_s"] / 3600)
    assert [size["devices"] for size in sizing["tried"]] == sorted(
        size["devices"] for size in sizing["tried"]
    )
    assert "Sizes tried" in ran.err
    assert "assumed: " in ran.err
    layout = ran.json["layouts"][0]["layout"]
    world = layout["pp"] * layout["dp_replicate"] * layout["dp_shard"] * layout["cp"] * layout["tp"]
    assert world <= sizing["devices"]


def test_sizing_recommends_one_device_if_it_is_enough(cli):
    ran = cli("plan", "tiny", *SMALL, "--on", "8xh100-sxm", "--tokens", "1e6", "--deadline", "9d")
    assert ran.out.startswith("one H100-80GB-SXM is enough: ")


BUDGET = ("plan", "tiny", *SMALL, "--on", "8xh100-sxm", "cluster.cost_per_hour=2.5", "--tokens", "1e9")


def test_a_budget_buys_the_fastest_cluster_within_it(cli):
    sizing = cli(*BUDGET, "--max-cost", "50", "--json").json["sizing"]
    assert sizing["max_cost"] == 50
    assert sizing["cost"] <= 50
    within = [size["wall_s"] for size in sizing["tried"] if size["cost"] <= 50]
    assert sizing["wall_s"] <= 1.02 * min(within)
    assert sizing["devices"] == 1, "more devices are not faster here"


def test_a_budget_that_no_cluster_keeps_is_refused_and_the_cheapest_is_named(cli):
    ran = cli(*BUDGET, "--max-cost", "0.001")
    assert (ran.status, ran.codes) == (2, ["plan-goal-unmet"])
    assert "the cheapest is " in ran.err
    assert ran.out == ""
    assert cli(*BUDGET, "--max-cost", "-1").codes == ["plan-bad-cost"]


def test_a_budget_needs_a_price(cli):
    local = ("plan", "llama3-8b", *SMALL, "--on", "8xh100-sxm", "cluster.cost_per_hour=2.5")
    assert cli(*local, "--max-cost", "5").codes == ["plan-sizing-half"]
    free = ("cluster.file=free.toml", "--tokens", "1e9", "--max-cost", "5")
    Path("free.toml").write_text(
        'device = "cuda"\ndevices_per_node = 8\nmemory_bytes = 80000000000\nmemory_bytes_per_s = 3e12\n'
        "fp32_flops_per_s = 5e13\nbf16_flops_per_s = 7e14\nlink_bytes_per_s = 4e11\nlink_latency_s = 1e-5\n"
    )
    assert cli("plan", "llama3-8b", *SMALL, *free).codes == ["plan-no-price"]


# Pictures


def test_an_svg_picture_has_memory_limit_and_step_parts(cli, tmp_path):
    assert cli(*LLAMA, "--picture", "plan.svg").status == 0
    root = ElementTree.fromstring((tmp_path / "plan.svg").read_bytes())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "Memory per rank by kind; red line: usable memory per device, 77.6 GB" in texts
    assert "compute" in texts
    assert any("layouts that may fit" in (text or "") for text in texts)


@pytest.mark.slow
def test_a_png_picture_is_written(cli, tmp_path):
    assert cli(*LLAMA, "--picture", "plan.png").status == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_plan_for_this_machine_can_be_drawn(cli, good, tmp_path):
    local = ("cluster.preset=local", "cluster.device=cpu", "cluster.devices_per_node=4")
    assert cli("plan", good, *local, "--picture", "plan.svg").status == 0
    assert (tmp_path / "plan.svg").stat().st_size > 1000


# Bad input


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--tokens", "1e9"), "plan-sizing-half"),
        (("--deadline", "3d"), "plan-sizing-half"),
        (("--tokens", "0", "--deadline", "3d"), "plan-bad-tokens"),
        (("--tokens", "-5", "--deadline", "3d"), "plan-bad-tokens"),
        (("--tokens", "nan", "--deadline", "3d"), "plan-bad-tokens"),
        (("--tokens", "1e9", "--deadline", "soon"), "plan-bad-deadline"),
        (("--tokens", "1e9", "--deadline", "3d", "--why", "layout.tp=2"), "plan-why-sizing"),
        (("--tokens", "1e9", "--deadline", "3d", "layout.tp=2"), "plan-sizing-not-here"),
        (("--why", "tp=4"), "plan-why-key"),
        (("--why", "layout.tpp=4"), "job-unknown-key"),
        (("--picture", "plan.gif"), "picture-kind"),
        (("--picture", "gone/plan.svg"), "picture-not-written"),
        (("--by", "luck"), "cli-usage"),
        (("--top", "0"), "cli-usage"),
        (("layout.tp=16",), "layout-world-size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_bad_input_is_refused_with_its_code(cli, arguments, code):
    ran = cli(*LLAMA, *arguments)
    assert ran.status == 2
    assert code in ran.codes


def test_unknown_presets_are_refused_with_codes(cli):
    assert cli("plan", "llama9", *ON).codes == ["job-missing-file"]
    assert cli("plan", "llama3-8b", "--on", "2x8xz9000").codes == ["cluster-unknown-preset"]


def test_ranking_by_cost_is_refused_for_a_resnet(cli, good):
    """Decoders can be ranked by cost on CPUs, too. A ResNet has replicas only."""
    local = ("cluster.preset=local", "cluster.device=cpu", "cluster.devices_per_node=2")
    ran = cli("plan", good, *local, "--by", "cost")
    assert ran.status == 0
    assert "least device time per step" in ran.out
    assert cli("plan", "resnet18", "--on", "8xh100-sxm", "--by", "cost").codes == ["plan-by-not-here"]


def test_why_is_refused_for_a_resnet(cli):
    assert cli("plan", "resnet18", "--on", "8xh100-sxm", "--why", "layout.dp_replicate=2").codes == [
        "plan-why-images"
    ]


def test_plan_names_the_nearest_legal_layout_of_a_decoder(cli):
    ran = cli(*LLAMA, "layout.tp=3", "--json")
    assert ran.status == 2
    (note,) = [n for n in ran.json["notes"] if n.startswith("nearest layout that runs: ")]
    overrides = note.removeprefix("nearest layout that runs: ").partition(" (")[0].split()
    assert load_job("llama3-8b", [*SMALL, *overrides], "2x4xh100-sxm", to_run=False).layout.mode == "given"


# One device; offloading


def test_one_device_is_recommended_if_more_are_not_faster(cli):
    ran = cli("plan", "tiny", "data.seq_len=32", "train.global_batch=1", "--on", "8xh100-sxm")
    assert "one device is enough" in ran.out or "use one device: " in ran.out


def test_offloading_is_chosen_if_it_beats_full_activation_checkpointing(cli):
    """8B parameters on 2 devices fit only with full activation checkpointing or offloading."""
    large = ("train.global_batch=4096", "data.seq_len=2048")
    asked = ("plan", "llama3-8b", *large, "--on", "2xh100-sxm", "--top", "1", "--json")
    (free,) = cli(*asked).json["layouts"]
    (without,) = cli(*asked, "layout.offload=none").json["layouts"]
    assert without["layout"]["recompute"] == "full"
    assert free["layout"]["offload"] != "none"
    assert free["step_s"] < 0.95 * without["step_s"]
    assert "without offload " in free["reasons"][0]


def test_ranking_by_memory_considers_offloading(cli):
    asked = (*LLAMA, "--by", "memory", "--top", "1", "--json")
    (best,) = cli(*asked).json["layouts"]
    assert best["layout"]["offload"] == "all"
    assert not [reason for reason in best["reasons"] if "less memory" in reason], "no neighbour has more left"


def test_the_plan_names_samples_precision_and_runtime_of_a_step(cli):
    words = "per step: 32 samples of 512 tokens, 16.4 k tokens in all, in bf16; runtime meshwright"
    assert words in cli(*LLAMA, "-v").out


def test_a_model_that_is_not_built_is_planned_on_this_machine(cli, good):
    local = ("cluster.preset=local", "cluster.device=cpu", "cluster.devices_per_node=2")
    experts = ("model.num_experts=4", "model.experts_per_token=2", "model.window=8")
    ran = cli("plan", good, *local, *experts, "--json")
    assert ran.status == 0
    assert ran.json["fit"] > 0
    assert ran.json["layouts"][0]["interval_basis"].startswith("a factor of 2")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90d", 90 * 86_400), ("12h", 43_200), ("2w", 14 * 86_400), ("1.5d", 1.5 * 86_400)]
)
def test_durations_are_parsed(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["90", "d", "-3d", "0d", "3m", "1e3d", ""])
def test_invalid_duration_is_refused(text):
    with pytest.raises(UserError) as caught:
        parse_duration(text)
    assert caught.value.problems[0].code == "plan-bad-deadline"
