"""All layouts that run, by asking the legality table, and small sets in which all pairs of settings meet."""

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
"""Of the order in which layouts are tried; recorded, so that the same ones run everywhere."""
SEQ_LEN = 24
DECODER = {"num_layers": 2, "hidden_size": 48, "num_heads": 24, "head_dim": 4, "ffn_size": 96}
"""Heads and feed-forward split over 2, 3, 4 and 8 ranks."""
GPT = {**GPT_PARTS, "max_positions": SEQ_LEN}
EXPERTS = {"num_experts": 12, "experts_per_token": 2, "expert_ffn_size": 12}
"""They are dealt to 2, 3 and 4 ranks, and so are the columns of each."""
DROPPING = {**EXPERTS, "capacity_factor": 1.0, "shared_experts": 1}
SIGMOID = {**EXPERTS, "router": "sigmoid", "dense_layers": 1}
PIPELINED_LAYERS = 4
"""Of a model that is cut into stages: two a rank on two ranks, or unequal ones on three."""
WORKS: dict[str, dict[str, Any]] = {
    "llama": {
        "model": {"num_kv_heads": 12, "vocab_size": 264, "tied_embeddings": False},
        "train": {"global_batch": 5, "optimizer": "sgd", "lr": 0.1},
        "pipelined": {"global_batch": 7},
    },
    "llama with experts, one key head": {
        "model": {**DROPPING, "num_kv_heads": 1, "vocab_size": 263, "tied_embeddings": True},
        "data": {"mask": "document"},
        "train": {"global_batch": 3, "balance_loss": 0.05},
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
"""Both families of decoders, dense and with experts: places that run out, shared experts, a dense layer in
front of them, key heads fewer than ``tp``, words that ``tp`` does not divide, tied and untied, packed
documents, masked prompts, and batches that no number of ranks divides. Pipelines have fewer micro-batches
than stages, and, with a batch of seven, enough for the schedules that ask for many."""

LAYOUT_RULES = [rule for rule in RULES if rule.code.startswith("layout") and rule.applies(to_run=True)]
"""What may be wrong with a layout, where nothing is with model, data and training."""
_HINTS = get_type_hints(Layout)
DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
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
"""What is tried beside the degrees and ``zero``; those that are not built yet join when they are."""
DRAWN = ("recompute", "accumulate", "prefetch", "offload")
"""Settings of which one is drawn for each layout with expert parallelism: else they are too many."""
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
"""How tokens find their experts: tried in pairs with each other and with everything else."""
SEVERAL_STAGES = ("interleaved", *V_SCHEDULES)
"""Schedules with several stages a rank: here two."""
SPLIT = ("zb-h1", *V_SCHEDULES)
"""Those that make the gradients of weights apart from those of inputs."""


@dataclass(frozen=True)
class Cell:
    """One layout of one model."""

    work: str
    settings: tuple[tuple[str, Any], ...]
    compiled: bool = False
    routing: tuple[tuple[str, Any], ...] = ()
    """Where it is not that of the work."""

    @property
    def job(self) -> Job:
        """The job to prove."""
        job = _place(_job(self.work, self.pipelined, self.routing), dict(self.settings))
        if not self.compiled:
            return job
        train = dataclasses.replace(job.train, block_backend="compile", compile_backend="aot_eager")
        return dataclasses.replace(job, train=train)

    @property
    def layout(self) -> tuple[tuple[str, Any], ...]:
        """How it is split, without how the batch is cut."""
        return tuple(item for item in self.settings if item[0] != "micro_batch")

    @property
    def pipelined(self) -> bool:
        """Whether its model is cut into stages."""
        return dict(self.settings)["pp"] > 1

    @property
    def sharing(self) -> str:
        """How ranks share sequences; empty where they do not."""
        settings = dict(self.settings)
        return settings["context"] if settings["cp"] > 1 else ""

    @property
    def dealing(self) -> str:
        """What of experts lies on different ranks: they, parts of them, or both; empty where nothing does."""
        settings = dict(self.settings)
        return " ".join(key for key in ("ep", "etp") if settings[key] > 1)

    @property
    def family(self) -> str:
        """Of its decoder."""
        return self.work.split()[0].strip(",")

    @property
    def routed(self) -> bool:
        """Whether its decoder has experts."""
        return "num_experts" in WORKS[self.work]["model"]

    @property
    def degrees(self) -> tuple[int, ...]:
        """Of the axes."""
        return tuple(value for key, value in self.settings if key in DEGREES)

    @property
    def ranks(self) -> int:
        """How many it needs."""
        return math.prod(self.degrees)

    @property
    def passes(self) -> int:
        """Micro-batches of a step on all ranks, by which it takes its time."""
        settings, batch = dict(self.settings), _train(self.work, self.pipelined)["global_batch"]
        share = -(-batch // (settings["dp_replicate"] * settings["dp_shard"]))
        return self.ranks * -(-share // settings["micro_batch"])

    def __str__(self) -> str:
        """As the name of a test: what is not the default."""
        idle = {field.name: field.default for field in dataclasses.fields(Layout)}
        said = [f"{key}={value}" for key, value in self.settings if value != idle[key]]
        said += [f"{key}={value}" for key, value in self.routing]
        return " ".join((self.work, *said, *(["compiled"] if self.compiled else [])))


def list_cells(ranks: Iterable[int]) -> list[Cell]:
    """Every legal cell on so many ranks; where experts are dealt, ``DRAWN`` are drawn.

    Degrees and ``zero`` need each other and come together. The settings are added one by one, and what the
    table refuses on the way is not gone on with: no rule asks of a setting that a later one be there.
    """
    return [
        Cell(work, tuple(settings.items()))
        for work in WORKS
        for count in ranks
        for settings in _legal_settings(work, count)
    ]


def draw_cells(ranks: int) -> Iterator[Cell]:
    """Legal cells on so many ranks, drawn without an end."""
    drawn = random.Random(SEED)
    shapes = _list_shapes(ranks)
    jobs = {(work, cut): _job(work, cut) for work in WORKS for cut in (False, True)}
    while True:
        work, zero = drawn.choice(list(WORKS)), drawn.randrange(4)
        settings = {**drawn.choice(shapes), "zero": zero}
        settings |= {key: drawn.choice(values) for key, values in SETTINGS.items()}
        if _is_legal(jobs[work, settings["pp"] > 1], settings):
            yield Cell(work, tuple(settings.items()))


def draw_routings(cells: Sequence[Cell], count: int) -> list[Cell]:
    """So many of those cells that have experts, each with a way of routing, all drawn."""
    drawn = random.Random(SEED)
    chosen = drawn.sample([cell for cell in cells if cell.routed], count)
    routings = [tuple((key, drawn.choice(values)) for key, values in ROUTING.items()) for _ in chosen]
    found = (dataclasses.replace(c, routing=r) for c, r in zip(chosen, routings, strict=True))
    return [cell for cell in found if not find_problems(cell.job)]


def list_compiled(cells: Sequence[Cell]) -> list[Cell]:
    """Those whose blocks may be compiled, compiled."""
    compiled = (dataclasses.replace(cell, compiled=True) for cell in cells)
    return [cell for cell in compiled if not find_problems(cell.job)]


def _legal_settings(work: str, ranks: int) -> list[dict[str, Any]]:
    jobs = [_job(work, pipelined=cut) for cut in (False, True)]
    found = [{**shape, "zero": zero} for shape, zero in itertools.product(_list_shapes(ranks), range(4))]
    found = [settings for settings in found if _is_legal(jobs[settings["pp"] > 1], settings)]
    drawn = random.Random(SEED)
    for key, values in SETTINGS.items():
        wider = []
        for settings in found:
            tried = [{**settings, key: value} for value in values]
            legal = [more for more in tried if _is_legal(jobs[more["pp"] > 1], more)]
            dealing = settings.get("ep", 1) * settings.get("etp", 1) > 1
            wider += drawn.sample(legal, 1) if legal and dealing and key in DRAWN else legal
        found = wider
    return found


def _list_shapes(ranks: int) -> list[dict[str, int]]:
    """All ways to place the ranks on the axes."""
    return [
        dict(zip(DEGREES, degrees, strict=True))
        for degrees in itertools.product(range(1, ranks + 1), repeat=len(DEGREES))
        if math.prod(degrees) == ranks
    ]


def _is_legal(job: Job, settings: dict[str, Any]) -> bool:
    placed = _place(job, settings)
    return all(rule.check(placed) is None for rule in LAYOUT_RULES)


def _place(job: Job, settings: dict[str, Any]) -> Job:
    stages = 2 if settings.get("schedule") in SEVERAL_STAGES else 1
    layout = Layout(mode="given", **settings, virtual_stages=stages)
    return dataclasses.replace(job, layout=layout)


def _job(work: str, pipelined: bool, routing: Sequence[tuple[str, Any]] = ()) -> Job:
    """The model and its batch; the data are those of the test."""
    parts = WORKS[work]
    layers = {"num_layers": PIPELINED_LAYERS} if pipelined else {}
    tree: dict[str, dict[str, Any]] = {
        "model": {**DECODER, **parts["model"], **layers},
        "data": {"path": "builtin:python-stdlib", "seq_len": SEQ_LEN, **parts.get("data", {})},
        "train": {"steps": 10, "lr": 3e-3, "warmup": 2, **_train(work, pipelined)},
        "cluster": {"preset": "local", "device": "cpu"},
        "layout": {"dp_replicate": 1},
    }
    for path, value in routing:
        section, key = path.split(".")
        tree[section].pop(key, None)
        if value is not None:
            tree[section][key] = value
    return build_job({"name": "matrix", **tree})


def _train(work: str, pipelined: bool) -> dict[str, Any]:
    parts = WORKS[work]
    return {**parts["train"], **(parts.get("pipelined", {}) if pipelined else {})}


Meetings = Callable[[Cell], Iterable[tuple[Any, ...]]]
"""What of a cell a covering set must have."""


def list_values(cell: Cell) -> Iterable[tuple[Any, ...]]:
    """Each setting of a cell by itself, with the model and the ways to share sequences and experts."""
    return [("work", cell.work), *cell.settings, ("sharing", cell.sharing), ("dealing", cell.dealing)]


def list_pairs(cell: Cell) -> Iterable[tuple[Any, ...]]:
    """Settings that meet in a cell, two by two; the model is one of them."""
    return itertools.combinations((("work", cell.work), *cell.settings, *cell.routing), 2)


def list_triples(cell: Cell) -> Iterable[tuple[Any, ...]]:
    """Settings that meet in a cell, three by three, and all degrees; the model is one of the settings."""
    return [*itertools.combinations((("work", cell.work), *cell.settings), 3), ("degrees", cell.degrees)]


def list_traits(cell: Cell) -> Iterable[tuple[Any, ...]]:
    """The same with less of pipelines, sequences and experts: settings once each, in pairs what they mean.

    To the code a schedule is an order, which all have, and two traits: whether ranks have several stages, and
    whether the backward pass is split. Of ranks that share sequences or experts it is how they do.
    """
    settings = dict(cell.settings)
    once = [(key, settings.pop(key)) for key in ("pp", "schedule", "cp", "context", "ep", "etp")]
    traits = [("sharing", cell.sharing), ("dealing", cell.dealing)]
    if cell.pipelined:
        schedule = once[1][1]
        traits += [("several stages", schedule in SEVERAL_STAGES), ("split", schedule in SPLIT)]
    return [*itertools.combinations((("work", cell.work), *settings.items(), *traits), 2), *once]


def choose_covering(cells: Sequence[Cell], meetings: Meetings) -> list[Cell]:
    """Few cells in which all that meets in any legal cell does.

    Greedily: always the cell with the most that is new, and of equal ones the cheapest. What is new in a cell
    only shrinks, so a cell is counted again only when it comes to the top of the heap.
    """
    numbers: dict[Any, int] = {}
    tried = random.Random(SEED).sample(cells, len(cells))
    masks = [sum(1 << numbers.setdefault(met, len(numbers)) for met in meetings(cell)) for cell in tried]
    left, chosen = (1 << len(numbers)) - 1, []
    heap = [(-mask.bit_count(), tried[index].passes, index) for index, mask in enumerate(masks)]
    heapq.heapify(heap)
    while left:
        _, passes, index = heapq.heappop(heap)
        new = (masks[index] & left).bit_count()
        if heap and (-new, passes, index) > heap[0]:
            heapq.heappush(heap, (-new, passes, index))
            continue
        chosen.append(tried[index])
        left &= ~masks[index]
    return chosen
