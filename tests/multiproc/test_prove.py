"""`meshwright prove` finds layouts equal that are, and names the first module of those that are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from proving import Prover

from meshwright.cli import prove as command
from meshwright.cli.output import Output
from meshwright.core.errors import MeshwrightError
from meshwright.spec.load import build_job
from model_shapes import GPT_PARTS

KEYS = {"equal", "max_rel_diff", "max_grad_diff", "first_divergence", "losses", "reference_losses"}
KEYS |= {"tolerance", "layout", "shrunk"}


@pytest.fixture
def prove(job_file, tmp_path, monkeypatch, capfd):
    """Prove on real ranks from inside the test; returns the object of ``--json``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def run(*overrides, expect=0):
        capfd.readouterr()
        status = command.prove_job(Output(as_json=True), str(job_file), list(overrides))
        out, err = capfd.readouterr()
        assert status == expect, f"exit status {status}, expected {expect}\n{err}"
        return json.loads(out) | {"messages": err}

    return run


@pytest.mark.parametrize(
    "overrides",
    [
        ["layout.dp_replicate=3", "train.global_batch=7", "layout.recompute=full"],
        ["layout.dp_replicate=2", "layout.micro_batch=2", "train.precision=bf16", "compression.kind=bf16"],
        # Attention's key bias has a gradient of nothing but rounding: it must not fail.
        [
            *("model.positions=learned", "model.max_positions=32", "model.norm=layer"),
            *("model.activation=gelu", "model.attention_bias=true", "model.ffn_bias=true"),
            "layout.dp_replicate=2",
        ],
    ],
)
def test_replicas_are_equal_to_one_process(prove, overrides, tmp_path):
    """Uneven shares, accumulation, recomputation, and both families of decoders; nothing is left behind."""
    found = prove(*overrides)
    assert found.keys() >= KEYS
    assert found["equal"]
    assert found["first_divergence"] is None
    assert found["shrunk"] is None
    assert len(found["losses"]) == len(found["reference_losses"]) == 10
    assert found["losses"] != found["reference_losses"] or found["max_rel_diff"] == 0
    assert found["max_grad_diff"] > 0, "the gradients of two layouts differ by rounding, not by nothing"
    assert found["max_grad_diff"] < 1e-5
    assert list(tmp_path.glob("meshwright-prove-*")) == []
    if "train.precision=bf16" in overrides:
        assert any("train.precision=bf16" in line for line in found["settings"])
        assert any("compression.kind=bf16" in line for line in found["settings"])


def test_a_job_for_many_ranks_is_proved_in_small_and_says_so(prove):
    """Twelve replicas become two."""
    found = prove("layout.dp_replicate=12")
    assert found["equal"]
    assert found["layout"]["dp_replicate"] == found["world_size"] == 2
    assert {"key": "layout.dp_replicate", "before": 12, "after": 2} in found["shrunk"]["changes"]
    assert "12 ranks" in found["messages"]


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "key_heads"), [(8, 2), (16, 1)])
def test_seventy_billion_parameters_on_many_ranks_are_proved_in_small(prove, tp, key_heads):
    """Shards and shared matrices stay both, and so does a key head that lies on several ranks."""
    found = prove(
        "model.preset=llama3-70b",
        "data.seq_len=8192",
        "train.global_batch=512",
        f"layout.tp={tp}",
        "layout.dp_shard=64",
        "layout.sequence_parallel=true",
        "layout.recompute=full",
    )
    assert found["equal"]
    layout = found["layout"]
    assert (layout["tp"], layout["dp_shard"], layout["zero"], layout["sequence_parallel"]) == (2, 2, 3, True)
    assert found["world_size"] == 4
    changes = {row["key"]: row["after"] for row in found["shrunk"]["changes"]}
    assert changes["model.num_kv_heads"] == key_heads
    assert f"{tp * 64} ranks" in found["messages"]
    assert "sequence_parallel" in found["messages"]
    assert "not compared" not in found["messages"]


def test_a_rank_that_dies_is_a_failed_run(prove, monkeypatch):
    """Exit status 4, with the place of the ranks' output, and no advice to resume."""
    monkeypatch.setattr("meshwright.runs.prove.ENTRY", "planted_proofs:dies")
    with pytest.raises(MeshwrightError) as caught:
        prove("layout.dp_replicate=2")
    assert caught.value.exit_status == 4
    assert "the cat sat" in str(caught.value)
    assert "--resume" not in str(caught.value)
    folder = Path(str(caught.value).partition("is in ")[2].partition(". [")[0])
    assert "the cat sat" in (folder / "rank-0.log").read_text()


