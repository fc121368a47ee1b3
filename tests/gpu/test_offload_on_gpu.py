"""Optimizer state in pinned CPU memory, streamed through one GPU."""

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
def test_offloaded_state_keeps_the_losses_and_lowers_the_peak(train, optimizer, precision):
    """Many buckets share three device buffers: a missing wait for a copy would change the losses."""
    settings = (*WIDE, f"train.optimizer={optimizer}", f"train.precision={precision}", "train.lr=1e-3")
    on_device = train(*settings, "run_dir=on-device")
    offloaded = train(*settings, "layout.offload=optimizer", "layout.bucket_mb=1", "run_dir=offloaded")
    assert offloaded.losses == pytest.approx(on_device.losses, rel=1e-6)
    result = offloaded.result
    assert result["audit_ok"], result["differences"]
    assert result["offloaded_bytes"] == result["predicted_offloaded_bytes"]
    assert result["offloaded_bytes"]["optimizer"] == result["state_bytes"]["optimizer"]
    assert on_device.result["offloaded_bytes"]["optimizer"] == [0]
    assert result["peak_memory_bytes"][0] < on_device.result["peak_memory_bytes"][0]


def test_offloaded_adamw_is_bit_identical_with_pinned_buffers():
    """Parameters and state equal those of AdamW on the device after five steps with overlapping copies."""
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
