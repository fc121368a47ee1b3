"""Every legal layout computes what one process computes, and does what its plan promised.

The cells come from the legality table (``layout_matrix``). `make test` runs a set in which every pair of
settings meets; `make test-all` runs every layout on two to four ranks, each with a decoder of both families,
and samples on eight ranks and of compiled blocks.
"""

from __future__ import annotations

import json
import random
from itertools import islice, product
from math import prod

import pytest
from layout_matrix import (
    SEED,
    Cell,
    choose_covering,
    choose_models,
    draw_cells,
    list_cells,
    list_compiled,
    list_pairs,
)
from proving import Prover

from meshwright.explain.audit import audit_run
from meshwright.plan.proof import GRADIENT_STEPS, LOOKING
from meshwright.prepare.build import CorpusSpec, prepare_corpus

CELLS = list_cells((2, 3, 4))
MATRIX = choose_models(CELLS)
COVERING = choose_covering(CELLS)
COMPILED = sorted(random.Random(SEED).sample(list_compiled(COVERING), 8), key=lambda cell: cell.passes)
LARGE = list(islice(draw_cells(8), 6))
ALL_AXES = next(cell for cell in draw_cells(8) if min(cell.degrees) > 1)
"""The one for which `make test` has time; of the compiled ones it is the first."""


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


@pytest.mark.parametrize("cell", as_parameters(COVERING, MATRIX))
def test_a_layout_is_one_process_and_keeps_its_promises(prover, cell):
    """Losses and every gradient of every rank; state and collectives equal to the byte."""
    hold(prover, cell)


@pytest.mark.parametrize("cell", as_parameters(COMPILED[:1], COMPILED))
def test_compiled_blocks_too(prover, cell):
    hold(prover, cell)


@pytest.mark.parametrize("cell", as_parameters([ALL_AXES], LARGE))
def test_eight_ranks_too(prover, cell):
    hold(prover, cell)


def test_all_pairs_of_settings_meet_in_few_cells():
    """What `make test` runs leaves out no pair that is legal, what `make test-all` runs no layout."""
    legal = {pair for cell in CELLS for pair in list_pairs(cell)}
    assert legal == {pair for cell in COVERING for pair in list_pairs(cell)}
    assert set(COVERING) <= set(CELLS)
    assert len(COVERING) < len(CELLS) / 10
    assert {(cell.layout, cell.family) for cell in MATRIX} == {(c.layout, c.family) for c in CELLS}
    placed = {degrees for degrees in product(range(1, 5), repeat=3) if 2 <= prod(degrees) <= 4}
    assert {cell.degrees for cell in MATRIX} == placed, "the table refuses no axis as such"


def hold(prover: Prover, cell: Cell) -> None:
    """Prove a cell and look at everything that came of it."""
    proof = prover.prove(cell.job, "planted_proofs:audited")
    verdict = proof.verdict
    assert verdict.equal, verdict.first_divergence
    for found in proof.findings:
        for step in map(str, GRADIENT_STEPS):
            assert found.gradients[step].keys() == set(proof.notes.parameters)
            assert found.gradients[step].keys() == proof.notes.gradient_norms[step].keys()
        assert found.not_compared == []
        if found.activations:  # else the rank has zero-weight samples alone
            assert {row.module for row in found.activations if row.what == "output"} == set(
                proof.notes.modules
            )
    assert proof.findings[0].activations
    audit = audit_run(proof.plan, proof.record)
    assert [row for row in audit.collectives if row.phase != LOOKING and not row.equal] == []
    assert {row.phase for row in audit.collectives if row.calls} >= {"step"}
    state = [row for row in audit.state if not row.tolerance]  # peaks are for models of some size
    assert [row for row in state if not row.held] == []
    assert {row.rank for row in state} == set(range(cell.ranks))
