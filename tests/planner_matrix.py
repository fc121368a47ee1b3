"""The cases of the planner's matrix: every model preset on every cluster preset, on four numbers of devices.

``make test`` runs a sample, ``make test-all`` runs all cases in shards. A finished case is recorded, and a
rerun with the same sources skips it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meshwright
from meshwright.layout.parameters import count_parameters
from meshwright.spec.job import Job
from meshwright.spec.legality.table import find_problems
from meshwright.spec.load import load_job
from meshwright.spec.model import DecoderModel
from meshwright.spec.presets import preset_names, read_preset

SIZES = (1, 8, 64, 512)
"""Devices; 8 stands for one whole node, whatever its size."""
SAMPLE = 40
"""Cases in ``make test``."""
TOO_LARGE = 6
"""Of those, cases whose model is too large for the cluster."""
SHARDS = 24
STATE_BYTES = 16
"""Bytes per parameter of mixed-precision training with Adam: weights, gradients, two moments."""
SOURCE = Path(meshwright.__file__).parent
HASHED = ("plan/**/*.py", "spec/**/*.py", "schedule/**/*.py", "spec/presets/**/*.toml", "cli/plan*.py")
"""Sources that decide what is planned and shown."""


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
        """Training state, as a share of the memory of all devices."""
        return STATE_BYTES * parameters_of(self.model) / (self.devices * self.memory_bytes)

    @property
    def digest(self) -> str:
        """A fixed pseudo-random order of the cases."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    def __str__(self) -> str:
        """As in the id of a test."""
        return f"{self.model}-on-{self.on}"


@functools.cache
def cluster_fields(name: str) -> dict[str, Any]:
    """The fields of a cluster preset."""
    fields = read_preset("clusters", name)
    assert isinstance(fields, dict), f"{name} is a preset"
    return fields


@functools.cache
def preset_job(model: str) -> Job:
    """What ``plan MODEL`` plans, on one device."""
    return load_job(model, on="1x1xh100-sxm", to_run=False)


@functools.cache
def parameters_of(model: str) -> int:
    """Parameters of a model preset."""
    return count_parameters(preset_job(model).model)


def is_decoder(case: Case) -> bool:
    """Whether the model is a decoder, which the dry run needs."""
    return isinstance(preset_job(case.model).model, DecoderModel)


@functools.cache
def is_built(model: str) -> bool:
    """Whether ``train`` runs the model at all; of others there is only an estimate."""
    return not find_problems(preset_job(model))


@functools.cache
def list_cases() -> tuple[Case, ...]:
    """All cases, in the order of their digests."""
    clusters = [name for name in preset_names("clusters") if name != "local"]
    cases = itertools.starmap(Case, itertools.product(preset_names("models"), clusters, SIZES))
    return tuple(sorted(cases, key=lambda case: case.digest))


def choose_sample() -> list[Case]:
    """A covering sample: every model, cluster and size, then as many pairs of them as the rows can hold."""
    cases = list_cases()
    fitting = max(SAMPLE - TOO_LARGE, len(preset_names("models")))
    chosen = choose_covering([case for case in cases if case.state_share <= 1], fitting)
    large = [case for case in cases if case.state_share > 1]
    return choose_covering(large, max(SAMPLE - len(chosen), 0), chosen)


def choose_covering(cases: Sequence[Case], count: int, chosen: Iterable[Case] = ()) -> list[Case]:
    """Add cases greedily: most new values, then most new pairs, then the rarest size, then by digest."""
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
    """Two of model, cluster and size."""
    return set(itertools.combinations(sorted(values_of(case)), 2))


def list_shard(shard: int) -> list[Case]:
    """The cases of one shard; models, clusters and sizes are mixed, so that shards take alike."""
    return list(list_cases()[shard::SHARDS])


@functools.cache
def source_digest() -> str:
    """Changes with the planner's sources, the presets and the checks themselves."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    files = {path for pattern in HASHED for path in SOURCE.glob(pattern)}
    for path in [*sorted(files), here / "planner_checks.py", here / "planner_matrix.py"]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Results:
    """Finished cases of one shard, a JSON line each; written as each case ends."""

    path: Path

    def passed(self) -> set[str]:
        """Cases that need not run again."""
        return {row["case"] for row in self.rows() if not row["contradictions"]}

    def rows(self) -> list[dict[str, Any]]:
        """All lines; one that was cut short by a kill is left out."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("}\n")]

    def add(self, case: Case, contradictions: Sequence[str], seconds: float) -> None:
        """Record one case."""
        row = {"case": str(case), "contradictions": list(contradictions), "seconds": round(seconds, 3)}
        cut = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * cut + json.dumps(row) + "\n")
