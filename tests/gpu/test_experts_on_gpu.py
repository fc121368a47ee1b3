"""Experts on one GPU: the grouped GEMM matches one GEMM per expert, and runs have the losses of a CPU run."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from meshwright.models.kernels import grouped_gemm as grouped  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ON_GPU = ("cluster.device=cuda", "cluster.devices_per_node=1")
EXPERTS = ("model.num_experts=4", "model.experts_per_token=2", "train.balance_rate=0.01")


# The backward pass runs on a thread of its own, whose first call may be a GEMM.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("sizes", [[5, 0, 7, 20], [0, 0, 0, 3], [128, 1, 0, 64], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("widths", [(64, 96), (24, 36)], ids=["fused", "one by one"])
def test_the_grouped_gemm_matches_one_gemm_per_expert(sizes, widths):
    """Output and gradients in bf16, with a bias; experts without rows have zero gradients."""
    inner, outer = widths
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, device="cuda", generator=generator).bfloat16().requires_grad_()

    x, weight, bias = draw(sum(sizes), inner), draw(4 * outer, inner), draw(4 * outer)
    out = grouped.grouped_gemm(x, weight, bias, sizes)
    assert grouped._is_fused(x, weight.view(4, outer, inner)) == (inner == 64 and sum(sizes) > 0)
    exact = [tensor.detach().float().requires_grad_() for tensor in (x, weight, bias)]
    matrices, biases = exact[1].view(4, outer, inner), exact[2].view(4, outer)
    rows = exact[0].split(sizes)
    expected = torch.cat([rows[e] @ matrices[e].T + biases[e] for e in range(4)])
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.1)
    grad = torch.randn_like(expected)
    found = torch.autograd.grad(out, (x, weight, bias), grad.bfloat16())
    for mine, theirs in zip(found, torch.autograd.grad(expected, exact, grad), strict=True):
        torch.testing.assert_close(mine.float(), theirs, rtol=0.05, atol=0.3)


def test_a_moe_run_has_the_losses_of_a_cpu_run(train):
    """float32 within 1e-4, bf16 within 2%."""
    on_cpu = train(*EXPERTS, "layout.dp_replicate=1", "run_dir=cpu")
    on_gpu = train(*EXPERTS, *ON_GPU, "run_dir=gpu")
    assert on_gpu.losses == pytest.approx(on_cpu.losses, rel=1e-4)
    low = train(*EXPERTS, *ON_GPU, "train.precision=bf16", "run_dir=low")
    assert low.losses == pytest.approx(on_cpu.losses, rel=0.02)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_checkpointed_experts_train_with_the_compile_backend(train, recompute):
    """With another attention kernel in the recomputation than in the forward pass torch raises an error."""
    given = (*EXPERTS, *ON_GPU, "train.precision=bf16", f"layout.recompute={recompute}")
    eager = train(*given, "train.block_backend=eager", "run_dir=eager")
    compiled = train(*given, "train.block_backend=compile", "run_dir=compiled")
    assert compiled.losses == pytest.approx(eager.losses, rel=0.02)
