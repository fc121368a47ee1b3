"""`meshwright prove`: correct layouts are equal; for injected bugs it names the first module that differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prover import Prover

from meshwright.cli import prove as command
from meshwright.cli.output import Output
from meshwright.core.errors import MeshwrightError
from meshwright.runs import prove as prove_runs
from meshwright.runs.prove import ENTRY
from meshwright.spec.load import build_job
from model_shapes import GPT_PARTS

KEYS = {"equal", "max_rel_diff", "max_grad_diff", "first_divergence", "losses", "reference_losses"}
KEYS |= {"tolerance", "layout", "shrunk"}


@pytest.fixture
def prove(job_file, tmp_path, monkeypatch, capfd):
    """Run `prove` on real ranks inside the test process; returns the object of ``--json``."""
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
        pytest.param(
            ["layout.dp_replicate=3", "train.global_batch=7", "layout.recompute=full"],
            marks=pytest.mark.slow,
        ),
        ["layout.dp_replicate=2", "layout.micro_batch=2", "train.precision=bf16", "compression.kind=bf16"],
        # The gradient of attention's key bias is zero up to rounding; that must not fail the proof.
        [
            *("model.positions=learned", "model.max_positions=32", "model.norm=layer"),
            *("model.activation=gelu", "model.attention_bias=true", "model.ffn_bias=true"),
            "layout.dp_replicate=2",
        ],
    ],
)
def test_replicas_equal_one_process(prove, overrides, tmp_path):
    """Unequal shares, gradient accumulation, activation checkpointing, bf16, both decoder families.

    The temporary folder is deleted.
    """
    found = prove(*overrides)
    assert found.keys() >= KEYS
    assert found["equal"]
    assert found["first_divergence"] is None
    assert found["shrunk"] is None
    assert len(found["losses"]) == len(found["reference_losses"]) == 10
    assert found["losses"] != found["reference_losses"] or found["max_rel_diff"] == 0
    assert found["max_grad_diff"] > 0, "gradients of two layouts differ by rounding"
    assert found["max_grad_diff"] < 1e-5
    assert list(tmp_path.glob("meshwright-prove-*")) == []
    if "train.precision=bf16" in overrides:
        assert any("train.precision=bf16" in line for line in found["settings"])
        assert any("compression.kind=bf16" in line for line in found["settings"])


def test_a_layout_of_12_ranks_is_shrunk_to_2_and_reported(prove):
    """``shrunk`` lists the change from twelve replicas to two."""
    found = prove("layout.dp_replicate=12")
    assert found["equal"]
    assert found["layout"]["dp_replicate"] == found["world_size"] == 2
    assert {"key": "layout.dp_replicate", "before": 12, "after": 2} in found["shrunk"]["changes"]
    assert "12 ranks" in found["messages"]


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "key_heads"), [(8, 2), (16, 1)])
def test_a_70b_model_on_many_ranks_is_proved_in_small(prove, tp, key_heads):
    """The shrunk layout keeps FSDP, tensor and sequence parallel, and replicated key heads."""
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


def inject(monkeypatch, bug: str) -> None:
    """Run the layout of a proof, but not its reference, with a bug of ``parallelism_bugs``."""
    run_side = prove_runs.run_proof_side

    def run(entry, plan, folder, task, *others):
        entry = entry if task.reference is None else f"parallelism_bugs:{bug}"
        return run_side(entry, plan, folder, task, *others)

    monkeypatch.setattr(prove_runs, "run_proof_side", run)


def test_an_exception_on_a_rank_fails_the_proof(prove, monkeypatch):
    """Exit status 4. The error names the folder of the ranks' logs and does not suggest to resume."""
    inject(monkeypatch, "exception_in_step_3")
    with pytest.raises(MeshwrightError) as caught:
        prove("layout.dp_replicate=2")
    assert caught.value.exit_status == 4
    assert "raised by the test" in str(caught.value)
    assert "--resume" not in str(caught.value)
    folder = Path(str(caught.value).partition("is in ")[2].partition(". [")[0])
    assert "raised by the test" in (folder / "rank-0.log").read_text()


def test_a_wrong_layout_exits_with_status_3_and_names_the_module(prove, monkeypatch):
    inject(monkeypatch, "unreduced_norm")
    found = prove("layout.dp_replicate=2", expect=3)
    assert not found["equal"]
    assert found["max_grad_diff"] > 0.01
    assert found["first_divergence"]["module"] == "blocks.1.ffn_norm"
    first = found["first_divergence"]
    assert (first["kind"], first["step"]) == ("gradient", 1)
    assert first["parameter"] == "blocks.1.ffn_norm.weight"
    assert first["parameter"] in found["messages"]
    assert "[prove-differs]" in found["messages"]


