"""The estimate against the exact ledger, and the printed ledger against the estimate."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.memory import estimate_memory
from meshwright.plan.estimate.memory_report import estimate_ledgers
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.memory.compiled import count_copied_weights, is_compiled
from meshwright.plan.memory.ledger import predict_ledger
from meshwright.plan.profiles import PROFILES
from meshwright.spec.layout import Layout
from meshwright.spec.load import build_job

WITHIN = 0.002
"""Fraction of the ledger's peak; the estimate leaves out only optimizer step counts and statistics."""
GPT = {
    "num_layers": 24, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 16, "ffn_size": 8192,
    "vocab_size": 50304, "positions": "learned", "max_positions": 8192, "norm": "layer", "activation": "gelu",
    "attention_bias": True, "ffn_bias": True, "tied_embeddings": True,
}  # fmt: skip
MODELS = {
    "llama-1b": {"preset": "llama3.2-1b"},
    "llama-8b": {"preset": "llama3-8b"},
    "gpt": GPT,
    "gpt-untied": {**GPT, "tied_embeddings": False},
    "wide attention": {
        "num_layers": 12, "hidden_size": 1024, "num_heads": 32, "num_kv_heads": 32, "head_dim": 128,
        "ffn_size": 1024, "vocab_size": 32000,
    },
    "small": {
        "num_layers": 8, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 4, "ffn_size": 1536,
        "vocab_size": 32000,
    },
}  # fmt: skip

EXPERTS = {
    "num_layers": 16, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 16, "ffn_size": 2048,
    "vocab_size": 32000, "num_experts": 16, "experts_per_token": 2,
}  # fmt: skip
MANY = {"num_layers": 8, "num_experts": 64, "experts_per_token": 6, "expert_ffn_size": 1408}
EXPERT_MODELS = {
    "experts": EXPERTS,
    "shared": {**EXPERTS, **MANY, "shared_experts": 1},
    "dense first": {**EXPERTS, **MANY, "dense_layers": 1, "ffn_size": 8192},
    "gpt": {
        **EXPERTS, "activation": "gelu", "norm": "layer", "positions": "learned", "max_positions": 8192,
        "ffn_bias": True, "attention_bias": True,
    },
}  # fmt: skip
EXPERTS_WITHIN = 0.03
"""Fraction of the ledger's peak: gradients inside an expert layer are estimated, not walked."""


@pytest.mark.parametrize(
    ("model", "backend"),
    [("llama-1b", "triton"), ("llama-1b", "compile"), ("gpt", "triton"), ("small", "triton")],
)
@pytest.mark.parametrize("residual", ["fp32", "bf16"])
def test_a_search_uses_the_ledger_of_compiled_steps(model, backend, residual):
    """One grid has all checkpointing modes, DDP, micro-batches and layouts that are not compiled."""
    job = build_job(
        {
            "name": "both",
            "model": MODELS[model],
            "cluster": {"preset": "h200-sxm"},
            "data": {"path": "text", "seq_len": 2048},
            "train": {"steps": 2, "global_batch": 8, "precision": "bf16", "residual_dtype": residual}
            | {"block_backend": backend},
        }
    )
    layouts = [
        Layout(
            mode="given", dp_replicate=ranks, dp_shard=shards, zero=zero, recompute=recompute, micro_batch=n
        )
        for recompute in ("none", "selective", "full")
        for ranks, shards, zero in ((1, 1, 0), (2, 1, 0), (1, 2, 1), (1, 2, 3))
        for n in (1, 4)
    ]
    split = Layout(mode="given", tp=2, micro_batch=4)
    found = estimate_memory(Workload.of(job), Grid.of([*layouts, split])).counted_as("allocated")
    for layout, allocated in zip(layouts, found, strict=False):
        placed = dataclasses.replace(job, layout=layout)
        assert is_compiled(placed) is (layout.zero < 2)
        if is_compiled(placed):
            share = 8 // (layout.dp_replicate * layout.dp_shard * layout.micro_batch)
            exact = predict_ledger(placed, layout.micro_batch, share).peak_bytes
            assert allocated == pytest.approx(exact, rel=WITHIN)
    eager = dataclasses.replace(
        job, train=dataclasses.replace(job.train, block_backend="eager", residual_dtype="fp32")
    )
    rest = [place for place, layout in enumerate(layouts) if layout.zero == 3]
    before = estimate_memory(Workload.of(eager), Grid.of([*layouts, split])).counted_as("allocated")
    assert found[rest] == pytest.approx(before[rest])
    assert found[-1] - before[-1] == pytest.approx(count_copied_weights(job.model) * 2 / 2), (
        "half of the copies"
    )


