"""GEMM autotuning on a GPU: every proposed algorithm is correct, and a run autotunes once."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from meshwright.core.events import EVENTS_FILE, read_events  # noqa: E402
from meshwright.models.kernels.cublas import CublasLtGemm, GemmShape  # noqa: E402
from meshwright.models.kernels.gemm import Gemms  # noqa: E402
from meshwright.models.kernels.gemm_autotune import find_cache_file, read_cache  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("kind", "narrow"), [("forward", False), ("input", False), ("weight", False), ("weight", True)]
)
def test_every_proposed_algorithm_is_correct(kind, narrow, dtype):
    """Compared with float64, with and without accumulation into the output."""
    shape = GemmShape(kind, dtype, 1536, 512, 768, narrow)
    left, right = (torch.randn(size, device=DEVICE).to(dtype) for size in (shape.left, shape.right))
    exact = {
        "forward": lambda a, b: a @ b.T,
        "input": lambda a, b: a @ b,
        "weight": lambda a, b: a.T @ b,
    }[kind](left.double(), right.double())
    gemm = CublasLtGemm(shape)
    proposals = gemm.query_algorithms()
    assert proposals
    for algorithm in proposals:
        out = torch.full(shape.out, float("nan"), device=DEVICE, dtype=shape.out_dtype)
        for times, add in ((1, False), (2, True)):
            gemm.run(algorithm, left, right, out, add)
            off = (out.double() - times * exact).norm() / (times * exact).norm()
            assert off < (1e-5 if shape.out_dtype == torch.float32 else 4e-3)


def test_a_tuned_algorithm_is_used_on_its_device_only():
    """A GEMM of the same shape on the CPU does not use it."""
    shape, calls = GemmShape("forward", torch.bfloat16, 64, 32, 96), []
    gemms = Gemms({shape: lambda *args: calls.append(args)}, torch.device("cuda", 0))
    x, weight = (torch.ones(size, dtype=shape.dtype, device=DEVICE) for size in (shape.left, shape.right))
    gemms.forward(x, weight)
    assert len(calls) == 1
    gemms.forward(x.cpu(), weight.cpu())
    assert len(calls) == 1


JOB = (
    "cluster.device=cuda",
    "cluster.devices_per_node=1",
    "model.num_layers=2",
    "model.hidden_size=512",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.ffn_size=1536",
    "data.seq_len=256",
    "train.global_batch=8",
    "train.precision=bf16",
    "train.block_backend=triton",
    "train.residual_dtype=bf16",
    "train.steps=6",
)


def test_autotuning_keeps_the_losses_and_its_cache_is_reused(train, tmp_path, monkeypatch):
    """The first run tunes every GEMM, the second reads all of them from the cache file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plain = train(*JOB)
    first, second = (train(*JOB, "train.gemm_autotune=true") for _ in range(2))
    for run in (first, second):
        assert run.losses == pytest.approx(plain.losses, rel=2e-3)
        assert run.result["audit_ok"], run.result["differences"]
    counts = [read_events(run.run_dir / EVENTS_FILE).of("gemm_autotune")[0] for run in (first, second)]
    assert (counts[0]["cached"], counts[1]["tuned"]) == (0, 0)
    assert counts[0]["tuned"] == counts[1]["cached"] == len(read_cache(find_cache_file())) > 0
