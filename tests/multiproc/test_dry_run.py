"""Dry runs against real ranks: the same bytes, the same state, the same peak, without any of them."""

from __future__ import annotations

import json

import pytest

from meshwright.cli.dry_run import dry_run_job
from meshwright.cli.output import Output


@pytest.fixture
def dry_run(job_file, capfd):
    """Rehearse a rank of the tiny job from inside the test."""

    def run(*overrides, rank=0, expect=0):
        capfd.readouterr()
        status = dry_run_job(Output(as_json=True), str(job_file), overrides, rank, None)
        out, err = capfd.readouterr()
        assert status == expect, err
        return json.loads(out)

    return run


def moved(rows, place, phases=("setup", "step")):
    """What a rank at a place of its pipeline moves; most is the same at every place."""
    keys = ("axis", "op", "phase", "ranks", "calls", "bytes")
    own = [row for row in rows if row["phase"] in phases and row.get("pp_rank", place) == place]
    return sorted(tuple(row[key] for key in keys) for row in own)


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ("dp_shard=4 zero=3 micro_batch=1", 3),
        ("dp_replicate=2 dp_shard=2 zero=3", 1),
        ("dp_shard=3 zero=1 micro_batch=2", 2),
        ("dp_replicate=2 micro_batch=3", 1),
        ("pp=2 micro_batch=3", 1),
        ("pp=2 dp_shard=2 zero=3 schedule=zb-h1 micro_batch=3", 2),
    ],
)
def test_a_dry_run_equals_a_real_rank(train, dry_run, layout, rank):
    """The first step of real gloo ranks and of a fake one: equal collectives, state, activations and peak."""
    overrides = [*(f"layout.{key}" for key in layout.split()), "train.steps=1", "train.eval_every=1"]
    real = train(*overrides)
    rehearsed = dry_run(*overrides, rank=rank)
    place = rank // (real.result["world_size"] // (2 if "pp=2" in layout else 1))
    assert moved(rehearsed["collectives"], place) == moved(real.result["collectives"], place)
    events = [json.loads(line) for line in (real.run_dir / "events.jsonl").read_text().splitlines()]
    [measured] = [e for e in events if e["event"] == "state" and e["rank"] == rank]
    found = {row["kind"]: row["measured"] for row in rehearsed["state"]}
    assert found.pop("activations") == measured["activation_bytes"]
    assert found.pop("peak") == measured["peak_bytes"]
    assert found == measured["state_bytes"]


def test_a_dry_run_of_a_compiled_job_uses_eager_blocks(dry_run):
    """With the stream that eager blocks have; the plan beside it is of those."""
    wide = [
        "model.hidden_size=256",
        "model.num_heads=4",
        "model.num_kv_heads=4",
        "layout.recompute=selective",
    ]
    compiled = ["train.block_backend=compile", "train.precision=bf16", "train.residual_dtype=bf16"]
    kept = {}
    for name, keys in {"eager": ["train.precision=bf16"], "compiled": compiled}.items():
        rehearsed = dry_run("layout.dp_replicate=1", *wide, *keys)
        kept[name] = {row["kind"]: (row["predicted"], row["measured"]) for row in rehearsed["state"]}
    assert kept["compiled"] == kept["eager"]