@pytest.mark.parametrize("seq_len", [64, 2048], ids=["gradients at peak", "loss at peak"])
def test_bf16_gradients_are_estimated_as_in_the_ledger(seq_len):
    """They need one process and one micro-batch. Layouts that accumulate keep float32."""
    train = {
        "steps": 2,
        "global_batch": 8,
        "precision": "bf16",
        "block_backend": "triton",
        "grad_dtype": "bf16",
    }
    job = build_job(
        {
            "name": "narrow",
            "model": MODELS["llama-1b"],
            "cluster": {"preset": "h200-sxm"},
            "data": {"path": "text", "seq_len": seq_len},
            "train": train,
        }
    )
    layouts = [Layout("given", dp_replicate=ranks, micro_batch=n) for ranks, n in ((1, 8), (1, 4), (2, 4))]
    layouts.append(Layout("given", dp_replicate=2, micro_batch=8))  # one rank has nothing but padding
    estimate = estimate_memory(Workload.of(job), Grid.of(layouts))
    states = []
    for number, layout in enumerate(layouts):
        rounds = max(1, 8 // (layout.dp_replicate * (layout.micro_batch or 1)))
        exact = predict_ledger(dataclasses.replace(job, layout=layout), layout.micro_batch or 1, rounds)
        states.append(exact.state_bytes["gradients"])
        assert estimate.counted_as("allocated")[number] == pytest.approx(exact.peak_bytes, rel=WITHIN)
        assert estimate.state_before_optimizer_bytes[number] == pytest.approx(
            sum(exact.state_bytes.values()), rel=WITHIN
        )
    assert states[0] < states[1] == states[2] == states[3]
    kept = Grid.of([Layout("given", micro_batch=8, offload="optimizer")])
    wide = dataclasses.replace(job, train=dataclasses.replace(job.train, grad_dtype="fp32"))
    found, wanted = (estimate_memory(Workload.of(which), kept) for which in (job, wide))
    assert (found.peak_bytes, found.state_before_optimizer_bytes) == (
        wanted.peak_bytes,
        wanted.state_before_optimizer_bytes,
    )


@pytest.mark.parametrize("model", sorted(MODELS) + sorted(f"{name} (MoE)" for name in EXPERT_MODELS))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_meshwright_profile_is_the_exact_ledger(model, precision, recompute):
    """The cases are one process and DDP, one and two micro-batches, short and long sequences."""
    name, has_experts = model.removesuffix(" (MoE)"), model.endswith(" (MoE)")
    within = EXPERTS_WITHIN if has_experts else WITHIN
    for ranks, micro_batch, seq_len, rounds in [
        (1, 1, 1024, 1), (1, 4, 4096, 1), (1, 2, 2048, 2), (2, 1, 8192, 1), (2, 4, 1024, 2)
    ]:  # fmt: skip
        tree = {
            "name": "both",
            "model": (EXPERT_MODELS if has_experts else MODELS)[name],
            "cluster": {"preset": "h200-sxm"},
            "data": {"path": "text", "seq_len": seq_len},
            "train": {"steps": 2, "global_batch": ranks * micro_batch * rounds, "precision": precision},
            "layout": {"dp_replicate": ranks, "recompute": recompute, "micro_batch": micro_batch},
        }
        job = build_job(tree)
        exact = predict_ledger(job, micro_batch, rounds)
        estimate = estimate_memory(Workload.of(job), Grid.of([job.layout]))
        assert estimate.counted_as("allocated")[0] == pytest.approx(exact.peak_bytes, rel=within)
        assert estimate.state_before_optimizer_bytes[0] == pytest.approx(
            sum(exact.state_bytes.values()), rel=WITHIN
        )


def evaluate_formula(formula: str) -> float:
    """A printed formula as a number. Labels are in brackets and x multiplies."""
    bare = re.sub(r"\[[^\]]*\]", "", formula).replace(" x ", " * ")
    assert re.fullmatch(r"[-\d.e+ */]*", bare), f"not arithmetic: {bare}"
    return float(eval(bare))


@pytest.mark.parametrize("profile", sorted(PROFILES))
@pytest.mark.parametrize("model", ["llama", "experts", "latent"])
def test_every_printed_formula_evaluates_to_its_line(make_workload, random_grid, profile, model):
    """The lines with allocator and context sum to the peak that the search estimates for each class."""
    workload = make_workload(model, profile)
    rules = workload.profile.memory
    for place in range(0, 400, 23):
        layout = random_grid.layout(place)
        estimate = estimate_memory(workload, random_grid.take(np.array([place])))
        ledgers = estimate_ledgers(workload, layout)
        peaks = [float(peak[0]) for peak in estimate.classes.values() if np.isfinite(peak[0]) and peak[0] > 0]
        assert len(peaks) == len(ledgers)
        for ledger, peak in zip(ledgers, peaks, strict=True):
            for line in ledger.lines:
                assert evaluate_formula(line.formula) == pytest.approx(line.bytes, rel=1e-9, abs=2.0), line
            assert sum(line.bytes for line in ledger.lines) == ledger.peak_bytes
            needed = ledger.peak_bytes * (1 + rules.reserve) + rules.context_bytes
            assert needed == pytest.approx(peak, rel=1e-6, abs=20)


def test_ddp_with_accumulation_holds_gradients_twice_in_its_first_step(make_workload, make_grid):
    workload = make_workload("llama", "meshwright")
    ledger = estimate_ledgers(workload, make_grid(dp_replicate=[2]).layout(0))[0]
    gradients = next(line.bytes for line in ledger.lines if line.name == "gradients")
    assert ledger.first_peak_bytes - ledger.peak_bytes == pytest.approx(gradients, abs=2)
    one = estimate_ledgers(
        make_workload("llama", "meshwright", global_batch=2), make_grid(dp_replicate=[2]).layout(0)
    )[0]
    assert one.first_peak_bytes == one.peak_bytes


def test_program_in_the_memory_model_page_prints_the_peaks_of_the_text(capsys):
    """The program in docs/memory-model.md runs unchanged. Its first and last peak are in the text."""
    page = (Path(__file__).parents[4] / "docs" / "memory-model.md").read_text(encoding="utf-8")
    program = re.search(r"python - <<'EOF'\n(.*?)\nEOF\n", page, re.DOTALL)
    assert program is not None
    exec(compile(program[1], "memory-model.md", "exec"), {})
    printed = re.findall(r"([\d.]+ GB) at", capsys.readouterr().out)
    assert len(printed) >= 2, "a peak for each class of pp ranks"
    text = page.rpartition("EOF")[2]
    assert printed[0] in text
    assert printed[-1] in text
