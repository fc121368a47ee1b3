"""The planner agrees with itself: what it shows, what it writes, what it enforces, and what it says again.

The cases are all model presets on all cluster presets with 1, 8, 64 and 512 devices (``planner_matrix``).
``planner_checks`` has what must hold of each. CONTRIBUTING.md says how to run one shard and how to resume.
"""

from __future__ import annotations

import sys
import time
import traceback

import pytest

from meshwright.spec.presets import preset_names
from planner_checks import find_contradictions
from planner_matrix import (
    SAMPLE,
    SHARDS,
    SIZES,
    Case,
    Results,
    choose_sample,
    list_cases,
    list_shard,
    pairs_of,
    source_digest,
    values_of,
)

CHOSEN = choose_sample()


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_the_layout_shown_is_the_layout_written_and_enforced(case, tmp_path):
    """Proves for one case that ``plan`` and ``plan -o`` agree.

    The first layout is accepted by ``-o``, equals the written plan and is planned alike when it is given.
    Every layout shown fits. Where nothing fits, both commands say so.
    """
    contradictions = find_contradictions(case, tmp_path)
    assert not contradictions, "\n".join(contradictions)


@pytest.fixture
def results(request, tmp_path):
    """The recorded cases of a shard, kept in pytest's cache while the sources stay the same."""
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir(f"planner-matrix-{source_digest()}") if cache else tmp_path
    return lambda shard: Results(folder / f"shard-{shard:02d}.jsonl")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("shard", range(SHARDS), ids=lambda shard: f"shard-{shard:02d}")
def test_every_case_of_a_shard_agrees(shard, results, tmp_path, capsys):
    """Proves the same for every case of the matrix; cases that passed with these sources are skipped."""
    recorded, cases = results(shard), list_shard(shard)
    passed = recorded.passed()
    left = [case for case in cases if str(case) not in passed]
    with capsys.disabled():
        sys.stdout.write(f"\nshard-{shard:02d}: {len(cases) - len(left)} of {len(cases)} cases skipped, ")
        sys.stdout.write(f"recorded as passed in {recorded.path}\n")
    failed = {}
    for case in left:
        started = time.perf_counter()
        try:
            contradictions = find_contradictions(case, tmp_path)
        except Exception:  # an error inside the planner is one case's failure, not the shard's end
            contradictions = [traceback.format_exc(limit=-3)]
        recorded.add(case, contradictions, time.perf_counter() - started)
        if contradictions:
            failed[str(case)] = contradictions[0]
    listed = "\n".join(f"{name}: {reason}" for name, reason in failed.items())
    assert not failed, f"{len(failed)} of {len(left)} cases failed; all reasons: {recorded.path}\n{listed}"


# The cases and their records


def test_the_shards_have_every_preset_on_every_cluster_once():
    """Proves that no case is in two shards or in none."""
    cases = [case for shard in range(SHARDS) for case in list_shard(shard)]
    models, clusters = preset_names("models"), [n for n in preset_names("clusters") if n != "local"]
    assert len(cases) == len(set(cases)) == len(models) * len(clusters) * len(SIZES)
    assert set(cases) == set(list_cases())


def test_the_sample_has_every_value_and_nearly_as_many_pairs_as_it_can():
    """Proves that the sample is a covering one: each row brings new pairs of model, cluster and size."""
    assert len(CHOSEN) == len(set(CHOSEN)) == SAMPLE
    values = {value for case in CHOSEN for value in values_of(case)}
    assert values == {value for case in list_cases() for value in values_of(case)}
    pairs = {pair for case in CHOSEN for pair in pairs_of(case)}
    assert len(pairs) >= 0.95 * 3 * SAMPLE
    large = [case for case in CHOSEN if case.state_share > 1]
    assert 3 <= len(large) <= SAMPLE / 4, "some models do not fit their cluster, most do"


@pytest.mark.parametrize(
    ("cluster", "on"),
    [
        ("h100-sxm", ["1x1x", "1x8x", "8x8x", "64x8x"]),
        ("v100-32g-sxm", ["1x1x", "1x16x", "4x16x", "32x16x"]),
        ("gb200-nvl72", ["1x1x", "1x72x", "1x64x", "8x64x"]),
    ],
)
def test_sizes_follow_the_nodes_of_a_cluster(cluster, on):
    """Proves that 8 stands for one whole node, and 64 and 512 for as few nodes as divide them."""
    assert [Case("tiny", cluster, size).on for size in SIZES] == [f"{words}{cluster}" for words in on]


def test_records_survive_a_kill_and_failed_cases_run_again(tmp_path):
    """Proves that a rerun skips what passed and repeats what failed, also after a kill cut a line short."""
    recorded = Results(tmp_path / "shard.jsonl")
    first, second, third, fourth = list_cases()[:4]
    recorded.add(first, [], 0.5)
    recorded.add(second, ["it differs"], 0.5)
    with recorded.path.open("a") as file:
        file.write('{"case": "cut')
    recorded.add(third, [], 0.5)
    assert recorded.passed() == {str(first), str(third)}
    recorded.add(second, [], 0.5)
    assert recorded.passed() == {str(first), str(second), str(third)}
    assert str(fourth) not in recorded.passed()
