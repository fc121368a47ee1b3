"""False alarms of the audit: trains 30 layouts of tiny models several times and counts the failed audits.

Nothing in these runs differs from the plan, so every failed audit is a false alarm. More ranks than cores run
at once, so that transfers and ranks are delayed in many ways.

    python benchmarks/audit_alarms.py [--repeats 10] [--only zero=3] [--json FILE]

It prints one line per layout: failed audits, and the largest deviation of activations and peak. The exit
status is 3 if an audit failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.launch.environment import prepare_environment

os.environ["OMP_NUM_THREADS"] = "1"
prepare_environment(threads=1)

from meshwright.api import load_job  # noqa: E402
from meshwright.core.errors import CheckFailedError  # noqa: E402
from meshwright.data.prepare import CorpusSpec, prepare_corpus  # noqa: E402
from meshwright.report import html  # noqa: E402

JOB = """
[model]
preset = "tiny"
num_layers = 4
[data]
path = "{data}"
seq_len = 32
[train]
steps = 2
global_batch = 8
eval_samples = 4
[cluster]
device = "cpu"
devices_per_node = 2
matmul_flops_per_s = 1e11
"""
WIDE = "model.hidden_size=192 model.num_heads=12 model.num_kv_heads=4 model.ffn_size=512"
NARROW = "model.hidden_size=32 model.ffn_size=64"
GPT = (
    "model.positions=learned model.norm=layer model.activation=gelu_tanh model.attention_bias=true "
    "model.ffn_bias=true model.max_positions=32 model.num_kv_heads=4"
)
EXPERTS = "model.num_experts=4 model.experts_per_token=2 model.expert_ffn_size=48"
LAYOUTS = (
    "dp_replicate=1",
    f"dp_replicate=2 micro_batch=2 {GPT}",
    "dp_replicate=4",
    "dp_shard=2 zero=1",
    "dp_shard=2 zero=2",
    "dp_shard=2 zero=3",
    f"dp_shard=4 zero=3 {NARROW}",
    f"dp_shard=3 zero=3 micro_batch=1 {GPT}",
    f"dp_shard=4 zero=3 recompute=full {NARROW}",
    f"dp_shard=2 zero=3 accumulate=deferred micro_batch=1 {NARROW}",
    "dp_replicate=2 dp_shard=2 zero=2 recompute=selective",
    "tp=2",
    f"tp=4 sequence_parallel=true {GPT}",
    "tp=2 dp_shard=2 zero=3 recompute=full",
    "cp=2 context=ring",
    "cp=2 context=ulysses dp_shard=2 zero=1",
    "pp=2 schedule=gpipe micro_batch=1",
    "pp=2 tp=4 schedule=gpipe recompute=full micro_batch=1",
    f"pp=2 tp=4 schedule=gpipe recompute=full {NARROW}",
    "pp=4 schedule=1f1b recompute=full",
    f"pp=2 schedule=1f1b recompute=full {GPT}",
    "pp=2 dp_shard=2 zero=3 schedule=1f1b recompute=selective",
    "pp=2 schedule=interleaved virtual_stages=2 tp=2 recompute=full",
    "pp=2 schedule=zb-h1 dp_replicate=2 micro_batch=1",
    "pp=2 schedule=zbv dp_shard=2 zero=3 micro_batch=1",
    "pp=2 schedule=dualpipe-v zero=0 micro_batch=1",
    f"dp_shard=2 ep=2 zero=3 {EXPERTS}",
    f"cp=2 ep=2 {EXPERTS}",
    f"pp=2 tp=2 etp=2 zero=0 {EXPERTS}",
    f"pp=2 dp_shard=2 ep=2 zero=1 schedule=gpipe recompute=full {EXPERTS}",
)
"""Layout keys; with a dot: keys of other sections."""


def list_overrides(layout: str) -> Iterator[str]:
    """The settings of a layout as overrides of the job."""
    for word in layout.split():
        yield word if "." in word.partition("=")[0] else f"layout.{word}"


def run_layout(job: Path, layout: str, folder: Path) -> dict[str, Any]:
    """Train once; returns the differences and the largest deviations of the audit."""
    run = load_job(job, *list_overrides(layout), f"run_dir={folder}", to_run=True).train()
    audit = run.audit()
    deviations = {
        kind: [
            (row.measured or 0) / row.predicted - 1
            for row in audit.state
            if row.kind == kind and row.predicted
        ]
        for kind in ("activations", "peak")
    }
    peaks = {row.rank: (row.predicted, row.measured) for row in audit.state if row.kind == "peak"}
    return {"layout": layout, "differences": list(audit.differences), "peaks": peaks, **deviations}


def main() -> int:
    """Run every layout and print what failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", default="", help="only layouts that contain this text")
    parser.add_argument("--json", type=Path, help="write every audit to this file")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    html.can_draw = lambda: False  # charts take as long as a run
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data, job = folder / "data", folder / "job.toml"
        spec = CorpusSpec(sources=(str(Path(__file__).parent),), out=str(data), eval_fraction=0.125)
        prepare_corpus(spec, folder)
        job.write_text(JOB.format(data=data))
        for number, layout in enumerate(layout for layout in LAYOUTS if options.only in layout):
            audits = [run_layout(job, layout, folder / f"{number}-{time}") for time in range(options.repeats)]
            found += audits
            failed = [audit for audit in audits if audit["differences"]]
            extremes = [
                f"{kind} {min(map(min, values)):+.1%} to {max(map(max, values)):+.1%}"
                for kind in ("activations", "peak")
                if (values := [audit[kind] for audit in audits])
            ]
            print(f"{len(failed)} of {len(audits)} failed: {', '.join(extremes)}: {layout}", flush=True)
            for difference in sorted({text for audit in failed for text in audit["differences"]}):
                print(f"    {difference}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    alarms = sum(bool(audit["differences"]) for audit in found)
    print(f"{alarms} false alarms in {len(found)} runs")
    return CheckFailedError.exit_status if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
