"""Every legal layout computes what one process computes, and does what its plan promised.

The cells come from the legality table (``layout_matrix``). `make test` runs a few cheap cells in which every
setting occurs. `make test-all` runs on two to four ranks sets in which every two and every three settings
that can be combined are combined, and samples of eight ranks, of compiled blocks and of ways to route tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from itertools import islice, product
from math import prod

import pytest
from layout_matrix import (
    DEGREES,
    ROUTING,
    SEED,
    SETTINGS,
    Cell,
    Meetings,
    choose_covering,
    draw_cells,
    draw_routings,
    list_cells,
    list_compiled,
    list_pairs,
    list_traits,
    list_triples,
    list_values,
)
from proving import Prover, hold

from meshwright.data.prepare import CorpusSpec, prepare_corpus

MOST_PASSES = 4
CELLS = list_cells((2, 3, 4))
COVERING = choose_covering(CELLS, list_traits)
COMPILED = sorted(random.Random(SEED).sample(list_compiled(COVERING), 8), key=lambda cell: cell.passes)
LARGE = list(islice(draw_cells(8), 12))
ALL_DATA_AXES = next(cell for cell in draw_cells(8) if cell.degrees == (1, 2, 2, 1, 2))
SHARED_SHARDS_OF_SPLITS = next(
    cell for cell in draw_cells(8) if cell.degrees == (1, 1, 2, 2, 2) and dict(cell.settings)["zero"] == 3
)
PIPELINE_OF_SHARDS = next(
    cell for cell in draw_cells(8) if cell.degrees == (2, 1, 2, 1, 2) and dict(cell.settings)["zero"] == 3
)
FAST = choose_covering([cell for cell in COVERING if cell.passes <= MOST_PASSES], list_values)
"""Those for which `make test` has time: each setting of the cheap cells once, and one cell of eight ranks."""


@cache
def triples() -> list[Cell]:
    """Cells in which every three settings that can be combined are; found in seconds, so only when asked."""
    return choose_covering(CELLS, list_triples)


@cache
def routings() -> list[Cell]:
    """Cells with experts in which every pair of settings and ways of routing occurs."""
    return choose_covering(draw_routings(CELLS, 1000), list_pairs)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The long sets are listed only where ``-m`` selects them."""
    slow = "not slow" not in metafunc.config.option.markexpr
    sets: dict[str, tuple[list[Cell], Callable[[], list[Cell]]]] = {
        "cell": (FAST, lambda: list(dict.fromkeys([*COVERING, *triples()]))),
        "compiled": ([], lambda: COMPILED),
        "large": ([PIPELINE_OF_SHARDS], lambda: [ALL_DATA_AXES, SHARED_SHARDS_OF_SPLITS, *LARGE]),
        "routed": ([], routings),
    }
    for name, (fast, list_slow) in sets.items():
        if name in metafunc.fixturenames:
            more = [cell for cell in list_slow() if cell not in fast] if slow else []
            cells = [pytest.param(cell, id=str(cell)) for cell in fast]
            cells += [pytest.param(cell, id=str(cell), marks=pytest.mark.slow) for cell in more]
            metafunc.parametrize(name, cells)


@pytest.fixture(scope="module")
def prover(tmp_path_factory):
    """Short questions and answers: rows hold several, and masks have something to hide."""
    folder = tmp_path_factory.mktemp("matrix")
    lines = [
        json.dumps({"prompt": f"{n} + {n % 7}", "answer": f"= {n + n % 7}" + "!" * (n % 5)})
        for n in range(400)
    ]
    (folder / "sums.jsonl").write_text("\n".join(lines))
    spec = CorpusSpec(sources=("sums.jsonl",), out="data", template="plain", eval_fraction=0.1)
    prepare_corpus(spec, folder)
    return Prover(folder, folder / "data")


def test_a_layout_equals_one_process_and_its_plan(prover, cell):
    """Losses and every gradient of every rank; state and collectives equal to the byte."""
    hold(prover, cell.job)


def test_compiled_blocks_too(prover, compiled):
    hold(prover, compiled.job)


def test_eight_ranks_too(prover, large):
    hold(prover, large.job)


def test_every_way_of_routing_too(prover, routed):
    hold(prover, routed.job)


def test_all_pairs_of_settings_meet_in_few_cells():
    """No legal trait is left out; `make test` has every axis, context method and expert parallelism."""
    for trait in ("sharing", "dealing", "work"):
        assert {getattr(cell, trait) for cell in FAST} == {getattr(cell, trait) for cell in CELLS}
    assert {axis for cell in FAST for axis, degree in cell.settings if degree != 1} >= set(DEGREES)
    assert require_all_meet(COVERING, list_traits) < len(CELLS) / 10
    pipelines = [dict(cell.settings) for cell in COVERING if cell.pipelined]
    assert {settings["schedule"] for settings in pipelines} == set(SETTINGS["schedule"])
    assert {settings["zero"] for settings in pipelines} == {0, 1, 2, 3}
    shared = [dict(cell.settings) for cell in COVERING if cell.sharing]
    assert {settings["zero"] for settings in shared if settings["dp_shard"] == 1} == {0, 1, 2, 3}
    assert {settings["cp"] for settings in shared} == {2, 3, 4}
    dealt = [dict(cell.settings) for cell in COVERING if cell.dealing]
    degrees = {(settings["ep"], settings["etp"]) for settings in dealt}
    assert degrees >= {(2, 1), (3, 1), (4, 1), (1, 2), (2, 2)}
    assert {settings["zero"] for settings in dealt} == {0, 1, 2, 3}


@pytest.mark.slow
def test_all_triples_of_settings_meet_in_few_cells():
    """All that `make test-all` claims to combine is combined: three settings, and axes with routing."""
    assert require_all_meet(triples(), list_triples) < len(CELLS) / 10
    placed = {degrees for degrees in product(range(1, 5), repeat=5) if 2 <= prod(degrees) <= 4}
    assert {cell.degrees for cell in triples()} == placed, "the table refuses no axis as such"
    met = {pair for cell in routings() for pair in list_pairs(cell)}
    ways = [(key, value) for key, values in ROUTING.items() for value in values]
    degrees = [(key, 2) for key in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")]
    assert met >= {(degree, way) for degree in degrees for way in ways}, "every axis with every way to route"


def require_all_meet(chosen: list[Cell], meetings: Meetings) -> int:
    """Whatever meets in any legal cell meets in a chosen one; returns how many there are."""
    assert set(chosen) <= set(CELLS)
    assert {m for cell in CELLS for m in meetings(cell)} == {m for cell in chosen for m in meetings(cell)}
    return len(chosen)


def test_documents_that_far_rounds_of_a_ring_ignore_are_found(prover):
    """Here sequences have several documents, and not only one that is cut."""
    cell = next(c for c in CELLS if c.sharing == "ring" and c.ranks == 2 and c.job.data.mask == "document")
    first = prover.prove(cell.job, "planted_proofs:far_documents").verdict.first_divergence
    assert first is not None
    assert (first.kind, first.module) == ("activation", "blocks.0.attention"), first
