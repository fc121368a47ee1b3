"""Peak memory of pipelines with split backward under ZeRO: the ledger against dry runs."""

from __future__ import annotations

import json

import pytest

from meshwright.cli.dry_run import dry_run_job
from meshwright.cli.output import Output

TOLERANCE = 0.03
SMALL = (
    "cluster.device=cpu", "model.hidden_size=256", "model.num_layers=4", "model.vocab_size=1024",
    "model.num_heads=4",
    "model.num_kv_heads=2", "data.seq_len=64", "train.global_batch=8", "layout.micro_batch=1",
    "layout.pp=2", "layout.dp_shard=2",
)  # fmt: skip
DENSE = ("llama3-405b", "model.ffn_size=832")
EXPERTS = ("mixtral-8x7b", "model.ffn_size=448", "model.num_experts=4")
CASES = [
    (DENSE, "schedule=zbv zero=1"),
    (DENSE, "schedule=zbv zero=2"),
    (DENSE, "schedule=zbv zero=3 recompute=full"),
    (DENSE, "schedule=zbv zero=3", "model.vocab_size=16384"),
    (DENSE, "schedule=zb-h1 zero=2 recompute=selective tp=2"),
    (DENSE, "schedule=zb-h1 zero=2 recompute=selective", "data.seq_len=2048"),
    (DENSE, "schedule=dualpipe-v zero=3"),
    (DENSE, "schedule=interleaved zero=3 virtual_stages=2"),
    (EXPERTS, "schedule=zbv zero=3"),
    (EXPERTS, "schedule=dualpipe-v zero=2"),
]


QUICK = ("schedule=zbv zero=2",)


def as_parameters() -> list:
    """``make test`` has one dense layout."""
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(*(*case, ())[:3], marks=marks[case[1] in QUICK]) for case in CASES]


@pytest.mark.parametrize(("model", "layout", "more"), as_parameters())
def test_peak_of_every_pp_rank_is_predicted(capfd, model, layout, more):
    """The ledger counts gathered groups of idle stages, full gradients and reduce-scatter inputs of W."""
    preset, *shape = model
    asked = [*SMALL, *shape, *(f"layout.{key}" for key in layout.split())]
    asked += [more] if more else []
    for rank in range(0, 8 if "tp=2" in layout else 4, 4 if "tp=2" in layout else 2):
        capfd.readouterr()
        dry_run_job(Output(as_json=True), preset, asked, rank, None)
        rows = {row["kind"]: row for row in json.loads(capfd.readouterr().out)["state"]}
        measured, predicted = rows["peak"]["measured"], rows["peak"]["predicted"]
        assert measured == pytest.approx(predicted, rel=TOLERANCE), (rank, measured / predicted - 1)