def test_a_wrong_layout_ends_with_status_3_and_the_module_in_words(prove, monkeypatch):
    monkeypatch.setattr("meshwright.runs.prove.ENTRY", "planted_proofs:missing_reduce")
    found = prove("layout.dp_replicate=2", expect=3)
    assert not found["equal"]
    assert found["max_grad_diff"] > 0.01
    assert found["first_divergence"]["module"] == "blocks.1.ffn_norm"
    words = "First divergence: the gradient of blocks.1.ffn_norm.weight in blocks.1.ffn_norm at step 1"
    assert words in found["messages"]
    assert "[prove-differs]" in found["messages"]


def test_a_layout_that_is_not_finite_is_not_equal(prove, monkeypatch):
    """One process has a loss and the layout has none: a verdict with its module, not a failed run."""
    monkeypatch.setattr("meshwright.runs.prove.ENTRY", "planted_proofs:not_finite")
    found = prove("layout.dp_replicate=2", expect=3)
    assert found["max_rel_diff"] is None
    assert found["losses"] == [None]
    first = found["first_divergence"]
    assert (first["kind"], first["module"], first["rank"]) == ("activation", "blocks.0.ffn.up", 1)


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["layout.tp=3"], "layout-tp-heads"),
        (["layout.tp=two"], "job-wrong-type"),
        (["layout.tp=4", "model.ffn_size=130"], "layout-tp-ffn"),
        (["layout.dp_replicate=2", "layout.sequence_parallel=true"], "layout-sequence-parallel-tp"),
        (["layout.tp=2", "layout.sequence_parallel=true", "data.seq_len=31"], "layout-sequence-parallel-len"),
        (["layout.tp=2", "train.optimizer=muon"], "train-muon-not-built"),
        (["train.steps=none"], "job-wrong-type"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(prove, overrides, code):
    with pytest.raises(MeshwrightError) as caught:
        prove(*overrides)
    assert caught.value.exit_status == 2
    assert code in [problem.code for problem in caught.value.problems]


def test_a_batch_norm_promises_nothing_that_could_be_proved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = Path(__file__).parents[2] / "examples" / "resnet.toml"
    with pytest.raises(MeshwrightError) as caught:
        command.prove_job(Output(as_json=True), str(example), ["model.norm=batch"])
    assert [problem.code for problem in caught.value.problems] == ["prove-batch-norm"]


def test_shards_are_gathered_before_they_are_compared(prove, monkeypatch):
    """FSDP2's sharded parameters and gradients (DTensor) go through the same comparison, right and wrong."""
    monkeypatch.setattr("meshwright.runs.prove.ENTRY", "planted_proofs:shards")
    right = prove("layout.dp_replicate=2", "train.clip=0")
    assert right["equal"]
    assert right["max_grad_diff"] < 1e-5
    monkeypatch.setattr("meshwright.runs.prove.ENTRY", "planted_proofs:averaged_shards")
    wrong = prove("layout.dp_replicate=2", "train.clip=0", expect=3)
    assert "all gradients are 0.5 times" in wrong["first_divergence"]["note"]


def slow(*values):
    """A case for which `make test` has no time."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def against(prepared, tmp_path_factory):
    """One reference for all defects of a model: each is planted in a small layout and judged."""
    prover = Prover(tmp_path_factory.mktemp("proof"), prepared)

    def run(defect, layout, model=(), train=()):
        tree = {
            "name": "planted",
            "model": {"preset": "tiny", **dict(model)},
            "data": {"path": str(prepared), "seq_len": 32},
            "train": {"steps": 10, "global_batch": 12, "lr": 3e-3, **dict(train)},
            "layout": {"micro_batch": 3, **layout},
            "cluster": {"preset": "local", "device": "cpu"},
        }
        return prover.prove(build_job(tree), f"planted_proofs:{defect}")

    return run


@pytest.mark.parametrize(
    ("defect", "kind", "module", "rank", "said"),
    [
        ("wrong_divisor", "gradient", "norm", 0, "all gradients are 0.5 times"),
        ("missing_reduce", "gradient", "blocks.1.ffn_norm", 0, ""),
        ("no_gradient", "gradient", "blocks.0.attention.wk", 0, "missing"),
        ("wrong_loss_scale", "gradient", "norm", 0, ""),
        ("rope_offset", "activation", "blocks.0.attention", 1, ""),
        ("tied_reduce", "gradient", "embed", 0, "it is also head.weight"),
        ("unequal_weight", "activation", "blocks.1.ffn.down", 1, ""),
        ("wrong_sum", "loss", "loss", None, "summation of losses"),
        ("lost_update", "weight", "blocks.0.ffn.up", 0, "its gradient was right"),
        ("wrong_samples", "input", "model", 1, ""),
    ],
)
def test_a_planted_defect_is_found_and_its_module_named(against, defect, kind, module, rank, said):
    """The module, how it differs, and on which rank."""
    first = named(against(defect, {"dp_replicate": 2}), kind, module, said)
    assert first.rank == rank


SEQUENCE = {"tp": 2, "sequence_parallel": True}
ONE_KEY_HEAD = {"num_kv_heads": 1}
GPT = {**GPT_PARTS, "max_positions": 32, "tied_embeddings": False}


@pytest.mark.parametrize(
    ("defect", "layout", "model", "kind", "module", "said"),
    [
        ("unsummed_norms", SEQUENCE, {}, "gradient", "norm", ""),
        pytest.param(
            "unsummed_norms", {**SEQUENCE, "dp_shard": 2}, {}, "gradient", "norm", "", marks=pytest.mark.slow
        ),
        ("unsummed_keys", SEQUENCE, ONE_KEY_HEAD, "gradient", "blocks.1.attention.wv", ""),
        pytest.param(
            "unsummed_keys",
            {"tp": 2},
            ONE_KEY_HEAD,
            "gradient",
            "blocks.1.attention.wv",
            "",
            marks=pytest.mark.slow,
        ),
        ("bias_on_every_rank", SEQUENCE, GPT, "gradient", "blocks.1.ffn.down", ""),
        ("other_words", SEQUENCE, {}, "activation", "embed", ""),
        pytest.param("first_positions", SEQUENCE, GPT, "activation", "positions", "", marks=pytest.mark.slow),
        ("shifted_tokens", SEQUENCE, {}, "activation", "blocks.0.attention", ""),
        pytest.param(
            "tp_counted_as_data",
            SEQUENCE,
            {},
            "gradient",
            "norm",
            "all gradients are 0.5 times",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "rope_offset", SEQUENCE, {}, "activation", "blocks.0.attention", "", marks=pytest.mark.slow
        ),
        pytest.param(
            "unequal_weight", SEQUENCE, {}, "activation", "blocks.1.ffn.down", "", marks=pytest.mark.slow
        ),
        pytest.param(
            "unequal_norm", SEQUENCE, {}, "activation", "blocks.1.attention_norm", "", marks=pytest.mark.slow
        ),
        ("no_gradient", SEQUENCE, {}, "gradient", "blocks.0.attention.wk", "missing"),
        pytest.param(
            "tied_reduce",
            {**SEQUENCE, "dp_replicate": 2},
            {},
            "gradient",
            "embed",
            "it is also head.weight",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_defect_of_shared_matrices_is_found_and_its_module_named(
    against, defect, layout, model, kind, module, said
):
    """Most of the ranks' losses are still near: what is named is the module."""
    named(against(defect, layout, model), kind, module, said)


SHARED = {"cp": 2}
HALF = "all gradients are 0.5 times"


@pytest.mark.parametrize(
    ("defect", "layout", "kind", "module", "said"),
    [
        ("contiguous_positions", SHARED, "activation", "blocks.0.attention", ""),
        ("lost_sums", SHARED, "gradient", "blocks.1.attention.wv", ""),
        ("cp_counted_as_data", {"cp": 2, "tp": 2}, "gradient", "norm", HALF),
        ("swapped_heads", {"cp": 2, "context": "ulysses"}, "activation", "blocks.0.attention", ""),
        slow("averaged_rounds", SHARED, "activation", "blocks.0.attention", ""),
        slow("skipped_round", SHARED, "activation", "blocks.0.attention", ""),
        slow("missing_reduce", SHARED, "gradient", "blocks.1.ffn_norm", ""),
        slow("lost_sums", {"cp": 2, "pp": 2}, "gradient", "blocks.1.attention.wv", ""),
    ],
)
def test_a_defect_of_shared_sequences_is_found_and_its_module_named(
    against, defect, layout, kind, module, said
):
    """Whole sequences are compared, of parts that lie on several ranks."""
    named(against(defect, layout), kind, module, said)


MIXTURE = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 32, "capacity_factor": 1.0}
BIASED = {**MIXTURE, "ffn_bias": True}
ROUTER, GATE, DOWN = "blocks.1.ffn.router", "blocks.1.ffn.experts.gate", "blocks.1.ffn.experts.down"


