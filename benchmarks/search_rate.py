"""Layouts per second of the planner, and the time to search a large job.

    python benchmarks/search_rate.py [MODEL] [--on 128x8xa100-80g-sxm] [--batch 1536] [--seq-len 2048]

On one core, it prints the layouts per second if memory bound and step time are computed for every layout
without pruning, the part of that time to list the layouts, and time and counts of the search of ``plan``.
"""

from __future__ import annotations

import argparse
import time

from meshwright.plan.estimate.workload import Workload
from meshwright.plan.search.find import find_layouts
from meshwright.plan.search.memory_bound import EndCosts, PeakBound
from meshwright.plan.search.space import LayoutSpace
from meshwright.plan.time.engine import estimate_step
from meshwright.spec.load import load_job

CHUNK_LAYOUTS = 1 << 14


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="gpt3-175b")
    parser.add_argument("--on", default="128x8xa100-80g-sxm")
    parser.add_argument("--batch", type=int, default=1536)
    parser.add_argument("--seq-len", type=int, default=2048)
    args = parser.parse_args()
    overrides = [f"train.global_batch={args.batch}", f"data.seq_len={args.seq_len}"]
    job = load_job(args.model, overrides, args.on, to_run=False)
    workload, bound = Workload.of(job), PeakBound(job)
    space_s = estimate_s = 0.0
    count = 0
    mark = time.perf_counter()
    for chunk in LayoutSpace(job, job.cluster.world_size).chunks(CHUNK_LAYOUTS):
        grid = chunk.expand_schedules()
        listed = time.perf_counter()
        bound.needed_bytes(grid, EndCosts.of(estimate_step(workload, grid)))
        space_s, estimate_s = space_s + listed - mark, estimate_s + time.perf_counter() - listed
        count += len(grid)
        mark = time.perf_counter()
    total = space_s + estimate_s
    print(f"{args.model} on {args.on}, {job.cluster.world_size} devices")
    print(f"all layouts without pruning: {count:,} in {total:.2f} s, {count / total:,.0f} layouts/s")
    print(f"  {total / count * 1e6:.2f} us per layout, {space_s / count * 1e6:.2f} us of it to list it")
    found = find_layouts(job, {}, 50)
    print(f"search as in plan, also on parts of the cluster: {found.seconds:.2f} s")
    rate = found.evaluated / found.seconds
    print(f"  {found.evaluated:,} estimated ({rate:,.0f}/s), {found.may_fit:,} may fit")
    print(f"  {found.checked:,} predicted exactly, {len(found.best):,} of them fit")
    print(f"  {found.pruned:,} pruned by bounds, {found.illegal:,} combinations refused by legality rules")


if __name__ == "__main__":
    main()
