"""Every legal layout computes what one process computes, and does what its plan promised.

The cells come from the legality table (``layout_matrix``). `make test` runs a set in which every pair of
settings meets, of pipelines those of what a schedule means. `make test-all` runs every layout on two to four
ranks, each with a decoder of both families, pipelines, shared sequences and dealt experts with one of either,
and samples on eight ranks, of compiled blocks, and of ways to route tokens.
"""

from __future__ import annotations

import json
import random
from itertools import islice, product
from math import prod

import pytest
from layout_matrix import (
    DEGREES,
    ROUTING,
    SEED,
    SETTINGS,
    Cell,
    choose_covering,
    choose_models,
    draw_cells,
    draw_routings,
    list_cells,
    list_compiled,
    list_pairs,
    list_traits,
)
from proving import Prover, hold

from meshwright.data.prepare import CorpusSpec, prepare_corpus

MOST_PASSES = 6
CELLS = list_cells((2, 3, 4))
MATRIX = choose_models(CELLS)
COVERING = choose_covering(CELLS, list_traits)
PAIRS = choose_covering(CELLS, list_pairs)
ROUTINGS = choose_covering(draw_routings(CELLS, 1000), list_pairs)
COMPILED = sorted(random.Random(SEED).sample(list_compiled(COVERING), 8), key=lambda cell: cell.passes)
LARGE = list(islice(draw_cells(8), 12))
ALL_DATA_AXES = next(cell for cell in draw_cells(8) if cell.degrees == (1, 2, 2, 1, 2))
SHARED_SHARDS_OF_SPLITS = next(
    cell for cell in draw_cells(8) if cell.degrees == (1, 1, 2, 2, 2) and dict(cell.settings)["zero"] == 3
)
PIPELINE_OF_SHARDS = next(
    cell for cell in draw_cells(8) if cell.degrees == (2, 1, 2, 1, 2) and dict(cell.settings)["zero"] == 3
)
FAST = [cell for cell in COVERING if cell.passes <= MOST_PASSES]
"""Those for which `make test` has time: of the covering set the cheaper half, and one of eight ranks."""


def as_parameters(fast: list[Cell], slow: list[Cell]) -> list:
    return [
        *(pytest.param(cell, id=str(cell)) for cell in fast),
        *(pytest.param(cell, id=str(cell), marks=pytest.mark.slow) for cell in slow if cell not in fast),
    ]


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


@pytest.mark.parametrize("cell", as_parameters(FAST, list(dict.fromkeys([*COVERING, *PAIRS, *MATRIX]))))
def test_a_layout_is_one_process_and_keeps_its_promises(prover, cell):
    """Losses and every gradient of every rank; state and collectives equal to the byte."""
    hold(prover, cell.job)


@pytest.mark.parametrize("cell", as_parameters([], COMPILED))
def test_compiled_blocks_too(prover, cell):
    hold(prover, cell.job)


@pytest.mark.parametrize(
    "cell", as_parameters([PIPELINE_OF_SHARDS], [ALL_DATA_AXES, SHARED_SHARDS_OF_SPLITS, *LARGE])
)
def test_eight_ranks_too(prover, cell):
    hold(prover, cell.job)


@pytest.mark.parametrize("cell", as_parameters([], ROUTINGS))
def test_every_way_of_routing_too(prover, cell):
    hold(prover, cell.job)


def test_all_pairs_of_settings_meet_in_few_cells():
    """No legal trait is left out, nor a pair, nor a layout; `make test` has every axis and way to share."""
    for trait in ("sharing", "dealing", "work"):
        assert {getattr(cell, trait) for cell in FAST} == {getattr(cell, trait) for cell in CELLS}
    assert {axis for cell in FAST for axis, degree in cell.settings if degree != 1} >= set(DEGREES)
    for chosen, meetings in ((COVERING, list_traits), (PAIRS, list_pairs)):
        legal = {met for cell in CELLS for met in meetings(cell)}
        assert legal == {met for cell in chosen for met in meetings(cell)}
        assert set(chosen) <= set(CELLS)
        assert len(chosen) < len(CELLS) / 10
    alone = [cell for cell in CELLS if not cell.sharing and not cell.dealing]
    assert {cell.layout for cell in MATRIX} >= {cell.layout for cell in alone}
    assert {(c.layout, c.family) for c in alone if not c.pipelined} <= {(c.layout, c.family) for c in MATRIX}
    placed = {degrees for degrees in product(range(1, 5), repeat=5) if 2 <= prod(degrees) <= 4}
    assert {cell.degrees for cell in MATRIX} == placed, "the table refuses no axis as such"
    pipelines = [dict(cell.settings) for cell in COVERING if cell.pipelined]
    assert {settings["schedule"] for settings in pipelines} == set(SETTINGS["schedule"])
    assert {settings["zero"] for settings in pipelines} == {0, 1, 2, 3}
    shared = [dict(cell.settings) for cell in COVERING if cell.sharing]
    assert {settings["zero"] for settings in shared if settings["dp_shard"] == 1} == {0, 1, 2, 3}
    assert {settings["cp"] for settings in shared} == {2, 3, 4}
    dealt = [dict(cell.settings) for cell in COVERING if cell.dealing]
    assert {(settings["ep"], settings["etp"]) for settings in dealt} >= {
        (2, 1),
        (3, 1),
        (4, 1),
        (1, 2),
        (2, 2),
    }
    assert {settings["zero"] for settings in dealt} == {0, 1, 2, 3}
    met = {pair for cell in ROUTINGS for pair in list_pairs(cell)}
    ways = [(key, value) for key, values in ROUTING.items() for value in values]
    degrees = [(key, 2) for key in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")]
    assert met >= {(degree, way) for degree in degrees for way in ways}, "every axis with every way to route"


def test_documents_that_far_rounds_of_a_ring_ignore_are_found(prover):
    """Here sequences have several documents, and not only one that is cut."""
    cell = next(c for c in MATRIX if c.sharing == "ring" and c.ranks == 2 and c.job.data.mask == "document")
    first = prover.prove(cell.job, "planted_proofs:far_documents").verdict.first_divergence
    assert first is not None
    assert (first.kind, first.module) == ("activation", "blocks.0.attention"), first