@pytest.mark.parametrize(
    ("defect", "layout", "model", "kind", "module"),
    [
        ("unsummed_router", {"tp": 2}, MIXTURE, "gradient", ROUTER),
        ("experts_as_dense", {"cp": 2, "ep": 2}, MIXTURE, "gradient", DOWN),
        ("turned_answers", {"cp": 2, "ep": 2}, MIXTURE, "activation", "blocks.0.ffn"),
        ("own_queues", {"cp": 2}, MIXTURE, "activation", "blocks.0.ffn"),
        ("own_counts", {"cp": 2}, {**MIXTURE, "capacity_factor": None}, "gradient", ROUTER),
        slow("unsummed_router", {**SEQUENCE, "ep": 2}, MIXTURE, "gradient", "norm"),
        slow("unsummed_experts", {"dp_replicate": 2, "cp": 2, "ep": 2}, MIXTURE, "gradient", DOWN),
        slow("unsummed_experts", {"tp": 2}, MIXTURE, "gradient", DOWN),
        slow("own_queues", {"tp": 2, "ep": 2}, MIXTURE, "activation", "blocks.0.ffn"),
        slow("own_counts", {"tp": 2}, {**MIXTURE, "capacity_factor": None}, "gradient", ROUTER),
        slow("bias_of_every_part", {"cp": 2, "etp": 2}, BIASED, "loss", "loss"),  # biases begin as zeros
        slow("turned_answers", {"pp": 2, "tp": 2, "ep": 2}, MIXTURE, "activation", "blocks.0.ffn"),
    ],
)
def test_a_defect_of_experts_is_found_and_its_module_named(against, defect, layout, model, kind, module):
    """Gradients are summed over the ranks that share an expert, and sequences counted whole."""
    named(against(defect, layout, model, {"balance_loss": 0.05}), kind, module, "")