def test_a_nan_loss_is_a_verdict_that_names_the_module(prove, monkeypatch):
    """The reference has a loss and the layout has NaN. The result is "not equal", not a failed run."""
    inject(monkeypatch, "nan_weight")
    found = prove("layout.dp_replicate=2", expect=3)
    assert found["max_rel_diff"] is None
    assert found["losses"] in ([], [None])  # rank 0 may be halted before it reports its step
    first = found["first_divergence"]
    assert (first["kind"], first["module"], first["rank"]) == ("weight", "blocks.0.ffn.up", 1)


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
def test_an_illegal_job_is_refused_with_its_code(prove, overrides, code):
    with pytest.raises(MeshwrightError) as caught:
        prove(*overrides)
    assert caught.value.exit_status == 2
    assert code in [problem.code for problem in caught.value.problems]


def test_batch_norm_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = Path(__file__).parents[2] / "examples" / "resnet.toml"
    with pytest.raises(MeshwrightError) as caught:
        command.prove_job(Output(as_json=True), str(example), ["model.norm=batch"])
    assert [problem.code for problem in caught.value.problems] == ["prove-batch-norm"]


def slow(*values):
    """A case of `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def prove_bug(prepared, tmp_path_factory):
    """Prove a small layout with an injected bug. All bugs of a model share one reference."""
    prover = Prover(tmp_path_factory.mktemp("proof"), prepared)

    def run(bug, layout, model=(), train=(), precision="fp32"):
        tree = {
            "name": "injected-bug",
            "model": {"preset": "tiny", **dict(model)},
            "data": {"path": str(prepared), "seq_len": 32},
            "train": {"steps": 10, "global_batch": 12, "lr": 3e-3, **dict(train)},
            "layout": {"micro_batch": 3, **layout},
            "cluster": {"preset": "local", "device": "cpu"},
        }
        entry = f"parallelism_bugs:{bug}" if bug else ENTRY
        return prover.prove(build_job(tree), entry, precision)

    return run


@pytest.mark.parametrize(
    ("bug", "kind", "module", "rank", "note"),
    [
        ("loss_divided_twice", "gradient", "norm", 0, "all gradients are 0.5 times"),
        slow("unreduced_norm", "gradient", "blocks.1.ffn_norm", 0, ""),
        slow("frozen_weight", "gradient", "blocks.0.attention.wk", 0, "missing"),
        slow("loss_scaled_on_one_rank", "gradient", "norm", 0, ""),
        ("rope_positions_restart", "activation", "blocks.0.attention", 1, ""),
        ("unreduced_tied_embedding", "gradient", "embed", 0, "it is also head.weight"),
        slow("unequal_linear_weight", "weight", "blocks.1.ffn.down", 1, ""),
        ("loss_averaged_over_ranks", "loss", "loss", None, "summation of losses"),
        ("gradient_zeroed_before_update", "update", "blocks.0.ffn.up", 0, "zero in the update"),
        ("ranks_read_same_samples", "input", "model", 1, ""),
    ],
)
def test_a_data_parallel_bug_is_located(prove_bug, bug, kind, module, rank, note):
    """The first divergence has the kind, module, rank and note of the bug."""
    first = require_first_divergence(prove_bug(bug, {"dp_replicate": 2}), kind, module, note)
    assert first.rank == rank


SEQUENCE_PARALLEL = {"tp": 2, "sequence_parallel": True}
ONE_KEY_HEAD = {"num_kv_heads": 1}
GPT = {**GPT_PARTS, "max_positions": 32, "tied_embeddings": False}


@pytest.mark.parametrize(
    ("bug", "layout", "model", "kind", "module", "note"),
    [
        ("tp_unreduced_replicated_grads", SEQUENCE_PARALLEL, {}, "gradient", "norm", ""),
        slow(
            "tp_unreduced_replicated_grads", {**SEQUENCE_PARALLEL, "dp_shard": 2}, {}, "gradient", "norm", ""
        ),
        slow(
            "tp_unreduced_kv_replicas",
            SEQUENCE_PARALLEL,
            ONE_KEY_HEAD,
            "gradient",
            "blocks.1.attention.wv",
            "",
        ),
        slow("tp_unreduced_kv_replicas", {"tp": 2}, ONE_KEY_HEAD, "gradient", "blocks.1.attention.wv", ""),
        slow("tp_bias_before_reduce", SEQUENCE_PARALLEL, GPT, "gradient", "blocks.1.ffn.down", ""),
        slow("tp_wrong_vocab_shard", SEQUENCE_PARALLEL, {}, "token", "embed", "and 315 more"),
        slow("sp_positions_of_rank_0", SEQUENCE_PARALLEL, GPT, "activation", "positions", ""),
        slow("sp_gathered_tokens_shifted", SEQUENCE_PARALLEL, {}, "token", "head", "and 251 more"),
        slow("tp_counted_as_data", SEQUENCE_PARALLEL, {}, "gradient", "norm", "all gradients are 0.5 times"),
        slow("rope_positions_restart", SEQUENCE_PARALLEL, {}, "activation", "blocks.0.attention", ""),
        slow("unequal_linear_weight", SEQUENCE_PARALLEL, {}, "weight", "blocks.1.ffn.down", ""),
        slow("unequal_norm_weight", SEQUENCE_PARALLEL, {}, "weight", "blocks.1.attention_norm", ""),
        slow("frozen_weight", SEQUENCE_PARALLEL, {}, "gradient", "blocks.0.attention.wk", "missing"),
        slow(
            "unreduced_tied_embedding",
            {**SEQUENCE_PARALLEL, "dp_replicate": 2},
            {},
            "gradient",
            "embed",
            "it is also head.weight",
        ),
    ],
)
def test_a_tensor_parallel_bug_is_located(prove_bug, bug, layout, model, kind, module, note):
    """The first divergence names the module, although most losses are nearly equal."""
    require_first_divergence(prove_bug(bug, layout, model), kind, module, note)


CP = {"cp": 2}
HALF = "all gradients are 0.5 times"


@pytest.mark.parametrize(
    ("bug", "layout", "kind", "module", "note"),
    [
        slow("ring_contiguous_positions", CP, "activation", "blocks.0.attention", ""),
        ("ring_kv_grads_lost", CP, "gradient", "blocks.1.attention.wv", ""),
        slow("cp_counted_as_data", {"cp": 2, "tp": 2}, "gradient", "norm", HALF),
        ("ulysses_heads_swapped", {"cp": 2, "context": "ulysses"}, "activation", "blocks.0.attention", ""),
        slow("ring_steps_averaged", CP, "activation", "blocks.0.attention", ""),
        slow("ring_steps_not_merged", CP, "activation", "blocks.0.attention", ""),
        slow("unreduced_norm", CP, "gradient", "blocks.1.ffn_norm", ""),
        slow("ring_kv_grads_lost", {"cp": 2, "pp": 2}, "gradient", "blocks.1.attention.wv", ""),
    ],
)
def test_a_context_parallel_bug_is_located(prove_bug, bug, layout, kind, module, note):
    """Activations are compared over full sequences, gathered from the `cp` ranks."""
    require_first_divergence(prove_bug(bug, layout), kind, module, note)


MOE = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 32, "capacity_factor": 1.0}
BIASED = {**MOE, "ffn_bias": True}
ROUTER, GATE, DOWN = "blocks.1.ffn.router", "blocks.1.ffn.experts.gate", "blocks.1.ffn.experts.down"


@pytest.mark.parametrize(
    ("bug", "layout", "model", "kind", "module"),
    [
        slow("router_grad_unreduced", {"tp": 2}, MOE, "gradient", ROUTER),
        ("expert_grads_reduced_over_cp", {"cp": 2, "ep": 2}, MOE, "gradient", DOWN),
        slow("expert_outputs_reversed", {"cp": 2, "ep": 2}, MOE, "activation", "blocks.0.ffn"),
        slow("capacity_per_rank", {"cp": 2}, MOE, "activation", "blocks.0.ffn"),
        slow("balance_counts_per_rank", {"cp": 2}, {**MOE, "capacity_factor": None}, "gradient", ROUTER),
        slow("router_grad_unreduced", {**SEQUENCE_PARALLEL, "ep": 2}, MOE, "gradient", "norm"),
        slow("expert_grads_unreduced", {"dp_replicate": 2, "cp": 2, "ep": 2}, MOE, "gradient", DOWN),
        slow("expert_grads_unreduced", {"tp": 2}, MOE, "gradient", DOWN),
        slow("capacity_per_rank", {"tp": 2, "ep": 2}, MOE, "activation", "blocks.0.ffn"),
        slow("balance_counts_per_rank", {"tp": 2}, {**MOE, "capacity_factor": None}, "gradient", ROUTER),
        slow(
            "etp_bias_on_every_rank", {"cp": 2, "etp": 2}, BIASED, "loss", "loss"
        ),  # biases are initialized to zero
        slow("expert_outputs_reversed", {"pp": 2, "tp": 2, "ep": 2}, MOE, "activation", "blocks.0.ffn"),
    ],
)
def test_an_expert_parallel_bug_is_located(prove_bug, bug, layout, model, kind, module):
    """Expert gradients, routing, capacity and balance counts."""
    require_first_divergence(prove_bug(bug, layout, model, {"balance_loss": 0.05}), kind, module, "")


PIPELINE = {"pp": 2}
SPLIT = {"pp": 2, "schedule": "zb-h1"}
SHARDS = {"pp": 2, "dp_shard": 2}


@pytest.mark.parametrize(
    ("bug", "layout", "kind", "module", "note"),
    [
        ("pp_bf16_transfers", PIPELINE, "activation", "model", ""),
        ("pp_weight_grads_dropped", SPLIT, "gradient", "blocks.1.ffn.down", ""),
        slow("pp_tied_embedding_unreduced", PIPELINE, "gradient", "embed", "it is also head.weight"),
        slow(
            "pp_weight_grads_dropped",
            {**SHARDS, "zero": 3, "schedule": "zb-h1"},
            "gradient",
            "blocks.1.ffn.down",
            "",
        ),
        slow(
            "pp_tied_embedding_unreduced",
            {**SHARDS, "zero": 2},
            "gradient",
            "embed",
            "it is also head.weight",
        ),
        slow("pp_counted_as_data", PIPELINE, "gradient", "norm", "all gradients are 0.5 times"),
        slow("pp_loss_from_first_stage", PIPELINE, "loss", "loss", "summation of losses"),
        slow("pp_reduce_one_backward_early", {"pp": 2, "dp_replicate": 2}, "gradient", "norm", ""),
        slow("pp_micro_batches_swapped", {**PIPELINE, "schedule": "gpipe"}, "activation", "model", ""),
        slow("pp_fsdp_never_reshards", {**SHARDS, "zero": 2}, "gradient", "norm", "missing"),
    ],
)
def test_a_pipeline_bug_is_located(prove_bug, bug, layout, kind, module, note):
    """For a bug in a transfer between stages, the module is ``model``."""
    require_first_divergence(prove_bug(bug, layout), kind, module, note)


@pytest.mark.slow
def test_averaged_gradients_of_fsdp_are_located(prove_bug):
    """The gradients are DTensors: they are gathered before the comparison."""
    proof = prove_bug("fsdp_averaged_grads", {"dp_shard": 2, "zero": 3})
    require_first_divergence(proof, "gradient", "norm", HALF)


@pytest.mark.slow
def test_clipping_by_the_norm_of_local_stages_is_located(prove_bug):
    """The gradient norm is judged on every rank."""
    plain = {"optimizer": "sgd", "lr": 0.1, "clip": 0.5}
    proof = prove_bug("pp_clip_by_stage_norm", PIPELINE, train=plain)
    require_first_divergence(proof, "gradient_norm", "gradient norm", "computed wrongly")
    norms = {steps[0].grad_norm for steps in proof.steps}
    assert len(norms) == 2, "each rank clips by its own norm"
    assert max(norms) < proof.reference_steps[0].grad_norm


TINY_LR = {"lr": 1e-5}
ZERO_1, ZERO_3 = {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 3}


@pytest.mark.parametrize(
    ("bug", "layout", "train", "step", "term"),
    [
        ("no_weight_decay", ZERO_3, TINY_LR, 1, "weight decay"),
        slow("norms_decay", ZERO_1, TINY_LR, 1, "weight decay"),
        slow("no_weight_decay", {"dp_replicate": 2}, {"optimizer": "sgd"}, 1, "weight decay"),
        slow("no_weight_decay", ZERO_3, {"optimizer": "lion"}, 1, "weight decay"),
        slow("gradients_not_clipped", {"tp": 2}, {}, 1, "clipping"),
        slow("moments_restart", {"dp_replicate": 2}, {}, 2, "moment"),
        slow("step_count_restarts", ZERO_3, {}, 2, "bias correction"),
        slow("lr_of_next_step", PIPELINE, {}, 1, "lr"),
        slow("first_rows_not_gathered", ZERO_1, {}, 1, "update"),
    ],
)
def test_a_wrong_term_of_the_update_is_named(prove_bug, bug, layout, train, step, term):
    """Also with a learning rate at which ten losses would not show it."""
    first = prove_bug(bug, layout, train=train).verdict.first_divergence
    assert first is not None
    assert (first.kind, first.step, first.term) == ("update", step, term), first
    assert first.parameter is not None


def test_a_gradient_norm_that_counts_replicas_twice_is_named(prove_bug):
    """A norm that is the square root of two too large clips all gradients alike, so no gradient shows it."""
    proof = prove_bug("replicas_in_norm", ZERO_3, train=TINY_LR)
    first = require_first_divergence(proof, "gradient_norm", "gradient norm", "computed wrongly")
    assert first.difference == pytest.approx(2**0.5 - 1, rel=1e-3)


@pytest.mark.parametrize(
    ("bug", "layout", "kind", "module", "term"),
    [
        ("eval_of_rank_0_alone", {"dp_replicate": 2}, "evaluation", "held-out loss", None),
        ("moment_rows_swapped_on_load", ZERO_3, "checkpoint", "norm", "exp_avg"),
        slow("eval_without_last_sample", {"dp_shard": 2}, "evaluation", "held-out loss", None),
        slow("moment_rows_swapped_on_load", ZERO_1, "checkpoint", "norm", "exp_avg"),
        slow("moment_rows_swapped_in_file", ZERO_1, "checkpoint", "norm", "exp_avg"),
        slow("second_moment_not_loaded", {"tp": 2}, "checkpoint", "norm", "exp_avg_sq"),
        slow("position_not_loaded", PIPELINE, "checkpoint", "sample position", "sample position"),
        slow("stale_weights_saved", {"dp_replicate": 2}, "checkpoint", "blocks.0.ffn.up", "weight"),
    ],
)
def test_a_wrong_evaluation_or_checkpoint_is_named(prove_bug, bug, layout, kind, module, term):
    """The held-out loss after step 5, and a checkpoint that is saved and reloaded there."""
    first = prove_bug(bug, layout).verdict.first_divergence
    assert first is not None
    assert (first.kind, first.module, first.term, first.step) == (kind, module, term, 5), first


@pytest.mark.parametrize(
    ("bug", "layout", "kind", "module", "note"),
    [
        ("tp_last_token_of_part_lost", SEQUENCE_PARALLEL, "token", "embed", "tokens 159, 319"),
        slow("tp_last_token_of_part_lost", {"tp": 2, "dp_shard": 2}, "token", "embed", "tokens 159, 319"),
        slow("zeroed_embedding_row", {"dp_replicate": 2}, "weight", "embed", "row 3"),
        slow("tp_first_target_of_part_lost", {"tp": 2}, "token", "head", "tokens 160"),
    ],
)
def test_a_token_that_the_text_does_not_hold_is_checked(prove_bug, bug, layout, kind, module, note):
    """Bytes above 127 and ends of tensor-parallel parts are in no sample of the ten steps."""
    proof = prove_bug(bug, layout)
    assert proof.reference.tokens_read == proof.plan.job.model.vocab_size
    require_first_divergence(proof, kind, module, note)


@pytest.mark.parametrize(
    ("bug", "layout", "precision", "kind", "term"),
    [
        ("norm_keeps_loss_scale", {"tp": 2}, "fp16", "gradient_norm", None),
        slow("norm_keeps_loss_scale", ZERO_3, "fp16", "gradient_norm", None),
        slow("gradients_keep_loss_scale_on_rank_1", {"dp_replicate": 2}, "fp16", "update", "clipping"),
        slow("no_weight_decay", ZERO_3, "bf16", "update", "weight decay"),
    ],
)
def test_a_mixed_precision_bug_is_located(prove_bug, bug, layout, precision, kind, term):
    """The pass in the job's own precision; float32 has no loss scale."""
    first = prove_bug(bug, layout, precision=precision).verdict.first_divergence
    assert first is not None
    assert (first.kind, first.term) == (kind, term), first


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (ZERO_3, {}),
        ({**SEQUENCE_PARALLEL, "dp_replicate": 2}, {}),
        (SPLIT, {}),
        ({"cp": 2, "ep": 2}, MOE),
        ({"tp": 2}, GPT),
    ],
)
def test_layouts_equal_one_process_in_mixed_precision(prove_bug, layout, model, precision):
    verdict = prove_bug("", layout, model, precision=precision).verdict
    assert verdict.equal, verdict.first_divergence


def require_first_divergence(proof, kind, module, note):
    """Require this first divergence, and return it."""
    assert not proof.verdict.equal
    first = proof.verdict.first_divergence
    assert (first.kind, first.module) == (kind, module), first
    assert note in first.note
    if note in ("", "summation of losses"):
        assert note or not first.note
    assert module in first.sentence()
    assert first.difference is None if note == "missing" else first.difference > 1e-4
    assert [found.not_compared for found in proof.findings] == [[] for _ in proof.findings]
    return first
