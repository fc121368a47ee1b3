"""Prompt masking and document masks on real ranks: equal losses on one and three ranks."""

from __future__ import annotations

import json

import pytest

import meshwright as mw
from meshwright.core.events import read_events

SETTINGS = ("data.path=qa.jsonl", "data.template=plain", "data.mask=document", "data.prompt_masking=true")


@pytest.fixture
def pairs(tmp_path):
    """Prompts of different lengths, some many rows long, with short answers."""
    lines = [
        json.dumps({"prompt": f"question {n}? " * (30 if n % 4 == 0 else 1), "answer": f"answer {n}"})
        for n in range(40)
    ]
    (tmp_path / "qa.jsonl").write_text("\n".join(lines))


def steps_of(trained):
    events = read_events(trained.run_dir / "events.jsonl").events
    return [e for e in events if e["event"] == "step" and e["rank"] == 0]


def test_one_and_three_ranks_have_equal_losses_with_prompt_masking_and_document_masks(train, pairs):
    """Two samples on three ranks: one rank has zero-weight samples only. Some steps have no target."""
    settings = (*SETTINGS, "data.eval_fraction=0.2", "train.global_batch=2", "train.steps=12")
    one, three = (train(*settings, f"layout.dp_replicate={ranks}") for ranks in (1, 3))
    counts = [step["tokens"] for step in steps_of(one)]
    assert 0 in counts, "no batch without targets"
    assert max(counts) > 0
    assert counts == [step["tokens"] for step in steps_of(three)]
    assert [loss is None for loss in one.losses] == [count == 0 for count in counts]
    assert [loss is None for loss in three.losses] == [count == 0 for count in counts]
    losses = [[loss for loss in run.losses if loss is not None] for run in (one, three)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert f"{counts.count(0)} of 12 steps had no target tokens" in three.messages
    assert one.result["tokens_per_s"] > 0
    assert "not finite" not in (three.run_dir / "report.html").read_text()
    assert three.result["eval_loss"] == pytest.approx(one.result["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("template", ["chatml", "mine.jinja"])
def test_checkpoints_keep_the_chat_template(train, pairs, tmp_path, template):
    """`generate --chat` and `eval` use it without naming it, also when its file is gone."""
    mine = tmp_path / "mine.jinja"
    mine.write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    run = train("data.path=qa.jsonl", f"data.template={template}", "train.steps=1", "layout.dp_replicate=1")
    sample = {"tokens": 4, "temperature": 0.0}
    given = str(mine) if template == "mine.jinja" else template
    expected = mw.generate(run.run_dir, "hi", template=given, **sample)
    (named,) = mw.evaluate(run.run_dir, tmp_path / "qa.jsonl", f"data.template={given}")
    mine.unlink()
    assert mw.generate(run.run_dir, "hi", chat=True, **sample) == expected
    (kept,) = mw.evaluate(run.run_dir, tmp_path / "qa.jsonl")
    assert (kept.loss, kept.targets) == (named.loss, named.targets)


def test_evaluations_of_masked_prompts_alone_are_planned(train, tmp_path):
    """They have no loss, and their collectives are counted: the audit passes."""
    lines = [json.dumps({"prompt": f"question {n}? " * 30, "answer": "yes"}) for n in range(40)]
    (tmp_path / "qa.jsonl").write_text("\n".join(lines))
    evaluated = ("train.eval_samples=1", "train.eval_every=2", "train.steps=4")
    trained = train(*SETTINGS, "data.eval_fraction=0.2", *evaluated, "layout.dp_replicate=2")
    assert trained.result["eval_loss"] is None
    calls = [row["calls"] for row in trained.result["collectives"] if row["phase"] == "eval"]
    assert calls == [2]
