"""Jobs for the planner's tests; a plan for two ranks, and the events of a run that matches it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.audit.record import RunRecord
from meshwright.plan.build import build_plan
from meshwright.plan.contract import PLAN_FILE, PlanContract, write_plan
from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.profiles import PROFILES
from meshwright.spec.job import Job
from meshwright.spec.load import build_job
from meshwright.spec.model import DecoderModel
from meshwright.validation.devices import known_devices

GPT_22B = DecoderModel(
    num_layers=48, hidden_size=6144, num_heads=64, num_kv_heads=64, ffn_size=24576, vocab_size=51200,
    positions="learned", max_positions=2048, norm="layer", activation="gelu", tied_embeddings=True,
)  # fmt: skip
LLAMA_8B = DecoderModel(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_size=14336, vocab_size=128256
)
EXPERTS = DecoderModel(
    num_layers=16, hidden_size=2048, num_heads=16, num_kv_heads=4, ffn_size=8192, vocab_size=32000,
    num_experts=64, experts_per_token=6, expert_ffn_size=1024, shared_experts=2, dense_layers=1,
)  # fmt: skip
LATENT = DecoderModel(
    num_layers=16, hidden_size=2048, num_heads=16, num_kv_heads=16, ffn_size=8192, vocab_size=32000,
    attention="latent", latent_size=512, query_latent_size=1024, rope_head_dim=64, head_dim=128,
    value_head_dim=128, window=1024, num_experts=32, experts_per_token=4, expert_ffn_size=1024,
)  # fmt: skip
MODELS = {"gpt": GPT_22B, "llama": LLAMA_8B, "experts": EXPERTS, "latent": LATENT}


@pytest.fixture(scope="session")
def make_job() -> Callable[..., Job]:
    """``make_job(layout={"dp_replicate": 2})``: the tiny model with tables laid over; jobs are built once."""
    made: dict[str, Job] = {}

    def make(**tables: Any) -> Job:
        if repr(tables) not in made:
            made[repr(tables)] = build(tables)
        return made[repr(tables)]

    def build(tables: dict[str, dict[str, Any]]) -> Job:
        tree: dict[str, Any] = {
            "name": "small",
            "model": {"preset": "tiny"},
            "cluster": {"preset": "h100-sxm"},
            "data": {"path": "text", "seq_len": 32},
            "train": {"steps": 4, "global_batch": 8},
        }
        for name, keys in tables.items():
            tree[name] = {**tree.get(name, {}), **keys}
        return build_job(tree)

    return make


@pytest.fixture
def make_h200_job(make_job: Callable[..., Job]) -> Callable[..., Job]:
    """``make_h200_job(layers=12, batch=4)``: a Llama 2048 wide, compiled on one H200, sequences of 4096."""

    def make(layers: int = 16, batch: int = 8) -> Job:
        sizes = {"hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 8192}
        words = {"vocab_size": 128256, "tied_embeddings": False}
        return make_job(
            model={"preset": None, "num_layers": layers, **sizes, **words},
            cluster={"preset": "h200-sxm", "devices_per_node": 1},
            data={"seq_len": 4096},
            train={
                "global_batch": batch,
                "precision": "bf16",
                "block_backend": "triton",
                "residual_dtype": "bf16",
            },
            layout={"dp_replicate": 1, "micro_batch": batch, "recompute": "selective"},
        )

    return make


@pytest.fixture
def make_workload() -> Callable[..., Workload]:
    """``make_workload("llama", profile="torchtitan")``: 2,048 tokens, 512 samples, on H100."""

    def make(model: str = "llama", profile: str = "megatron-core", **fields: Any) -> Workload:
        chosen: dict[str, Any] = {
            "model": MODELS[model],
            "cluster": known_devices()["H100-80GB-SXM"],
            "seq_len": 2048,
            "global_batch": 512,
            "precision": "bf16",
            "profile": PROFILES[profile],
        }
        return Workload(**{**chosen, **fields})

    return make


@pytest.fixture
def make_grid() -> Callable[..., Grid]:
    """``make_grid(tp=[1, 2])``: layouts in columns; degrees that are not given are 1."""

    def make(**columns: Any) -> Grid:
        count = max((len(column) for column in columns.values()), default=1)
        plain = dict.fromkeys(Grid.__dataclass_fields__, 1)
        plain |= {"zero": 0, "accumulate": 0, "schedule": 1, "context": 0, "recompute": 0, "offload": 0}
        plain |= {"sequence_parallel": False, "backup_replicas": 0}
        made = {name: np.full(count, value) for name, value in plain.items()}
        made |= {name: np.asarray(column) for name, column in columns.items()}
        return Grid(**made)

    return make


@pytest.fixture
def random_grid() -> Grid:
    """Four hundred random layouts, the same in every run."""
    generator = np.random.default_rng(7)
    options: dict[str, tuple[int, ...]] = {
        "pp": (1, 2, 4, 8), "dp_replicate": (1, 2), "dp_shard": (1, 4, 16), "cp": (1, 2), "tp": (1, 2, 4),
        "ep": (1, 4), "etp": (1, 2), "zero": (0, 1, 2, 3), "accumulate": (0, 1),
        "schedule": (0, 1, 2, 3, 4, 5),
        "virtual_stages": (1, 2), "context": (0, 1), "micro_batch": (1, 2), "recompute": (0, 1, 2),
        "offload": (0, 1, 2), "prefetch": (0, 1, 2),
    }  # fmt: skip
    columns: dict[str, Any] = {name: generator.choice(np.array(v), 400) for name, v in options.items()}
    columns["backup_replicas"] = np.zeros(400, dtype=np.int64)
    return Grid(sequence_parallel=generator.random(400) < 0.5, **columns)


STEPS, EVALUATIONS = 4, 2
Events = list[dict[str, Any]]


@pytest.fixture(scope="session")
def plan() -> PlanContract:
    """Two replicas of the tiny model; three buckets."""
    job = build_job(
        {
            "model": {"preset": "tiny"},
            "cluster": {"preset": "local", "device": "cpu", "devices_per_node": 2},
            "data": {"path": "text", "seq_len": 32},
            "train": {"steps": STEPS, "global_batch": 8},
            "layout": {"dp_replicate": 2, "bucket_mb": 0.1},
        }
    )
    return build_plan(job)[0]


@pytest.fixture(scope="session")
def pipeline_plan() -> PlanContract:
    """Two stages of the tiny model."""
    job = build_job(
        {
            "model": {"preset": "tiny"},
            "cluster": {"preset": "local", "device": "cpu", "devices_per_node": 2},
            "data": {"path": "text", "seq_len": 32},
            "train": {"steps": STEPS, "global_batch": 8},
            "layout": {"pp": 2},
        }
    )
    return build_plan(job)[0]


@pytest.fixture
def matching_events(plan: PlanContract, events_of: Callable[..., Events]) -> Callable[..., Events]:
    """Events of a run whose measurements equal the plan, on every rank."""
    return functools.partial(events_of, plan)


@pytest.fixture
def events_of() -> Callable[..., Events]:
    """``events_of(plan)``: events of a run whose measurements equal that plan."""

    def events(plan: PlanContract, generation: int = 0) -> Events:
        found: Events = []
        times = {"setup": 1, "step": STEPS, "eval": EVALUATIONS}
        for predicted in plan.ranks:
            head = {"v": 1, "time": 0.0, "rank": predicted.rank, "generation": generation}
            found.append({**head, "event": "ready", "step": 0, "steps": STEPS, "peak_basis": "a matmul"})
            for step in range(1, STEPS + 1):
                facts = {"loss": 6.0 - step, "step_s": 0.5, "mfu": 0.25, "tokens": 256}
                found.append({**head, "event": "step", "step": step, **facts})
            found.append({**head, "event": "eval", "step": STEPS, "loss": 5.5, "samples": 64})
            state = {"state_bytes": dict(predicted.state_bytes), "peak_bytes": predicted.peak_bytes}
            state["activation_bytes"] = predicted.activation_bytes
            found.append({**head, "event": "state", "step": 1, "first_step": False, **state})
            rows = [
                {
                    **{k: v for k, v in dataclasses.asdict(t).items() if k != "pp_rank"},
                    "calls": t.calls * times[t.phase],
                    "bytes": t.bytes * times[t.phase],
                }
                for t in plan.collectives_of(predicted.rank)
            ]
            counts = {"rows": rows, "steps": STEPS, "evaluations": EVALUATIONS}
            found.append({**head, "event": "collectives", **counts})
            found.append({**head, "event": "finished", "status": "complete", "step": STEPS, "steps": STEPS})
        return found

    return events


def pick(events: Events, name: str, rank: int) -> dict[str, Any]:
    """The one event of that name and rank."""
    (event,) = [e for e in events if e["event"] == name and e["rank"] == rank]
    return event


@pytest.fixture
def find_event() -> Callable[..., dict[str, Any]]:
    """``find_event(events, "state", rank=1)``."""
    return pick


@pytest.fixture
def record_of() -> Callable[[Events], RunRecord]:
    """``record_of(events)``: the record built from events, as in a live run."""

    def fold(events: Events) -> RunRecord:
        record = RunRecord()
        for event in events:
            record.feed(event)
        return record

    return fold


@pytest.fixture
def run_folder(plan: PlanContract, tmp_path: Path) -> Callable[[Events], Path]:
    """``run_folder(events)``: a run folder with the plan and these events."""

    def write(events: Events) -> Path:
        write_plan(plan, tmp_path / PLAN_FILE)
        lines = [json.dumps(event) + "\n" for event in events]
        (tmp_path / "events.jsonl").write_text("".join(lines))
        return tmp_path

    return write
