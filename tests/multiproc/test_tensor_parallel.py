"""Tensor and sequence parallelism on real ranks: the one-process loss, every byte as predicted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reference_runs import (
    TEN_STEPS,
    ResumeChecker,
    max_relative_diff,
    reference_losses,
    require_equal_losses_and_plan,
)

from meshwright.cli.generate import write_text
from meshwright.cli.output import Output
from meshwright.core.errors import UserError

GPT = "model.positions=learned model.max_positions=32 model.norm=layer model.activation=gelu "
GPT += "model.attention_bias=true model.ffn_bias=true model.vocab_size=321"
UNTIED = "model.tied_embeddings=false train.optimizer=lion train.grad_noise=0.01"


@pytest.mark.parametrize(
    ("layout", "job", "tolerance"),
    [
        ("tp=2", "", 1e-5),
        pytest.param("tp=2 sequence_parallel=true micro_batch=1", GPT, 1e-5, marks=pytest.mark.slow),
        pytest.param(
            "tp=4 sequence_parallel=true", f"{GPT} model.num_kv_heads=1", 1e-5, marks=pytest.mark.slow
        ),
        pytest.param(
            "tp=2 sequence_parallel=true recompute=selective micro_batch=2", "", 1e-5, marks=pytest.mark.slow
        ),
        pytest.param("tp=2 recompute=full", UNTIED, 1e-5, marks=pytest.mark.slow),
        pytest.param(
            "tp=2 dp_replicate=2 sequence_parallel=true micro_batch=3", "", 1e-5, marks=pytest.mark.slow
        ),
        pytest.param("tp=2 dp_shard=2 zero=1", GPT, 1e-5, marks=pytest.mark.slow),
        pytest.param("tp=2 dp_shard=2 zero=2 micro_batch=2", GPT, 1e-5, marks=pytest.mark.slow),
        pytest.param(
            "tp=2 dp_shard=2 zero=3 sequence_parallel=true recompute=full", "", 1e-5, marks=pytest.mark.slow
        ),
        ("tp=2 sequence_parallel=true", "train.precision=bf16", 1e-2),
        pytest.param(
            "tp=2 dp_shard=2 zero=3 sequence_parallel=true",
            "train.precision=fp16 data.mask=document",
            1e-2,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_losses_equal_one_process_and_the_plan_holds(train, layout, job, tolerance):
    """Ten losses as in one process; state and collectives equal to the byte, activations and peak within 5%.

    A vocabulary of 321 is padded on 2 and 4 ranks; one key head is replicated on 4 ranks.
    """
    assert require_equal_losses_and_plan(train, "tp", layout, job, tolerance) == {"step", "eval"}


def test_a_block_has_four_all_reduces(train):
    """Two in the forward pass and two in the backward pass; embedding and head have one each."""
    result = train("layout.tp=2", "model.num_layers=3", "layout.micro_batch=12").result
    wanted = {"axis": "tp", "op": "all_reduce", "phase": "step"}
    [row] = [row for row in result["collectives"] if row.items() >= wanted.items()]
    of_the_loss = 2  # its 384 tokens are one chunk
    assert row["calls"] == len(result["losses"]) * (4 * 3 + 2 + of_the_loss)


def test_a_separate_reduction_per_linear_fails_the_audit(train, monkeypatch):
    """Each column-parallel linear reduces its own input gradient: equal losses, but unplanned all-reduces."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:unprepared_inputs")
    trained = train("layout.tp=2", *TEN_STEPS, expect=3)
    assert max_relative_diff(trained.losses, reference_losses(train)) < 1e-5
    [row] = [row for row in trained.result["collectives"] if row["calls"] != row["predicted_calls"]]
    assert (row["axis"], row["op"]) == ("tp", "all_reduce")
    assert row["calls"] > row["predicted_calls"]


@pytest.mark.slow
def test_compiled_blocks_equal_one_process(train):
    """Collectives inside compiled graphs are still counted, forward and backward."""
    compiled = ("train.block_backend=compile", "train.compile_backend=aot_eager")
    for layout in ("layout.recompute=selective", "layout.sequence_parallel=true"):
        split = train("layout.tp=2", layout, *TEN_STEPS, *compiled)
        assert max_relative_diff(split.losses, reference_losses(train)) < 1e-5
        assert split.result["audit_ok"], split.result["differences"]


@pytest.mark.slow
def test_checkpoints_resume_in_other_layouts(train, tmp_path):
    """Tensor parallel resumes bit-identically; other layouts up to rounding, and the other way."""
    runs, ddp = ResumeChecker(train, tmp_path, *GPT.split()), ("layout.dp_replicate=2",)
    split = ("layout.tp=2", "layout.dp_shard=2", "layout.sequence_parallel=true")
    runs.require_bit_identical(split)
    runs.require_equal_losses(split, ddp)
    runs.require_equal_losses(ddp, split)
    runs.require_equal_losses(ddp, (*split, "layout.zero=1"))


def test_generate_with_tensor_parallel_writes_the_text_of_one_process(train, capfd):
    """The vocabulary is padded. Errors of the ranks reach the caller."""
    checkpoint = Path(train("layout.tp=2", "model.vocab_size=321").result["checkpoint"])

    def written(tp):
        capfd.readouterr()
        settings = {"prompt": "the ", "tokens": 12, "template": None, "tp": tp}
        assert write_text(Output(as_json=True), checkpoint, settings) == 0
        return json.loads(capfd.readouterr().out)["text"]

    assert written(1) == written(2) != ""
    with pytest.raises(UserError) as caught:
        written(3)
    assert [problem.code for problem in caught.value.problems] == ["layout-tp-heads"]
    (checkpoint / "tokenizer.json").write_text("{")
    for tp in (1, 2):
        with pytest.raises(UserError):
            written(tp)
