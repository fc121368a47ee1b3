"""Layouts per second of the planner, and the time to search a large job.

    python benchmarks/search_rate.py [MODEL] [--on 128x8xa100-80g-sxm] [--batch 1536] [--seq-len 2048]

Prints, on one core: layouts per second with memory bound and time computed for every layout of the space,
without pruning; the share of the search itself; and the time and counts of the search as ``plan`` runs it.
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

PRICED_AT_ONCE = 1 << 14


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="gpt3-175b")
    parser.add_argument("--on", default="128x8xa100-80g-sxm")
    parser.add_argument("--batch", type=int, default=1536)
    parser.add_argument("--seq-len", type=int, default=2048)
    asked = parser.parse_args()
    overrides = [f"train.global_batch={asked.batch}", f"data.seq_len={asked.seq_len}"]
    job = load_job(asked.model, overrides, asked.on, to_run=False)
    workload, bound = Workload.of(job), PeakBound(job)
    made_s = priced_s = 0.0
    count = 0
    mark = time.perf_counter()
    for chunk in LayoutSpace(job, job.cluster.world_size).chunks(PRICED_AT_ONCE):
        grid = chunk.expand_schedules()
        made = time.perf_counter()
        bound.needed_bytes(grid, EndCosts.of(estimate_step(workload, grid)))
        made_s, priced_s = made_s + made - mark, priced_s + time.perf_counter() - made
        count += len(grid)
        mark = time.perf_counter()
    total = made_s + priced_s
    print(f"{asked.model} on {asked.on}, {job.cluster.world_size} devices")
    print(f"every layout, nothing pruned: {count:,} in {total:.2f} s, {count / total:,.0f} layouts/s")
    print(f"  the search's own part: {made_s / count * 1e6:.2f} us of {total / count * 1e6:.2f} us a layout")
    found = find_layouts(job, {}, 50)
    print(f"the search, even parts of the cluster too: {found.seconds:.2f} s")
    print(
        f"  {found.evaluated:,} priced ({found.evaluated / found.seconds:,.0f}/s), {found.may_fit:,} may fit"
    )
    print(f"  {found.checked:,} checked exactly, {len(found.best):,} of them fit")
    print(f"  {found.pruned:,} ruled out by bounds, {found.illegal:,} combinations by rules")


if __name__ == "__main__":
    main()
