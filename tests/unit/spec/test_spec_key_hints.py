"""Keys of other frameworks are answered with Meshwright's key, or with the reason why there is none."""

from __future__ import annotations

from collections import Counter

import pytest

from meshwright.core.errors import UserError
from meshwright.spec.job_keys import list_keys, list_tables, section_type
from meshwright.spec.key_hints import BY_NAME, HINTS, suggest_key
from meshwright.spec.load import build_job

TREE = {
    "model": {"preset": "tiny"},
    "cluster": {"preset": "h100-sxm"},
    "data": {"path": "text", "seq_len": 32},
    "train": {"steps": 4, "global_batch": 8},
}


def fixes_for(**tables) -> dict[str, str]:
    """The fixes for a job with unknown keys, by path."""
    tree = {name: dict(table) for name, table in TREE.items()}
    for name, table in tables.items():
        tree[name] = {**tree.get(name, {}), **table} if isinstance(table, dict) else table
    with pytest.raises(UserError) as caught:
        build_job(tree)
    assert {p.code for p in caught.value.problems} == {"job-unknown-key"}
    return {p.path: p.fix for p in caught.value.problems}


@pytest.mark.parametrize("hint", HINTS, ids=lambda hint: hint.names.split()[0])
def test_hints_map_foreign_names_to_existing_keys(hint):
    for key in hint.keys.split():
        assert key in list_keys() or key in list_tables()
    assert hint.keys or hint.note
    for name in hint.names.split():
        assert not {key for key in list_keys() if name in (key, key.rpartition(".")[2])}, name


def test_each_foreign_name_has_one_hint():
    assert [
        name for name, count in Counter(n for h in HINTS for n in h.names.split()).items() if count > 1
    ] == []


def test_hint_is_given_in_any_table():
    names = [name for name in BY_NAME if "." not in name]
    assert fixes_for(train=dict.fromkeys(names, 1)) == {f"train.{name}": BY_NAME[name].fix for name in names}


@pytest.mark.parametrize(
    ("tables", "path", "key"),
    [
        ({"train": {"seq_len": 8}}, "train.seq_len", "data.seq_len"),
        ({"steps": 8}, "steps", "train.steps"),
        ({"train": {"Learning-Rate": 1}}, "train.Learning-Rate", "train.lr"),
        ({"optimizer": {"lr": 1, "weight_decay": 1}}, "optimizer.weight_decay", "train.weight_decay"),
        ({"optimizer": {"name": "adamw"}}, "optimizer.name", "train.optimizer"),
        ({"parallelism": {"tensor_parallel_degree": 2}}, "parallelism.tensor_parallel_degree", "layout.tp"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage", "layout.zero"),
        ({"parallel": {"some": 1}}, "parallel.some", "layout"),
        ({"fault": {"stop_grace_s": 1.0}}, "fault.stop_grace_s", "elastic.stop_grace_s"),
        ({"train": {"compile": True}}, "train.compile", "train.block_backend"),
        ({"train": {"strategy": "fsdp"}}, "train.strategy", "layout.dp_shard"),
        ({"bf16": {"enabled": True}}, "bf16.enabled", "train.precision"),
        ({"model": {"num_experts_per_token": 2}}, "model.num_experts_per_token", "model.experts_per_token"),
        ({"model": {"use_flash_attention": True}}, "model.use_flash_attention", "fastest attention kernel"),
        ({"train": {"label_smoothing": 0.1}}, "train.label_smoothing", "not built"),
        ({"data": {"dataset_text_field": "body"}}, "data.dataset_text_field", "data.text_field"),
        ({"data": {"num_workers": 4}}, "data.num_workers", "no loader processes"),
        ({"model": {"sliding_window": 64}}, "model.sliding_window", "model.window"),
        ({"train": {"train_samples": 64}}, "train.train_samples", "samples / train.global_batch"),
    ],
)
def test_misplaced_key_is_answered_with_its_path(tables, path, key):
    assert key in fixes_for(**tables)[path]


def test_unknown_table_hides_no_other_problem():
    with pytest.raises(UserError) as caught:
        build_job({**TREE, "optimizer": {"lr": 1}, "layout": {"tp": 3}})
    assert {p.code for p in caught.value.problems} == {"job-unknown-key", "layout-tp-heads"}


def test_key_without_similar_names_lists_all_keys():
    assert all(table in suggest_key("foo.bar") for table in list_tables())
    assert "eval_samples" in suggest_key("train.zzz", section_type(["train"]))
