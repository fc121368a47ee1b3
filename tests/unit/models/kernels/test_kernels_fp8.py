"""FP8 linears: close to exact ones for any scales; checkpointing recomputes no FP8 GEMM."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from meshwright.models.bf16_weights import WeightCopies
from meshwright.models.block_backend import compile_blocks
from meshwright.models.decoder import Decoder
from meshwright.models.init import fill
from meshwright.models.kernels import fp8
from meshwright.models.linear import Linear, MergedLinear, convert_linears_to_fp8, fp8_linear
from meshwright.models.weight_source import RandomWeights
from meshwright.runs.ranks import find_fp8_obstacle
from meshwright.spec.model import DecoderModel

pytestmark = pytest.mark.skipif(find_fp8_obstacle() is not None, reason=f"fp8 {find_fp8_obstacle()}")

NEAR = 0.04
"""Relative error: two operands, each rounded to 4 bits of precision, in long sums."""
SCALED_PRODUCT = torch.ops.aten._scaled_mm.default
SHAPE = DecoderModel(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=4, ffn_size=96, vocab_size=50)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact.float()).norm() / exact.float().norm())


def forward_backward(linear, x, weight, grad):
    """The output of a linear and its two gradients."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = linear(x, weight)
    out.backward(grad.to(out.dtype))
    return out.detach(), x.grad, weight.grad


def scaled(x, weight, fp8_weight_grad=True):
    return fp8_linear(x, weight.detach().bfloat16(), weight, fp8_weight_grad=fp8_weight_grad)


@pytest.mark.parametrize("weight_gradient", [True, False], ids=["all three", "weight gradient in bf16"])
def test_fp8_output_and_gradients_are_close_to_exact_ones(weight_gradient):
    x, weight, grad = draw(4, 16, 96), draw(48, 96, seed=1), draw(4, 16, 48, seed=2)
    exact = forward_backward(lambda x, w: x @ w.T, x, weight, grad)
    found = forward_backward(lambda x, w: scaled(x, w, weight_gradient), x, weight, grad)
    assert [t.dtype for t in found] == [torch.bfloat16, torch.float32, torch.float32]
    distances = [distance(a, b) for a, b in zip(found, exact, strict=True)]
    assert max(distances) < NEAR
    assert distances[0] > 0.01, "it was not computed in 8 bits"
    assert (distances[2] > 0.01) == weight_gradient


def test_row_scales_handle_rows_of_very_different_size():
    """One scale per tensor would lose all but the largest rows. The gradient includes the other scales."""
    by_token, by_output = torch.logspace(-4, 4, 64)[:, None], torch.logspace(-4, 4, 48)[:, None]
    x, weight, grad = draw(64, 96), draw(48, 96, seed=1), draw(64, 48, seed=2)
    exact = forward_backward(lambda x, w: x @ w.T, x, weight, grad)
    out, grad_x, grad_weight = forward_backward(
        scaled, x * by_token, weight * by_output, grad / by_token / by_output.T
    )
    found = (out / by_token / by_output.T, grad_x * by_token, grad_weight * by_output)
    assert max(distance(a, b) for a, b in zip(found, exact, strict=True)) < NEAR


def test_zeros_and_the_smallest_gradients_have_a_scale():
    x, weight, grad = draw(16, 32), draw(16, 32, seed=1), draw(16, 16, seed=2) * 1e-20
    x[3], grad[5] = 0, 0
    found = forward_backward(scaled, x, weight, grad)
    exact = forward_backward(lambda x, w: x @ w.T, x, weight, grad)
    assert all(t.isfinite().all() for t in found)
    assert found[0][3].count_nonzero() == 0
    assert found[1][5].count_nonzero() == 0
    assert distance(found[1] * 1e20, exact[1] * 1e20) < NEAR


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_fp8_casts_keep_nan_and_infinity(value):
    """A diverging run is detected by its loss, so a cast must not hide them."""
    x = draw(16, 32)
    x[3, 4] = value
    out = scaled(x, draw(16, 32, seed=1))
    assert not out[3].isfinite().any()
    assert out[4].isfinite().all()


def test_token_counts_not_divisible_by_16_use_a_bf16_weight_gradient():
    x, weight, grad = draw(10, 32), draw(16, 32, seed=1), draw(10, 16, seed=2)
    exact = forward_backward(lambda x, w: x @ w.T, x, weight, grad)
    found = forward_backward(scaled, x, weight, grad)
    assert distance(found[0], exact[0]) < NEAR
    assert distance(found[2], exact[2]) < 0.005


def test_shapes_not_divisible_by_16_stay_bf16():
    odd, even = Linear(32, 24, bias=False), Linear(32, 48, bias=False)
    for linear in (odd, even):
        convert_linears_to_fp8(linear, weight_grads=True)
    assert (odd.uses_fp8, even.uses_fp8) == (False, True)
    low, x = draw(72, 32).bfloat16(), draw(8, 32, seed=1).bfloat16()
    together = torch.cat(MergedLinear([odd, even], low).matmul(x), dim=-1)
    assert torch.equal(together, x @ low.T)


def test_merged_linears_match_single_ones():
    """Scales are per row, and merging concatenates rows."""
    linears = [Linear(32, width, bias=False) for width in (48, 16)]
    for linear in linears:
        convert_linears_to_fp8(linear, weight_grads=True)
        linear.weight_copy = linear.weight.detach().bfloat16()
    merged = MergedLinear(linears, torch.cat([linear.weight_copy for linear in linears]))
    x = draw(2, 8, 32)
    for together, linear in zip(merged.matmul(x), linears, strict=True):
        assert torch.equal(together, linear(x))


@pytest.mark.filterwarnings("ignore")  # deprecations inside torch.compile
def test_compiled_blocks_recompute_no_fp8_gemm_and_save_no_cast():
    """Selective checkpointing saves the outputs of three of a block's four GEMMs, and no cast."""
    net = Decoder(dataclasses.replace(SHAPE, num_layers=1), 16, 8, "selective")
    names = [name for name, _ in net.named_parameters()]
    fill(net, names, RandomWeights(SHAPE, 0), torch.device("cpu"))
    convert_linears_to_fp8(net, weight_grads=True)
    net.weight_copies = WeightCopies(net, torch.bfloat16)
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    compile_blocks(net, backend=backend)
    tokens = torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        net(tokens[:, :-1], tokens[:, 1:].contiguous()).backward()
    with_gemms = [graph for graph in graphs if count_gemms(graph)]
    assert sorted(map(count_gemms, with_gemms)) == [4, 2 * 4]
    (forward,) = (graph for graph in with_gemms if count_gemms(graph) == 4)
    (kept,) = (node.args[0] for node in forward.graph.nodes if node.op == "output")
    made = [node for node in kept if node.op != "placeholder"][1:]
    assert sum(node.target is SCALED_PRODUCT for node in made) == 3
    assert fp8.E4M3 not in {node.meta["val"].dtype for node in made}


def count_gemms(graph) -> int:
    return sum(node.target is SCALED_PRODUCT for node in graph.graph.nodes)