PIPELINE = {"pp": 2}
SPLIT = {"pp": 2, "schedule": "zb-h1"}
SHARDS = {"pp": 2, "dp_shard": 2}


@pytest.mark.parametrize(
    ("defect", "layout", "kind", "module", "said"),
    [
        ("bf16_borders", PIPELINE, "activation", "model", ""),
        ("forgotten_weights", SPLIT, "gradient", "blocks.1.ffn.down", ""),
        ("untied_sum", PIPELINE, "gradient", "embed", "it is also head.weight"),
        slow(
            "forgotten_weights",
            {**SHARDS, "zero": 3, "schedule": "zb-h1"},
            "gradient",
            "blocks.1.ffn.down",
            "",
        ),
        slow("untied_sum", {**SHARDS, "zero": 2}, "gradient", "embed", "it is also head.weight"),
        slow("pp_counted_as_data", PIPELINE, "gradient", "norm", "all gradients are 0.5 times"),
        slow("first_stage_reports_loss", PIPELINE, "loss", "loss", "summation of losses"),
        slow("armed_early", {"pp": 2, "dp_replicate": 2}, "gradient", "norm", ""),
        slow("swapped_micro_batches", {**PIPELINE, "schedule": "gpipe"}, "activation", "model", ""),
        slow("unreleased_weights", {**SHARDS, "zero": 2}, "gradient", "norm", "missing"),
    ],
)
def test_a_defect_of_a_pipeline_is_found_and_its_module_named(against, defect, layout, kind, module, said):
    """Between two stages it is the model that is named: what lies between its modules."""
    named(against(defect, layout), kind, module, said)


@pytest.mark.slow
def test_clipping_by_the_norm_of_ones_own_stages_is_found(against):
    """Plain SGD shows it in the first update; AdamW, whose first steps have one size, in the third loss."""
    plain = {"optimizer": "sgd", "lr": 0.1, "clip": 0.5}
    proof = against("own_stage_norm", PIPELINE, train=plain)
    named(proof, "weight", "norm", "its gradient was right")
    norms = {steps[0].grad_norm for steps in proof.steps}
    assert len(norms) == 2, "each rank has its own"
    assert max(norms) < proof.reference_steps[0].grad_norm


def named(proof, kind, module, said):
    """The first divergence, which must be this one."""
    assert not proof.verdict.equal
    first = proof.verdict.first_divergence
    assert (first.kind, first.module) == (kind, module), first
    assert said in first.note
    if said in ("", "summation of losses"):
        assert said or not first.note
    assert module in first.sentence()
    assert first.difference is None if said == "missing" else first.difference > 1e-4
    assert [found.not_compared for found in proof.findings] == [[] for _ in proof.findings]
    return first
