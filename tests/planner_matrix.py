"""The cases of the planner matrix: every model preset on every cluster preset, with four sizes.

``make test`` runs a few. ``make test-all`` runs cases that cover every model, and every cluster and every
architecture with every size.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from meshwright.layout.parameters import count_parameters
from meshwright.spec.job import Job
from meshwright.spec.legality.table import find_problems
from meshwright.spec.load import load_job
from meshwright.spec.model import DecoderModel
from meshwright.spec.presets import preset_names, read_preset

SIZES = (1, 8, 64, 512)
"""Numbers of devices; 8 means one full node, whatever its size."""
SAMPLE = 40
"""Size of a sample that covers every model, cluster and size."""
QUICK = 6
"""First cases of the sample, from which ``make test`` has one of each size."""
TOO_LARGE = 6
"""Cases of the sample whose model is too large for the cluster."""
STATE_BYTES = 16
"""Bytes per parameter of mixed-precision training with Adam: weights, gradients, two moments."""


@dataclass(frozen=True)
class Case:
    """One model on one cluster."""

    model: str
    cluster: str
    size: int

    @property
    def on(self) -> str:
        """The argument of ``--on``: nodes x devices per node x preset."""
        per_node = cluster_fields(self.cluster)["devices_per_node"]
        if self.size == 1:
            return f"1x1x{self.cluster}"
        if self.size == 8:
            return f"1x{per_node}x{self.cluster}"
        used = next(n for n in range(min(per_node, self.size), 0, -1) if self.size % n == 0)
        return f"{self.size // used}x{used}x{self.cluster}"

    @property
    def devices(self) -> int:
        """Devices of the cluster."""
        nodes, per_node, _ = self.on.split("x", 2)
        return int(nodes) * int(per_node)

    @property
    def memory_bytes(self) -> int:
        """Memory of one device."""
        return int(cluster_fields(self.cluster)["memory_bytes"])

    @property
    def state_share(self) -> float:
        """Training state over the memory of all devices."""
        return STATE_BYTES * parameters_of(self.model) / (self.devices * self.memory_bytes)

    @property
    def digest(self) -> str:
        """A fixed pseudo-random order of the cases."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    def __str__(self) -> str:
        """The id of the test case."""
        return f"{self.model}-on-{self.on}"


@functools.cache
def cluster_fields(name: str) -> dict[str, Any]:
    """The fields of a cluster preset."""
    fields = read_preset("clusters", name)
    assert isinstance(fields, dict), f"{name} is a preset"
    return fields


@functools.cache
def preset_job(model: str) -> Job:
    """The job of ``plan MODEL`` on one device."""
    return load_job(model, on="1x1xh100-sxm", to_run=False)


@functools.cache
def parameters_of(model: str) -> int:
    """Parameters of a model preset."""
    return count_parameters(preset_job(model).model)


def is_decoder(case: Case) -> bool:
    """Whether the model is a decoder: others have no dry run."""
    return isinstance(preset_job(case.model).model, DecoderModel)


@functools.cache
def is_built(model: str) -> bool:
    """Whether ``train`` runs the model; other models have only an estimate."""
    return not find_problems(preset_job(model))


@functools.cache
def list_cases() -> tuple[Case, ...]:
    """All cases, sorted by digest."""
    clusters = [name for name in preset_names("clusters") if name != "local"]
    cases = itertools.starmap(Case, itertools.product(preset_names("models"), clusters, SIZES))
    return tuple(sorted(cases, key=lambda case: case.digest))


def architecture_of(model: str) -> tuple[object, ...]:
    """The settings of a model that lead the planner to other code; widths and counts are numbers only."""
    spec = preset_job(model).model
    if not isinstance(spec, DecoderModel):
        return ("resnet",)
    return (bool(spec.num_experts), spec.attention, spec.positions, spec.window is not None)


def add_size_pairs(chosen: Sequence[Case]) -> list[Case]:
    """Add cases until every cluster and every architecture occurs with every size."""
    left = [case for case in list_cases() if case not in chosen]
    missing = {pair for case in left for pair in size_pairs_of(case)}
    missing -= {pair for case in chosen for pair in size_pairs_of(case)}
    found = list(chosen)
    while missing:
        best = max(left, key=lambda case: (len(size_pairs_of(case) & missing), case.digest))
        found.append(best)
        left.remove(best)
        missing -= size_pairs_of(best)
    return found


def size_pairs_of(case: Case) -> set[tuple[object, ...]]:
    """The size with the cluster, and with the architecture."""
    return {(case.cluster, case.size), (architecture_of(case.model), case.size)}


def choose_sample() -> list[Case]:
    """A sample that covers every model, cluster and size, and then as many pairs as possible."""
    cases = list_cases()
    fitting = max(SAMPLE - TOO_LARGE, len(preset_names("models")))
    chosen = choose_covering([case for case in cases if case.state_share <= 1], fitting)
    large = [case for case in cases if case.state_share > 1]
    return choose_covering(large, max(SAMPLE - len(chosen), 0), chosen)


def choose_covering(cases: Sequence[Case], count: int, chosen: Iterable[Case] = ()) -> list[Case]:
    """Add cases greedily by most new values, most new pairs, rarest size and digest."""
    found = list(chosen)
    sizes = Counter(case.size for case in found)
    values = {value for case in found for value in values_of(case)}
    pairs = {pair for case in found for pair in pairs_of(case)}
    for _ in range(count):
        left = [case for case in cases if case not in found]
        best = max(left, key=lambda c: (*_gain(c, values, pairs), -sizes[c.size], c.digest))
        found.append(best)
        values |= values_of(best)
        pairs |= pairs_of(best)
        sizes[best.size] += 1
    return found


def _gain(case: Case, values: Set[Any], pairs: Set[Any]) -> tuple[int, int]:
    """Values and pairs that a case adds."""
    return len(values_of(case) - values), len(pairs_of(case) - pairs)


def values_of(case: Case) -> set[tuple[str, Any]]:
    """Model, cluster and size."""
    return {("model", case.model), ("cluster", case.cluster), ("size", case.size)}


def pairs_of(case: Case) -> set[tuple[Any, ...]]:
    """Pairs of model, cluster and size."""
    return set(itertools.combinations(sorted(values_of(case)), 2))
