"""A dry run of one rank has the collectives, state and peak of the real rank."""

from __future__ import annotations

import json

import pytest

from meshwright.cli.dry_run import dry_run_job
from meshwright.cli.output import Output


@pytest.fixture
def dry_run(job_file, capfd):
    """Dry-run one rank of the tiny job."""

    def run(*overrides, rank=0, expect=0):
        capfd.readouterr()
        status = dry_run_job(Output(as_json=True), str(job_file), overrides, rank, None)
        out, err = capfd.readouterr()
        assert status == expect, err
        return json.loads(out)

    return run


def collectives_of(rows, pp_rank, phases=("setup", "step")):
    """The collectives of a pp rank; rows without a pp rank hold for all."""
    keys = ("axis", "op", "phase", "ranks", "calls", "bytes")
    own = [row for row in rows if row["phase"] in phases and row.get("pp_rank", pp_rank) == pp_rank]
    return sorted(tuple(row[key] for key in keys) for row in own)


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        pytest.param("dp_shard=4 zero=3 micro_batch=1", 3, marks=pytest.mark.slow),
        pytest.param("dp_replicate=2 dp_shard=2 zero=3", 1, marks=pytest.mark.slow),
        ("dp_shard=3 zero=1 micro_batch=2", 2),
        ("dp_replicate=2 micro_batch=3", 1),
        pytest.param("pp=2 micro_batch=3", 1, marks=pytest.mark.slow),
        ("pp=2 dp_shard=2 zero=3 schedule=zb-h1 micro_batch=3", 2),
    ],
)
def test_a_dry_run_equals_a_real_rank(train, dry_run, layout, rank):
    """Collectives, state, activations and peak of the first step, against a real gloo rank."""
    overrides = [*(f"layout.{key}" for key in layout.split()), "train.steps=1", "train.eval_every=1"]
    real = train(*overrides)
    dry = dry_run(*overrides, rank=rank)
    pp_rank = rank // (real.result["world_size"] // (2 if "pp=2" in layout else 1))
    assert collectives_of(dry["collectives"], pp_rank) == collectives_of(real.result["collectives"], pp_rank)
    events = [json.loads(line) for line in (real.run_dir / "events.jsonl").read_text().splitlines()]
    [measured] = [e for e in events if e["event"] == "state" and e["rank"] == rank]
    found = {row["kind"]: row["measured"] for row in dry["state"]}
    assert found.pop("activations") == measured["activation_bytes"]
    assert found.pop("peak") == measured["peak_bytes"]
    assert found == measured["state_bytes"]


def test_a_dry_run_of_a_compiled_job_uses_eager_blocks(dry_run):
    """It measures and predicts eager blocks with a float32 residual stream, whatever the job's dtype."""
    wide = [
        "model.hidden_size=256",
        "model.num_heads=4",
        "model.num_kv_heads=4",
        "layout.recompute=selective",
    ]
    compiled = ["train.block_backend=compile", "train.precision=bf16", "train.residual_dtype=bf16"]
    kept = {}
    for name, keys in {"eager": ["train.precision=bf16"], "compiled": compiled}.items():
        dry = dry_run("layout.dp_replicate=1", *wide, *keys)
        kept[name] = {row["kind"]: (row["predicted"], row["measured"]) for row in dry["state"]}
    assert kept["compiled"] == kept["eager"]
