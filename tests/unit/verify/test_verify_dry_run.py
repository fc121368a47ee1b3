"""Dry runs: the ledger against fake tensors for large models, injected errors, refused jobs."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from meshwright.cli.dry_run import dry_run_job
from meshwright.cli.output import Output
from meshwright.core.errors import UserError
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.models.weight_source import RandomWeights
from meshwright.plan import predict
from meshwright.verify.dry_run import FakeStore
from meshwright.verify.even_routing import choose_round_robin, even_counts
from meshwright.verify.fake_tensors import RealIntegers, SharedChunks

SMALL = ("train.global_batch=12", "data.seq_len=32", "cluster.device=cpu")


@pytest.fixture
def dry_run(capfd):
    """Dry-run one rank of a preset; returns the result and stderr."""

    def run(preset, *overrides, rank=0, on=None, expect=0):
        capfd.readouterr()
        status = dry_run_job(Output(as_json=True), preset, overrides, rank, on)
        out, err = capfd.readouterr()
        assert status == expect, err
        return json.loads(out), err

    return run


SEQUENCE = "sequence_parallel=true"
LARGE = [
    ("llama3-8b", "dp_shard=8", 5, "1x8xh100-sxm"),
    ("llama3-8b", "dp_shard=8 zero=1", 7, "1x8xh200-sxm"),
    ("llama3-8b", "dp_shard=8 zero=2 recompute=selective", 1, "1x8xh100-sxm"),
    ("gpt3-175b", "dp_shard=64 recompute=full", 63, "8x8xh100-sxm"),
    ("llama3-70b", "dp_shard=64 recompute=full", 0, "8x8xh100-sxm"),
    ("llama3-70b", "dp_replicate=64 dp_shard=8 recompute=full", 100, "64x8xh100-sxm"),
    ("llama3-70b", "dp_shard=512 recompute=selective", 511, "64x8xh100-sxm"),
    ("llama3-405b", "dp_replicate=2 dp_shard=256 recompute=full", 300, "64x8xh100-sxm"),
    ("llama3-8b", "tp=8", 3, "1x8xh100-sxm"),
    ("llama3-8b", f"tp=2 dp_shard=4 {SEQUENCE} recompute=selective", 5, "1x8xh100-sxm"),
    ("llama3-70b", f"tp=8 dp_shard=8 {SEQUENCE} recompute=selective", 63, "8x8xh100-sxm"),
    ("llama3-70b", f"tp=8 dp_shard=64 {SEQUENCE} recompute=full", 77, "64x8xh100-sxm"),
    ("gpt3-175b", f"tp=8 dp_replicate=2 dp_shard=4 zero=2 {SEQUENCE} recompute=full", 9, "8x8xh100-sxm"),
    ("llama3-405b", f"tp=16 dp_shard=32 {SEQUENCE} recompute=full", 511, "64x8xh100-sxm"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "layout", "rank", "on"), LARGE)
def test_ledger_of_large_models_matches_a_dry_run(dry_run, preset, layout, rank, on):
    """8B to 405B models on 8 to 512 ranks have equal state and traffic.

    Activations and peak are within 5%.
    """
    asked = [*(f"layout.{key}" for key in layout.split()), "layout.micro_batch=1"]
    named = dict(key.split("=") for key in layout.split())
    samples = int(named.get("dp_replicate", 1)) * int(named.get("dp_shard", 1))
    found, messages = dry_run(preset, *asked, f"train.global_batch={samples}", rank=rank, on=on)
    assert found["equal"], found["differences"]
    assert found["world_size"] == samples * int(named.get("tp", 1))
    assert {row["kind"] for row in found["state"]} >= {"parameters", "gradients", "optimizer", "peak"}
    moved = {(row["axis"], row["op"]) for row in found["collectives"] if row["bytes"] > 2**30}
    assert {axis for axis, _ in moved} >= {axis for axis in ("dp_shard", "tp") if axis in named}
    assert found["process_bytes"] < found["job_peak_bytes"] / 8, "no real memory was allocated"
    assert "for a CPU" in messages


def test_memory_that_the_process_used_before_is_not_counted(dry_run, monkeypatch):
    """A notebook or a test process may have held gigabytes before the dry run."""
    peaks = iter((5_000_000_000, 5_000_300_000))
    monkeypatch.setattr("meshwright.runs.dry_run._peak_process_bytes", lambda: next(peaks))
    found, messages = dry_run("tiny", "layout.dp_shard=2", *SMALL)
    assert found["process_bytes"] == 300_000
    assert "and 300 kB of this machine's memory" in messages


def test_a_dry_run_draws_no_weights(dry_run, monkeypatch):
    """Fake tensors have no values, and several threads must not draw into one."""

    def refuse(*_):
        pytest.fail("random weights were drawn")

    monkeypatch.setattr(RandomWeights, "rows", refuse)
    dry_run("tiny", "layout.dp_shard=2", *SMALL)


@pytest.mark.parametrize(("tokens", "etp"), [(1, 1), (3, 1), (8, 2), (21, 2)])
def test_ranks_agree_on_even_routing(tokens, etp):
    """The rows that a rank expects are those that the others send.

    They are even, also with fewer tokens than experts.
    """
    ranks, experts = 4, 8
    held = experts * etp // ranks
    nowhere, choice = torch.zeros(tokens, experts), torch.zeros(tokens, 2, dtype=torch.int64)
    sent = [choose_round_robin(ep_rank, nowhere, choice) for ep_rank in range(ranks)]
    counts = torch.stack([torch.bincount(chosen.flatten(), minlength=experts) for chosen in sent])
    totals = counts.sum(0)
    assert totals.max() - totals.min() <= 1
    for ep_rank in range(ranks):
        expected = counts[ep_rank].view(ranks // etp, held).repeat_interleave(etp, 0)
        first = ep_rank // etp * held
        assert torch.equal(even_counts(expected, ep_rank, experts, etp), counts[:, first : first + held])


def test_ranks_with_fewer_choices_than_experts_are_dry_run(dry_run):
    """Rank 3 sends nothing to its own experts but receives tokens from others."""
    mixture = ("model.num_experts=4", "model.experts_per_token=1", "data.seq_len=8")
    layout = ("layout.cp=2", "layout.tp=2", "layout.ep=4", "layout.micro_batch=1")
    found, _ = dry_run("tiny", *SMALL, *mixture, *layout, rank=3)
    assert {row["axis"] for row in found["collectives"] if row["op"] == "all_to_all"} == {"ep"}


@pytest.mark.parametrize(
    "layout",
    [
        ("dp_replicate=1 micro_batch=3", "train.precision=fp16", "train.noise_scale_every=1"),
        ("dp_replicate=3", "compression.kind=bf16", "train.optimizer=muon"),
        pytest.param(
            ("dp_shard=3 zero=2", "train.precision=bf16", "data.mask=document", "train.grad_noise=0.1"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("dp_shard=5 micro_batch=1", "train.precision=fp16", "train.optimizer=sgd", "train.clip=0.0"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("dp_shard=2 recompute=selective", "model.positions=learned", "model.max_positions=32"),
            marks=pytest.mark.slow,
        ),
        (f"tp=4 dp_shard=3 {SEQUENCE}", "train.precision=fp16", "data.mask=document", "model.vocab_size=321"),
        ("pp=2 dp_shard=2 zero=3 schedule=zb-h1", "train.precision=bf16", "compression.kind=bf16"),
    ],
    ids=lambda layout: layout[0],
)
def test_settings_that_read_tensor_values_can_be_dry_run(dry_run, layout):
    """Loss scales, noise scales, masks and all optimizers read zeros. Their traffic is not affected."""
    degrees, *settings = layout
    asked = [*(f"layout.{key}" for key in degrees.split()), *settings, *SMALL]
    found, _ = dry_run("tiny", *asked)
    assert found["equal"], found["differences"]


@pytest.mark.parametrize(
    "layout",
    [
        "dp_shard=3",
        pytest.param("dp_shard=5 recompute=full", marks=pytest.mark.slow),
        pytest.param("tp=2 dp_shard=3", marks=pytest.mark.slow),
        pytest.param("pp=2 dp_shard=3", marks=pytest.mark.slow),
    ],
)
def test_a_short_last_shard_is_allocated_once(dry_run, layout):
    """257 tokens are not divisible by 3 or 5. The last rank has fewer rows, which FSDP2 pads, once."""
    degrees = dict(key.split("=") for key in layout.split())
    ranks = int(degrees["dp_shard"]) * int(degrees.get("tp", 1)) * int(degrees.get("pp", 1))
    asked = [*(f"layout.{key}" for key in layout.split()), *SMALL, "model.vocab_size=257"]
    batch = f"train.global_batch={2 * int(degrees['dp_shard'])}"
    found, _ = dry_run("tiny", *asked, batch, "layout.micro_batch=1", rank=ranks - 1)
    assert found["equal"], found["differences"]


def test_peak_of_long_sequences_is_in_the_final_norm(dry_run):
    """With few parameters and long sequences the backward pass of the norm is the peak. It is predicted."""
    found, _ = dry_run("tiny", "layout.dp_shard=2", "layout.micro_batch=8", "train.global_batch=16")
    assert found["equal"], found["differences"]


EXPERTS = (
    "train.global_batch=8", "data.seq_len=32", "cluster.device=cpu", "layout.micro_batch=2",
    "model.num_experts=4", "model.experts_per_token=2", "train.precision=fp32",
)  # fmt: skip
EXPERTS_PREFIX = [
    ("dp_shard=2 ep=2 zero=3", "model.shared_experts=1"),
    ("tp=2 ep=2 recompute=selective", "model.dense_layers=1"),
    ("pp=2 dp_shard=2 ep=2 zero=1 schedule=zb-h1 micro_batch=1",),
    ("dp_shard=2 etp=2 zero=1", "model.capacity_factor=0.5"),
    ("dp_replicate=1", "model.activation=gelu", "model.router=sigmoid", "train.balance_rate=0.01"),
    ("dp_replicate=2", "model.router=sigmoid", "model.experts_per_token=1", "train.precision=bf16"),
    ("dp_shard=4 ep=2 zero=3 prefetch=0",),
    ("dp_shard=4 ep=2 zero=2", "compression.kind=bf16"),
    ("dp_shard=2 ep=2 zero=3 recompute=selective", "train.precision=bf16"),
    (f"tp=2 {SEQUENCE} recompute=full", "model.shared_experts=1"),
    ("cp=2 tp=2 ep=4 context=ulysses", "model.capacity_factor=1.0", "model.shared_experts=1"),
    ("cp=2 ep=2",),
    ("pp=2 dp_shard=2 ep=2 zero=3 schedule=zb-h1 micro_batch=1",),
    ("dp_replicate=2 dp_shard=2 ep=2 zero=1", "compression.kind=bf16"),
    ("dp_shard=4 ep=2 zero=3 accumulate=deferred micro_batch=1",),
    ("dp_shard=2 ep=2 zero=3 offload=all",),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in EXPERTS_PREFIX[:2] else [pytest.mark.slow])
        for case in EXPERTS_PREFIX
    ],
    ids=lambda case: case[0],
)
def test_ledger_of_experts_matches_a_dry_run(dry_run, case):
    """Traffic is equal. Activations differ by a loss or two at most, and the peak is within 2%."""
    degrees, *settings = case
    asked = [*EXPERTS, *(f"layout.{key}" for key in degrees.split()), *settings]
    for rank in (0, 2) if "pp=2" in degrees else (0,):
        found, _ = dry_run("tiny", *asked, rank=rank)
        assert found["equal"], found["differences"]
        memory = {row["kind"]: row for row in found["state"]}
        kept, peak = memory["activations"], memory["peak"]
        assert 0 <= kept["measured"] - kept["predicted"] <= 8
        assert peak["measured"] == pytest.approx(peak["predicted"], rel=0.02)
        assert kept["expert_load_bytes"] == 0, "the plan assumes an even load"


# Errors that a dry run finds


def test_wrong_traffic_prediction_is_named_by_axis_and_op(dry_run, monkeypatch):
    right = predict.predict_traffic

    def wrong(job, pp_rank):
        return [
            dataclasses.replace(row, bytes=row.bytes - 4) if row.op == "reduce_scatter" else row
            for row in right(job, pp_rank)
        ]

    monkeypatch.setattr(predict, "predict_traffic", wrong)
    found, messages = dry_run("tiny", "layout.dp_shard=4", *SMALL, expect=3)
    assert not found["equal"]
    [difference] = found["differences"]
    assert "axis dp_shard, reduce_scatter in phase step: " in difference
    assert "[dry-run-differs]" in messages


def test_wrong_peak_prediction_is_found(dry_run, monkeypatch):
    """A small peak may differ by 12%."""
    right = predict.predict_ledger

    def wrong(job, *sizes):
        ledger = right(job, *sizes)
        return dataclasses.replace(ledger, first_peak_bytes=int(ledger.first_peak_bytes * 1.15))

    monkeypatch.setattr(predict, "predict_ledger", wrong)
    found, _ = dry_run("tiny", "layout.dp_replicate=2", *SMALL, expect=3)
    assert [d.split(" is ")[0] for d in found["differences"]] == ["rank 0: peak"]


def test_runtime_error_is_found(dry_run, monkeypatch):
    """Hybrid sharding all-reduces in every micro-batch: twice the calls of the plan."""
    monkeypatch.setattr("meshwright.parallel.data_parallel.set_gradient_sync", lambda *_: None)
    layout = ("layout.dp_replicate=2", "layout.dp_shard=2")
    found, _ = dry_run("tiny", *layout, *SMALL, expect=3)
    assert any("axis dp_replicate, all_reduce in phase step: 6 calls" in d for d in found["differences"])


def test_job_that_does_not_fit_is_dry_run_with_a_note(dry_run):
    found, messages = dry_run("tiny", "layout.dp_replicate=2", "cluster.memory_bytes=1000000", *SMALL)
    assert found["equal"]
    assert not found["fits"]
    assert "it does not fit: first step needs" in messages


@pytest.mark.parametrize(
    ("preset", "overrides", "rank", "code"),
    [
        ("tiny", ["layout.dp_shard=4"], 4, "dry-run-rank"),
        ("tiny", ["layout.dp_shard=4"], -1, "dry-run-rank"),
        ("tinier", [], 0, "job-missing-file"),
        ("resnet50", [], 0, "dry-run-model"),
        ("tiny", ["layout.dp_shard=4", "layout.micro_batch=999"], 0, "layout-micro-batch"),
    ],
)
def test_unsupported_jobs_are_refused_with_codes(preset, overrides, rank, code):
    with pytest.raises(UserError) as caught:
        dry_run_job(Output(as_json=True), preset, overrides, rank, None)
    assert code in [problem.code for problem in caught.value.problems]


# Fake process groups and tensors


@pytest.fixture
def fake_rank():
    """Fake tensors and fake process groups of the second of four ranks."""
    counter = CollectiveCounter()
    counter.install()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    with FakeTensorMode(allow_non_fake_inputs=True), RealIntegers():
        yield counter
    dist.destroy_process_group()
    counter.remove()


def test_functional_collectives_are_counted(fake_rank):
    """Torch's kernels for fake tensors give the result without communication."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    fake_rank.name_axis(mesh.get_group("tp"), "tp")
    weight = torch.empty(8, 4, requires_grad=True)
    summed = functional.all_reduce(weight, "sum", mesh.get_group("tp"))
    assert isinstance(summed, FakeTensor)
    assert [(row["axis"], row["op"], row["bytes"]) for row in fake_rank.rows()] == [
        ("tp", "all_reduce", 8 * 4 * 4)
    ]


def test_device_mesh_works_with_fake_tensors(fake_rank):
    """Its coordinates are integers that must be read."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    assert list(mesh.get_coordinate()) == [0, 1]
    assert mesh["tp"].get_local_rank() == 1
    assert mesh["dp_shard"].size() == 2


@pytest.mark.parametrize(("rows", "chunks"), [(8, 4), (7, 4), (2, 4), (9, 4), (1, 1)])
def test_shared_chunks_have_the_shapes_of_torch_chunk(fake_rank, rows, chunks):
    """The numbers of rows are even and uneven."""
    whole = torch.empty(rows, 3)
    expected = [part.shape for part in torch.chunk(whole, chunks)]
    with SharedChunks():
        assert [part.shape for part in torch.chunk(whole, chunks)] == expected
