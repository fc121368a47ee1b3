"""Several ranks on one GPU: through gloo, which carries what lies on the host, and through NCCL.

NCCL refuses two ranks of one machine on one device. Told that they are on two machines, it takes them.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDE = (
    "cluster.device=cuda",
    "cluster.devices_per_node=2",
    "model.num_layers=4",
    "model.hidden_size=512",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.ffn_size=2048",
    "model.vocab_size=8001",
    "data.seq_len=256",
    "train.global_batch=8",
    "train.steps=4",
)


@pytest.fixture
def together(train, monkeypatch):
    """Train with the ranks of a layout on one GPU."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "shared_gpu_ranks:through_gloo")
    monkeypatch.setattr("meshwright.runs.ranks.find_gpus", lambda: [None, None])
    return train


def hold_through_nccl(train, monkeypatch, settings, *model):
    """Hold ranks that share a GPU and speak through NCCL to one rank, and to their plan."""
    monkeypatch.setattr("meshwright.runs.ranks.find_gpus", lambda: [None] * 4)
    given = (*WIDE, *model, "cluster.devices_per_node=4", "train.precision=bf16", "layout.micro_batch=1")
    alone = train(*given, "layout.dp_replicate=1", "run_dir=alone")
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "shared_gpu_ranks:through_nccl")
    shared = train(*given, *(f"layout.{key}" for key in settings.split()), "run_dir=shared")
    assert shared.losses == pytest.approx(alone.losses, rel=1e-2)
    assert shared.result["audit_ok"], shared.result["differences"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "layout",
    [
        "dp_replicate=2",
        "tp=2",
        "tp=2 sequence_parallel=true",
        "tp=2 recompute=selective",
        "tp=2 sequence_parallel=true recompute=full",
    ],
)
def test_ranks_that_share_a_gpu_train_as_one_does(together, layout, precision):
    """Losses of one rank, and state, collectives and peak as the ledger has them for a GPU."""
    given = (*WIDE, f"train.precision={precision}", "layout.micro_batch=4")
    alone = together(*given, "layout.dp_replicate=1", "run_dir=alone")
    shared = together(*given, *(f"layout.{key}" for key in layout.split()), "run_dir=shared")
    assert shared.losses == pytest.approx(alone.losses, rel=1e-3 if precision == "fp32" else 1e-2)
    assert shared.result["audit_ok"], shared.result["differences"]


@pytest.mark.parametrize("settings", ["zero=1", "zero=2", "zero=3", "zero=3 offload=all"])
def test_shards_on_one_gpu(together, settings):
    """FSDP2 with its streams and float32 masters, and everything on the host."""
    given = (*WIDE, "train.precision=bf16", "layout.micro_batch=2")
    alone = together(*given, "layout.dp_replicate=1", "run_dir=alone")
    asked = ("layout.dp_shard=2", *(f"layout.{key}" for key in settings.split()))
    shared = together(*given, *asked, "run_dir=shared")
    assert shared.losses == pytest.approx(alone.losses, rel=1e-2)
    assert shared.result["audit_ok"], shared.result["differences"]


@pytest.mark.parametrize(
    "settings",
    [
        "pp=2",
        "pp=2 schedule=interleaved virtual_stages=2",
        "pp=2 schedule=zb-h1 recompute=selective",
        "pp=2 schedule=zbv",
        "pp=2 tp=2 sequence_parallel=true",
        "pp=2 dp_replicate=2 schedule=zb-h1",
        "pp=2 dp_shard=2 zero=2",
        "pp=2 dp_shard=2 zero=3 schedule=zb-h1",
        "pp=2 schedule=zb-h1 offload=optimizer",
    ],
)
def test_pipelines_on_one_gpu(together, monkeypatch, settings):
    """Stages with CUDA's streams: losses of one rank, bytes and state as predicted, and what ran when."""
    monkeypatch.setattr("meshwright.runs.ranks.find_gpus", lambda: [None] * 4)
    given = (*WIDE, "cluster.devices_per_node=4", "train.precision=bf16", "layout.micro_batch=1")
    alone = together(*given, "layout.dp_replicate=1", "run_dir=alone")
    asked = tuple(f"layout.{key}" for key in settings.split())
    shared = together(*given, *asked, "run_dir=shared")
    assert shared.losses == pytest.approx(alone.losses, rel=1e-2)
    assert shared.result["audit_ok"], shared.result["differences"]


@pytest.mark.parametrize(
    "settings",
    [
        "dp_shard=2 zero=3",
        "tp=2 sequence_parallel=true",
        "pp=2",
        "pp=2 schedule=interleaved virtual_stages=2",
        "pp=2 dp_replicate=2 schedule=zb-h1",
        "cp=2",
        "cp=2 context=ulysses zero=3",
        "cp=2 tp=2 recompute=selective",
        "pp=2 cp=2",
    ],
)
def test_ranks_speak_through_nccl(train, monkeypatch, settings):
    """The backend of GPUs itself: no rank waits for ever; losses, state and collectives are as promised."""
    hold_through_nccl(train, monkeypatch, settings)


@pytest.mark.parametrize(
    "settings",
    [
        "dp_shard=2 ep=2 zero=3",
        "tp=2 ep=2 sequence_parallel=true",
        "dp_shard=2 etp=2 zero=1",
        "cp=2 ep=2 pp=2",
    ],
)
def test_experts_on_gpus(train, monkeypatch, settings):
    """Tokens travel to their experts through NCCL: losses of one rank, state and collectives as promised."""
    experts = ("model.num_experts=4", "model.experts_per_token=2", "model.ffn_size=1024")
    hold_through_nccl(train, monkeypatch, settings, *experts)
