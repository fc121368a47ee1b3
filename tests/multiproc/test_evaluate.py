"""``meshwright eval``: loss, perplexity and accuracy of saved models on several held-out sets."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.checkpoint.hf.export import export_checkpoint
from meshwright.core.errors import UserError
from meshwright.data.dataset import TokenDataset
from meshwright.data.prepare import CorpusSpec, prepare_corpus
from meshwright.train.generate import GenerateTask, load_model


@pytest.fixture
def trained(train):
    """A run of two steps on one rank."""
    return train("layout.dp_replicate=1", "train.steps=2")


def test_held_out_loss_equals_that_of_the_run_and_of_its_export(trained, prepared, corpus, tmp_path):
    """The first 16 samples are those of the run's own evaluation; accuracy is counted from all logits."""
    (found,) = mw.evaluate(trained.run_dir, {"own": prepared}, samples=16)
    assert found.loss == pytest.approx(trained.result["eval_loss"], rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert (found.samples, found.targets) == (16, 16 * 32)
    rows = TokenDataset.open(prepared, "eval", 32).read(np.arange(16))
    model = load_model(GenerateTask(trained.result["checkpoint"]))
    with torch.no_grad():
        best = model(torch.from_numpy(rows.tokens)).argmax(-1)
    assert found.accuracy == float((best == torch.from_numpy(rows.targets)).float().mean()) > 0
    export_checkpoint(Path(trained.result["checkpoint"]), tmp_path / "hf", None, 10**9)
    (exported,) = mw.evaluate(tmp_path / "hf", [f"own={prepared}"], "data.seq_len=32", samples=16)
    assert exported.loss == pytest.approx(found.loss, rel=1e-6)
    # Several sets, each under its name; of a text every document counts.
    first, second = mw.load_run(trained.run_dir).evaluate([str(prepared), f"all={corpus}"])
    assert (first.name, second.name) == ("bytes", "all")
    assert second.samples > 5 * first.samples


def test_experts_have_the_capacity_of_training(train, prepared):
    """The loss of the run's own evaluation, in which tokens beyond the capacity are dropped."""
    experts = ("model.num_experts=4", "model.experts_per_token=2", "model.expert_ffn_size=64")
    run = train("layout.dp_replicate=1", "train.steps=1", *experts, "model.capacity_factor=0.5")
    (found,) = mw.evaluate(run.run_dir, prepared, samples=16)
    assert found.loss == pytest.approx(run.result["eval_loss"], rel=1e-6)


def test_packed_documents_and_masked_prompts_count_like_in_training(train, tmp_path):
    """A run on instructions: the same loss with the same keys, over answers only."""
    lines = [f'{{"prompt": "say {n}", "answer": "it is {n} and {n}"}}' for n in range(64)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    spec = CorpusSpec(
        sources=(str(tmp_path / "chat.jsonl"),),
        out=str(tmp_path / "chat"),
        eval_fraction=0.5,
        template="plain",
    )
    prepare_corpus(spec, Path())
    keys = ("data.mask=document", "data.prompt_masking=true")
    run = train("layout.dp_replicate=1", "train.steps=1", f"data.path={tmp_path / 'chat'}", *keys)
    (found,) = mw.evaluate(run.run_dir, tmp_path / "chat", samples=16)
    assert found.loss == pytest.approx(run.result["eval_loss"], rel=1e-6)
    assert 0 < found.targets < 0.8 * found.samples * 32


@pytest.mark.parametrize("norm", [pytest.param("group", marks=pytest.mark.slow), "batch"])
def test_images_have_top_1_accuracy(train, job_file, norm):
    """The loss of the run's own evaluation, with the running statistics of batch norm."""
    text = job_file.read_text().replace('preset = "tiny"', 'preset = "resnet-tiny"\nimage_size = 16')
    head, rest = text.split("[data]")
    job_file.write_text(head + '[data]\npath = "builtin:synthetic-images"\n' + rest[rest.index("[train]") :])
    run = train("layout.dp_replicate=1", f"model.norm={norm}", "layout.micro_batch=4", "train.steps=3")
    (found,) = mw.evaluate(run.run_dir, "builtin:synthetic-images", samples=16)
    assert found.loss == pytest.approx(run.result["eval_loss"], rel=1e-5)
    assert found.accuracy in {n / 16 for n in range(17)}
    assert (found.name, found.targets) == ("synthetic-images", 16)


def test_sets_and_keys_that_do_not_match_are_refused(trained, corpus, tmp_path):
    """Each with its code, before a sample is evaluated."""
    other = tmp_path / "other"
    spec = CorpusSpec(sources=(str(corpus),), out=str(other), tokenizer="bpe:300")
    prepare_corpus(spec, Path())
    cases = [
        ("eval-set-name", trained.run_dir, [f"a={corpus}", f"a={other}"], ()),
        ("eval-no-data", trained.run_dir, [], ()),
        ("eval-override", trained.run_dir, corpus, ("train.lr=1",)),
        ("eval-override", trained.run_dir, corpus, ("data.path=x",)),
        ("job-unknown-key", trained.run_dir, corpus, ("data.seqlen=1",)),
        ("data-path-missing", trained.run_dir, tmp_path / "nowhere.txt", ()),
        ("eval-tokenizer", trained.run_dir, other, ()),
        ("checkpoint-missing", tmp_path, corpus, ()),
    ]
    for code, model, data, overrides in cases:
        with pytest.raises(UserError) as caught:
            mw.evaluate(model, data, *overrides)
        assert [problem.code for problem in caught.value.problems] == [code], code


SETS = """
[[data.eval]]
name = "old"
path = "old.txt"
[[data.eval]]
name = "own"
path = "{prepared}"
"""


@pytest.mark.parametrize(
    "layout",
    [
        "layout.dp_replicate=2",
        *(pytest.param(f"layout.{key}=2", marks=pytest.mark.slow) for key in ("dp_shard", "tp", "pp")),
    ],
)
def test_training_evaluates_named_sets(train, job_file, prepared, tmp_path, layout):
    """Losses of `meshwright eval`, at every evaluation; the audit counts each set's collectives."""
    text = "".join(f"{n} green bottles hanging on the wall\n" for n in range(200))
    (tmp_path / "old.txt").write_text(text)
    head, rest = job_file.read_text().split("[train]")
    job_file.write_text(head + SETS.format(prepared=prepared) + "[train]" + rest)
    run = train(layout, "train.steps=4", "train.eval_every=2")
    losses = run.result["eval_losses"]
    assert losses.keys() == {"old", "own"}
    assert losses["own"] == pytest.approx(run.result["eval_loss"], rel=1e-6)
    old, own = mw.evaluate(run.run_dir, {"old": tmp_path / "old.txt", "own": prepared}, samples=16)
    assert losses["old"] == pytest.approx(old.loss, rel=1e-5)
    assert losses["own"] == pytest.approx(own.loss, rel=1e-5)
    assert f", old {losses['old']:.4f}, " in run.messages
    chart = mw.load_run(run.run_dir).report().loss_chart()
    assert [series.name for series in chart.series] == ["training", "held out", "old", "own"]
    assert [len(series.segments[0]) for series in chart.series] == [4, 2, 2, 2]


def test_sets_of_one_name_are_refused(job_file, prepared):
    head, rest = job_file.read_text().split("[train]")
    job_file.write_text(head + SETS.format(prepared=prepared).replace("own", "old") + "[train]" + rest)
    with pytest.raises(UserError) as caught:
        mw.load_job(job_file)
    assert [problem.code for problem in caught.value.problems] == ["data-eval-name"]
