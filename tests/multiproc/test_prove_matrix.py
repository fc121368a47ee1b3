"""The layout matrix: every legal layout equals one process, and its state and collectives equal the plan.

The cells come from the legality table (``layout_matrix``). `make test` runs a few cheap cells that cover
every setting. `make test-all` runs sets on two to four ranks that cover all legal pairs of settings
and of traits, a sample with eight ranks, and sets with compiled blocks and with other routing settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import islice, product
from math import prod

import pytest
from layout_matrix import (
    AXES,
    DEGREES,
    ROUTING,
    SETTINGS,
    WORKLOADS,
    Cell,
    Combinations,
    choose_covering,
    list_cells,
    list_compiled,
    list_pairs_and_degrees,
    list_recompute_pairs,
    list_routing_pairs,
    list_traits,
    list_values,
    sample_cells,
    sample_routings,
)
from prover import Prover, require_equal_and_planned

from meshwright.data.prepare import CorpusSpec, prepare_corpus

MAX_FAST_COST = 4
SAMPLES = 150
"""Cells per number of ranks from which `make test` chooses; listing all takes seconds per worker."""


def is_fast(cell: Cell) -> bool:
    """Whether `make test` may choose a cell: few micro-batches, experts not over four data-parallel ranks.

    Both expert axes need four ranks. The cells that remain for them have more micro-batches.
    """
    if cell.expert_axes and dict(cell.settings)["dp_shard"] == 4:
        return False
    return cell.cost <= (2 if cell.expert_axes == "ep etp" else 1) * MAX_FAST_COST


PP_FSDP_TP, HSDP_TP, FSDP_CP_TP = (
    next(cell for cell in sample_cells(8) if cell.degrees == degrees and dict(cell.settings)["zero"] == 3)
    for degrees in ((2, 1, 2, 1, 2), (1, 2, 2, 1, 2), (1, 1, 2, 2, 2))
)
DENSE_PP_FSDP_TP = next(
    cell
    for cell in sample_cells(8)
    if cell.degrees == PP_FSDP_TP.degrees and dict(cell.settings)["zero"] == 3 and not cell.is_moe
)
FAST = choose_covering(
    [c for ranks in (2, 3, 4) for c in islice(sample_cells(ranks), SAMPLES) if is_fast(c)],
    list_values,
)
"""Cells of `make test`: they cover each setting of the cheap cells."""


@cache
def all_cells() -> list[Cell]:
    """Every legal cell on two to four ranks."""
    return list_cells((2, 3, 4))


@cache
def trait_cells() -> list[Cell]:
    """Cells that cover all legal pairs of traits."""
    return choose_covering(all_cells(), list_traits)


@cache
def pair_cells() -> list[Cell]:
    """Cells that cover all legal pairs of settings and all degrees."""
    return choose_covering(all_cells(), list_pairs_and_degrees)


@cache
def covering_cells() -> list[Cell]:
    """Cells that cover all legal pairs of traits, all legal pairs of settings and all degrees."""
    both = list(dict.fromkeys([*trait_cells(), *pair_cells()]))
    return choose_covering(both, lambda cell: [*list_traits(cell), *list_pairs_and_degrees(cell)])


@cache
def routings() -> list[Cell]:
    """MoE cells that cover all pairs with a routing setting; other cells cover pairs of layout settings."""
    return choose_covering(sample_routings(all_cells(), 1000), list_routing_pairs)


def compiled_cells() -> list[Cell]:
    """Trait cells with compiled blocks: every kind of checkpointing with FSDP and with sharded experts."""
    return choose_covering(list_compiled(trait_cells()), list_recompute_pairs)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize by cells; the slow sets are computed only if ``-m`` selects them."""
    slow = "not slow" not in metafunc.config.option.markexpr
    sets: dict[str, tuple[list[Cell], Callable[[], list[Cell]]]] = {
        "cell": (FAST, covering_cells),
        "compiled": ([], compiled_cells),
        "large": (
            [],
            lambda: [DENSE_PP_FSDP_TP, PP_FSDP_TP, HSDP_TP, FSDP_CP_TP, *islice(sample_cells(8), 12)],
        ),
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
    """Data of short prompts and answers: a sequence packs several documents, and masks have an effect."""
    folder = tmp_path_factory.mktemp("matrix")
    lines = [
        json.dumps({"prompt": f"{n} + {n % 7}", "answer": f"= {n + n % 7}" + "!" * (n % 5)})
        for n in range(400)
    ]
    (folder / "sums.jsonl").write_text("\n".join(lines))
    spec = CorpusSpec(sources=("sums.jsonl",), out="data", template="plain", eval_fraction=0.1)
    prepare_corpus(spec, folder)
    return Prover(folder, folder / "data")


def test_layout_equals_one_process_and_the_plan(prover, cell):
    """Losses and all gradients equal one process; state and collectives of every rank equal the plan."""
    require_equal_and_planned(prover, cell.job)


def test_compiled_blocks_equal_one_process_and_the_plan(prover, compiled):
    require_equal_and_planned(prover, compiled.job)


def test_eight_ranks_equal_one_process_and_the_plan(prover, large):
    require_equal_and_planned(prover, large.job)


def test_routing_settings_equal_one_process_and_the_plan(prover, routed):
    require_equal_and_planned(prover, routed.job)


def test_fast_cells_cover_every_axis_method_and_workload():
    assert {cell.context_method for cell in FAST} == {"", *SETTINGS["context"]}
    assert {cell.expert_axes for cell in FAST} == {"", "ep", "etp", "ep etp"}
    assert {cell.workload for cell in FAST} == set(WORKLOADS)
    assert {axis for cell in FAST for axis, degree in cell.settings if degree != 1} >= set(DEGREES)
    for key in ("zero", "recompute", "micro_batch", "accumulate", "prefetch", "offload", "sequence_parallel"):
        assert {dict(cell.settings)[key] for cell in FAST} == set(SETTINGS.get(key, range(4))), key


@pytest.mark.slow
def test_cells_cover_all_pairs_of_traits():
    assert require_covering(covering_cells(), list_traits) < len(all_cells()) / 10
    pipelines = [dict(cell.settings) for cell in covering_cells() if cell.pipelined]
    assert {settings["schedule"] for settings in pipelines} == set(SETTINGS["schedule"])
    assert {settings["zero"] for settings in pipelines} == {0, 1, 2, 3}
    context = [dict(cell.settings) for cell in covering_cells() if cell.context_method]
    assert {settings["zero"] for settings in context if settings["dp_shard"] == 1} == {0, 1, 2, 3}
    assert {settings["cp"] for settings in context} == {2, 3, 4}
    experts = [dict(cell.settings) for cell in covering_cells() if cell.expert_axes]
    degrees = {(settings["ep"], settings["etp"]) for settings in experts}
    assert degrees >= {(2, 1), (3, 1), (4, 1), (1, 2), (2, 2)}
    assert {settings["zero"] for settings in experts} == {0, 1, 2, 3}


@pytest.mark.slow
def test_cells_cover_all_pairs_of_settings():
    """`make test-all` covers all legal pairs, all degrees of 2 to 4 ranks, and axes with routing."""
    assert require_covering(covering_cells(), list_pairs_and_degrees) < len(all_cells()) / 10
    all_degrees = {degrees for degrees in product(range(1, 5), repeat=5) if 2 <= prod(degrees) <= 4}
    assert {cell.degrees for cell in covering_cells()} == all_degrees
    covered = {pair for cell in routings() for pair in list_routing_pairs(cell)}
    routing = [(key, value) for key, values in ROUTING.items() for value in values]
    axes = [(key, True) for key in AXES]
    assert covered >= set(product(axes, routing)), "every axis with every routing setting"


def require_covering(chosen: list[Cell], combinations: Combinations) -> int:
    """Require that the chosen cells cover every combination of any legal cell; returns their number."""
    assert set(chosen) <= set(all_cells())
    legal, covered = ({c for cell in cells for c in combinations(cell)} for cells in (all_cells(), chosen))
    assert covered == legal
    return len(chosen)


@pytest.mark.slow
def test_ring_steps_without_document_mask_are_located(prover):
    """Only the first ring step masks documents; sequences with several documents reveal it."""
    cell = next(c for c in sample_cells(2) if c.context_method == "ring" and c.job.data.mask == "document")
    first = prover.prove(
        cell.job, "parallelism_bugs:ring_document_mask_first_step_only"
    ).verdict.first_divergence
    assert first is not None
    assert (first.kind, first.module) == ("activation", "blocks.0.attention"), first
