"""Optimizer state in pinned host memory, streamed through one GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDE = (
    "cluster.device=cuda",
    "cluster.devices_per_node=1",
    "model.num_layers=6",
    "model.hidden_size=512",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.ffn_size=2048",
    "model.vocab_size=32000",
    "data.seq_len=128",
    "train.global_batch=16",
    "train.steps=6",
    "train.deterministic=true",
)


@pytest.mark.parametrize(
    ("optimizer", "precision"), [("adamw", "fp32"), ("adamw", "fp16"), ("lion", "bf16"), ("muon", "bf16")]
)
def test_streamed_state_gives_the_same_losses_with_less_memory(train, optimizer, precision):
    """Many buckets share three slots: a copy that is not waited for would change a loss."""
    given = (*WIDE, f"train.optimizer={optimizer}", f"train.precision={precision}", "train.lr=1e-3")
    here = train(*given, "run_dir=here")
    away = train(*given, "layout.offload=optimizer", "layout.bucket_mb=1", "run_dir=away")
    assert away.losses == pytest.approx(here.losses, rel=1e-6)
    result = away.result
    assert result["audit_ok"], result["differences"]
    assert result["offloaded_bytes"] == result["predicted_offloaded_bytes"]
    assert result["offloaded_bytes"]["optimizer"] == result["state_bytes"]["optimizer"]
    assert here.result["offloaded_bytes"]["optimizer"] == [0]
    assert result["peak_memory_bytes"][0] < here.result["peak_memory_bytes"][0]


def test_the_state_lies_in_pinned_memory_and_a_step_is_the_rule(tmp_path):
    """Against the same optimizer without streaming, bit by bit, over steps that overlap their copies."""
    from torch.optim import AdamW

    from meshwright.train.optimizer_offload import OffloadedOptimizerState

    device = torch.device("cuda")
    torch.manual_seed(0)
    first = [torch.nn.Parameter(torch.randn(512, 257 + i, device=device)) for i in range(24)]
    second = [torch.nn.Parameter(p.detach().clone()) for p in first]
    optimizers = [AdamW(parameters, lr=1e-2, fused=True) for parameters in (first, second)]
    for optimizer, parameters in zip(optimizers, (first, second), strict=True):
        for p in parameters:
            optimizer.state[p] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
    offloaded = OffloadedOptimizerState(optimizers[1], [second[i : i + 2] for i in range(0, 24, 2)], device)
    assert all(buffer.is_pinned() for buffer in offloaded.host_buffers)
    for _ in range(5):
        for one, other in zip(first, second, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.cuda.synchronize()
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        for key, value in optimizers[0].state[one].items():
            assert torch.equal(value.cpu(), optimizers[1].state[other][key]), key
