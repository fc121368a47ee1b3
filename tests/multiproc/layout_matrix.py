"""All layouts that the legality table allows, and small covering sets of them (pairwise and 3-wise tests)."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from meshwright.spec.job import Job
from meshwright.spec.layout import V_SCHEDULES, Layout
from meshwright.spec.legality.table import RULES, find_problems
from meshwright.spec.load import build_job
from model_shapes import GPT_PARTS

SEED = 5
"""Seed of all random choices, so that the same layouts run everywhere."""
SEQ_LEN = 24
DECODER = {"num_layers": 2, "hidden_size": 48, "num_heads": 24, "head_dim": 4, "ffn_size": 96}
"""Heads and feed-forward size are divisible by 2, 3, 4 and 8."""
GPT = {**GPT_PARTS, "max_positions": SEQ_LEN}
EXPERTS = {"num_experts": 12, "experts_per_token": 2, "expert_ffn_size": 12}
"""Experts and their columns are divisible by 2, 3 and 4."""
DROPPING = {**EXPERTS, "capacity_factor": 1.0, "shared_experts": 1}
SIGMOID = {**EXPERTS, "router": "sigmoid", "dense_layers": 1}
LR, DROPPING_LR = 3e-3, 1e-3
"""Where experts drop tokens, ten steps at 3e-3 amplify rounding differences to 1e-4 on some CPUs."""
PIPELINED_LAYERS = 4
"""Layers of pipelined models: two per rank on two ranks, unequal stages on three."""
WORKLOADS: dict[str, dict[str, Any]] = {
    "llama": {
        "model": {"num_kv_heads": 12, "vocab_size": 264, "tied_embeddings": False},
        "train": {"global_batch": 5, "optimizer": "sgd", "lr": 0.1},
        "pipelined": {"global_batch": 7},
    },
    "llama with experts, one key head": {
        "model": {**DROPPING, "num_kv_heads": 1, "vocab_size": 263, "tied_embeddings": True},
        "data": {"mask": "document"},
        "train": {"global_batch": 3, "balance_loss": 0.05, "lr": DROPPING_LR},
    },
    "gpt": {
        "model": {**GPT, "num_kv_heads": 24, "vocab_size": 263, "tied_embeddings": True},
        "data": {"prompt_masking": True},
        "train": {"global_batch": 3},
    },
    "gpt with experts, two key heads": {
        "model": {**GPT, **SIGMOID, "num_kv_heads": 2, "vocab_size": 265, "tied_embeddings": False},
        "data": {"mask": "document", "prompt_masking": True},
        "train": {"global_batch": 5, "balance_rate": 0.01, "z_loss": 0.01},
    },
}
"""Both decoder families, dense and MoE. They cover: dropped tokens, shared experts, a leading dense layer,
fewer key heads than ``tp``, a vocabulary that ``tp`` does not divide, tied and untied embeddings, document
masks, prompt masking, and batches that no number of ranks divides. Pipelines have fewer micro-batches than
stages; a batch of seven gives enough for schedules with a minimum."""

LAYOUT_RULES = [rule for rule in RULES if rule.code.startswith("layout") and rule.applies(to_run=True)]
"""Legality rules of the layout; model, data and training are legal."""
_HINTS = get_type_hints(Layout)
DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
AXES = (*DEGREES, "ep", "etp")
SETTINGS: dict[str, Sequence[Any]] = {
    "ep": (1, 2, 3, 4, 8),
    "etp": (1, 2, 3, 4, 8),
    "schedule": ("1f1b", *(name for name in get_args(_HINTS["schedule"]) if name != "1f1b")),
    "context": get_args(_HINTS["context"]),
    "sequence_parallel": (False, True),
    "recompute": get_args(_HINTS["recompute"]),
    "micro_batch": (1, 2),
    "accumulate": get_args(_HINTS["accumulate"]),
    "prefetch": (1, 0, 2),
    "offload": get_args(_HINTS["offload"]),
}
"""Values of all other layout keys. Values that are not built yet are refused by the legality table."""
SAMPLED = ("recompute", "accumulate", "prefetch", "offload")
"""Settings with one random value per layout with expert parallelism, to limit the number of cells."""
ROUTING: dict[str, Sequence[Any]] = {
    "model.experts_per_token": (1, 2, 3),
    "model.router": ("softmax", "sigmoid"),
    "model.capacity_factor": (None, 1.0),
    "model.shared_experts": (0, 1),
    "model.dense_layers": (0, 1),
    "train.balance_loss": (0.0, 0.05),
    "train.balance_rate": (0.0, 0.01),
    "train.z_loss": (0.0, 0.01),
}
"""Routing settings: covered in pairs with each other and with all layout settings."""
SEVERAL_STAGES = ("interleaved", *V_SCHEDULES)
"""Schedules with several stages per rank: two here."""
SPLIT_BACKWARD = ("zb-h1", *V_SCHEDULES)
"""Schedules with a split backward (input gradient, weight gradient)."""


@dataclass(frozen=True)
class Cell:
    """One layout of one workload."""

    workload: str
    settings: tuple[tuple[str, Any], ...]
    compiled: bool = False
    routing: tuple[tuple[str, Any], ...] = ()
    """Routing settings that replace those of the workload."""

    @property
    def job(self) -> Job:
        """The job to prove."""
        job = _with_settings(_job(self.workload, self.pipelined, self.routing), dict(self.settings))
        if not self.compiled:
            return job
        train = dataclasses.replace(job.train, block_backend="compile", compile_backend="aot_eager")
        return dataclasses.replace(job, train=train)

    @property
    def pipelined(self) -> bool:
        """Whether the layout has pipeline parallelism."""
        return dict(self.settings)["pp"] > 1

    @property
    def context_method(self) -> str:
        """Method of context parallelism; empty without it."""
        settings = dict(self.settings)
        return settings["context"] if settings["cp"] > 1 else ""

    @property
    def expert_axes(self) -> str:
        """Axes that shard experts: `ep`, `etp` or both; empty without them."""
        settings = dict(self.settings)
        return " ".join(key for key in ("ep", "etp") if settings[key] > 1)

    @property
    def is_moe(self) -> bool:
        """Whether the model has experts."""
        return "num_experts" in WORKLOADS[self.workload]["model"]

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees of ``DEGREES``."""
        return tuple(value for key, value in self.settings if key in DEGREES)

    @property
    def ranks(self) -> int:
        """World size."""
        return math.prod(self.degrees)

    @property
    def cost(self) -> int:
        """Micro-batches of a step, summed over ranks: proportional to the run time."""
        settings, batch = dict(self.settings), _train(self.workload, self.pipelined)["global_batch"]
        share = -(-batch // (settings["dp_replicate"] * settings["dp_shard"]))
        return self.ranks * -(-share // settings["micro_batch"])

    def __str__(self) -> str:
        """Test id: the workload and all settings that are not defaults."""
        defaults = {field.name: field.default for field in dataclasses.fields(Layout)}
        words = [f"{key}={value}" for key, value in self.settings if value != defaults[key]]
        words += [f"{key}={value}" for key, value in self.routing]
        return " ".join((self.workload, *words, *(["compiled"] if self.compiled else [])))


def list_cells(ranks: Iterable[int]) -> list[Cell]:
    """Every legal cell on these numbers of ranks; with expert parallelism, ``SAMPLED`` settings are random.

    Degrees and ``zero`` are enumerated together because rules relate them. The other settings are added one
    by one. An illegal prefix is dropped: no rule requires a setting that is added later.
    """
    return [
        Cell(workload, tuple(settings.items()))
        for workload in WORKLOADS
        for count in ranks
        for settings in _legal_settings(workload, count)
    ]


def sample_cells(ranks: int) -> Iterator[Cell]:
    """Endless random legal cells on this number of ranks."""
    rng = random.Random(SEED)
    shapes = _list_degrees(ranks)
    jobs = {
        (workload, pipelined): _job(workload, pipelined)
        for workload in WORKLOADS
        for pipelined in (False, True)
    }
    while True:
        workload, settings = rng.choice(list(WORKLOADS)), {**rng.choice(shapes), "zero": rng.randrange(4)}
        job = jobs[workload, settings["pp"] > 1]
        for key, values in SETTINGS.items():
            legal = [value for value in values if _is_legal(job, {**settings, key: value})]
            if not legal:
                break
            settings[key] = rng.choice(legal)
        else:
            yield Cell(workload, tuple(settings.items()))


def sample_routings(cells: Sequence[Cell], count: int) -> list[Cell]:
    """Random MoE cells, at most ``count``, each with random routing settings."""
    rng = random.Random(SEED)
    chosen = rng.sample([cell for cell in cells if cell.is_moe], count)
    routings = [tuple((key, rng.choice(values)) for key, values in ROUTING.items()) for _ in chosen]
    candidates = (dataclasses.replace(c, routing=r) for c, r in zip(chosen, routings, strict=True))
    return [cell for cell in candidates if not find_problems(cell.job)]


def list_compiled(cells: Sequence[Cell]) -> list[Cell]:
    """The cells whose blocks can be compiled, with compiled blocks."""
    compiled = (dataclasses.replace(cell, compiled=True) for cell in cells)
    return [cell for cell in compiled if not find_problems(cell.job)]


def _legal_settings(workload: str, ranks: int) -> list[dict[str, Any]]:
    jobs = [_job(workload, pipelined) for pipelined in (False, True)]
    found = [{**degrees, "zero": zero} for degrees, zero in itertools.product(_list_degrees(ranks), range(4))]
    found = [settings for settings in found if _is_legal(jobs[settings["pp"] > 1], settings)]
    rng = random.Random(SEED)
    for key, values in SETTINGS.items():
        extended = []
        for settings in found:
            candidates = [{**settings, key: value} for value in values]
            legal = [more for more in candidates if _is_legal(jobs[more["pp"] > 1], more)]
            shards_experts = settings.get("ep", 1) * settings.get("etp", 1) > 1
            extended += rng.sample(legal, 1) if legal and shards_experts and key in SAMPLED else legal
        found = extended
    return found


def _list_degrees(ranks: int) -> list[dict[str, int]]:
    """All degrees whose product is the number of ranks."""
    return [
        dict(zip(DEGREES, degrees, strict=True))
        for degrees in itertools.product(range(1, ranks + 1), repeat=len(DEGREES))
        if math.prod(degrees) == ranks
    ]


def _is_legal(job: Job, settings: dict[str, Any]) -> bool:
    candidate = _with_settings(job, settings)
    return all(rule.check(candidate) is None for rule in LAYOUT_RULES)


def _with_settings(job: Job, settings: dict[str, Any]) -> Job:
    stages = 2 if settings.get("schedule") in SEVERAL_STAGES else 1
    layout = Layout(mode="given", **settings, virtual_stages=stages)
    return dataclasses.replace(job, layout=layout)


def _job(workload: str, pipelined: bool, routing: Sequence[tuple[str, Any]] = ()) -> Job:
    """The job of a workload on one rank; the test replaces its data."""
    parts = WORKLOADS[workload]
    layers = {"num_layers": PIPELINED_LAYERS} if pipelined else {}
    tree: dict[str, dict[str, Any]] = {
        "model": {**DECODER, **parts["model"], **layers},
        "data": {"path": "builtin:python-stdlib", "seq_len": SEQ_LEN, **parts.get("data", {})},
        "train": {
            "steps": 10,
            "lr": DROPPING_LR if routing else LR,
            "warmup": 2,
            **_train(workload, pipelined),
        },
        "cluster": {"preset": "local", "device": "cpu"},
        "layout": {"dp_replicate": 1},
    }
    for path, value in routing:
        section, key = path.split(".")
        tree[section].pop(key, None)
        if value is not None:
            tree[section][key] = value
    return build_job({"name": "matrix", **tree})


def _train(workload: str, pipelined: bool) -> dict[str, Any]:
    parts = WORKLOADS[workload]
    return {**parts["train"], **(parts.get("pipelined", {}) if pipelined else {})}


Combinations = Callable[[Cell], Iterable[tuple[Any, ...]]]
"""The combinations of settings that a cell covers."""


def list_values(cell: Cell) -> Iterable[tuple[Any, ...]]:
    """Each setting alone, the workload, the context method and the expert axes."""
    return [("workload", cell.workload), *cell.settings, *_list_methods(cell)]


def list_pairs(cell: Cell) -> Iterable[tuple[Any, ...]]:
    """All pairs of settings; the workload is one of them."""
    return itertools.combinations((("workload", cell.workload), *cell.settings, *cell.routing), 2)


def list_pairs_and_degrees(cell: Cell) -> Iterable[tuple[Any, ...]]:
    """All pairs of settings, and the degrees of all axes together."""
    return [*list_pairs(cell), ("degrees", cell.degrees)]


def list_routing_pairs(cell: Cell) -> Iterable[tuple[Any, ...]]:
    """The pairs of which one is a routing setting. Of an axis it counts whether the layout has it."""
    layout = ((key, value > 1 if key in AXES else value) for key, value in cell.settings)
    pairs = itertools.product((("workload", cell.workload), *layout), cell.routing)
    return [*pairs, *itertools.combinations(cell.routing, 2)]


def list_recompute_pairs(cell: Cell) -> Iterable[tuple[Any, ...]]:
    """Activation checkpointing with FSDP and with sharded experts; workload, ZeRO stage and methods alone."""
    settings = dict(cell.settings)
    with_recompute = (("fsdp", settings["zero"] >= 2), ("experts", bool(cell.expert_axes)))
    alone = (("workload", cell.workload), ("zero", settings["zero"]), *_list_methods(cell))
    return [*alone, *((settings["recompute"], *other) for other in with_recompute)]


def list_traits(cell: Cell) -> Iterable[tuple[Any, ...]]:
    """All pairs of settings, with traits in place of pp, schedule, cp, context, ep and etp; these once each.

    The runtime code depends on two traits of a schedule: several stages per rank, and a split backward. For
    context and expert parallelism it depends on the method, not on the degree.
    """
    settings = dict(cell.settings)
    once = [(key, settings.pop(key)) for key in ("pp", "schedule", "cp", "context", "ep", "etp")]
    traits = _list_methods(cell)
    if cell.pipelined:
        schedule = once[1][1]
        traits += [("several stages", schedule in SEVERAL_STAGES), ("split", schedule in SPLIT_BACKWARD)]
    pairs = itertools.combinations((("workload", cell.workload), *settings.items(), *traits), 2)
    return [*pairs, *once]


def _list_methods(cell: Cell) -> list[tuple[str, Any]]:
    return [("context method", cell.context_method), ("expert axes", cell.expert_axes)]


def choose_covering(cells: Sequence[Cell], combinations: Combinations) -> list[Cell]:
    """A small set of cells that covers every combination of any cell.

    Greedy set cover: repeatedly the cell with the most uncovered combinations, then the lowest cost. These
    counts only shrink, so a cell is counted again only when it is at the top of the heap.
    """
    numbers: dict[Any, int] = {}
    shuffled = random.Random(SEED).sample(cells, len(cells))
    masks = [
        sum(1 << numbers.setdefault(c, len(numbers)) for c in dict.fromkeys(combinations(cell)))
        for cell in shuffled
    ]
    uncovered, chosen = (1 << len(numbers)) - 1, []
    heap = [(-mask.bit_count(), shuffled[index].cost, index) for index, mask in enumerate(masks)]
    heapq.heapify(heap)
    while uncovered:
        _, cost, index = heapq.heappop(heap)
        new = (masks[index] & uncovered).bit_count()
        if heap and (-new, cost, index) > heap[0]:
            heapq.heappush(heap, (-new, cost, index))
            continue
        chosen.append(shuffled[index])
        uncovered &= ~masks[index]
    return chosen
