"""Triton kernels on a GPU: kernels, blocks and runs match torch operations."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812  (the usual alias)

from kernel_cases import (  # noqa: E402
    EXACT,
    LOW,
    cast_cases,
    check_cross_entropy,
    check_scale,
    check_unknown_tokens,
    compare,
    draw,
    embedding_cases,
    norm_cases,
    rope_cases,
    swiglu_cases,
)
from meshwright.data.dataset import IGNORE_INDEX  # noqa: E402
from meshwright.models import loss as losses  # noqa: E402
from meshwright.models.decoder import Decoder  # noqa: E402
from meshwright.models.kernels import fp8  # noqa: E402
from meshwright.models.kernels import fused as kernels  # noqa: E402
from meshwright.models.loss import linear_cross_entropy  # noqa: E402
from meshwright.spec.execution import uses_triton_blocks  # noqa: E402
from meshwright.spec.load import load_job  # noqa: E402
from meshwright.spec.model import DecoderModel  # noqa: E402
from triton_decoders import convert  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
ROWS, WIDTHS = (1, 20, 1000), (96, 2048, 3072, 4096, 5120)
SHAPE = DecoderModel(
    num_layers=3, hidden_size=128, num_heads=4, num_kv_heads=2, ffn_size=352, vocab_size=1000
)
SAMPLES, LENGTH = 4, 48


@pytest.mark.parametrize("residual_dtype", [EXACT, LOW], ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_match_torch(width, residual_dtype):
    """With one row per program, and with more rows than programs."""
    for rows in ROWS:
        for case in norm_cases(rows, width, residual_dtype).values():
            compare(case, DEVICE)


@pytest.mark.parametrize("residual_dtype", [EXACT, LOW], ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", WIDTHS)
def test_embeddings_match_torch(width, residual_dtype):
    for tokens in ROWS:
        for case in embedding_cases(tokens, 300, width, residual_dtype).values():
            compare(case, DEVICE)


def test_tokens_outside_the_embedding_give_nan_and_no_gradient():
    check_unknown_tokens(DEVICE)


def test_deterministic_runs_use_torchs_embedding_gradient(monkeypatch):
    grad, tokens = draw(DEVICE, 8, 32), torch.zeros(8, dtype=torch.long, device=DEVICE)
    monkeypatch.setattr(kernels, "_triton", lambda: pytest.fail("the Triton kernel is not deterministic"))
    torch.use_deterministic_algorithms(True)
    try:
        kernels.embedding_grad(grad, tokens, 4)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("width", [*WIDTHS, 14336])
def test_swiglu_matches_torch(width):
    for rows in ROWS:
        for case in swiglu_cases(rows, width).values():
            compare(case, DEVICE)


@pytest.mark.parametrize("dtype", [EXACT, LOW], ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", WIDTHS)
def test_casts_match_torch(width, dtype):
    for rows in ROWS:
        for case in cast_cases(rows, width, dtype).values():
            compare(case, DEVICE)


@pytest.mark.parametrize(
    ("queries", "keys", "size"), [(1, 1, 16), (4, 2, 32), (6, 3, 64), (32, 8, 64), (40, 8, 128)]
)
def test_rope_matches_torch(queries, keys, size):
    """Head counts that are powers of two and others; in place, and backward with other memory layouts."""
    for batch, length in ((1, 1), (2, 10), (3, 333)):
        for case in rope_cases(batch, length, queries, keys, size).values():
            compare(case, DEVICE)


@pytest.mark.parametrize("what", ["cast_rows", "cast_columns", "add_rms_norm", "swiglu"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_casts_keep_nan_and_infinity_visible(what, value):
    """A diverging run is detected by its loss: as on a CPU, a NaN stays a NaN."""
    x, other, weight = (
        draw(DEVICE, *shape, dtype=EXACT, seed=i) for i, shape in enumerate([(16, 32)] * 2 + [(32,)])
    )
    x[3, 4] = value
    cast, row = {
        "cast_rows": lambda: (kernels.cast_rows(x), 3),
        "cast_columns": lambda: (kernels.cast_columns(x), 4),
        "add_rms_norm": lambda: (kernels.add_rms_norm(x, other, weight, 1e-5, fp8.E4M3)[1], 3),
        "swiglu": lambda: (kernels.swiglu(torch.cat((other, x), dim=-1), fp8.E4M3), 3),
    }[what]()
    again = cast.values.float() * cast.scale
    assert not again[row].isfinite().all()
    assert again[row - 1].isfinite().all()


@pytest.mark.parametrize("vocab_size", [300, 40_000, 128_256])
@pytest.mark.parametrize("factor", [1.0, 1 / 300])
def test_the_in_place_loss_matches_torch(vocab_size, factor):
    check_cross_entropy(DEVICE, vocab_size, factor=factor)


def test_the_in_place_loss_of_very_large_logits_matches_torch():
    """Logits of about 10,000: no exponential overflows float32."""
    check_cross_entropy(DEVICE, 40_000, spread=1e4)


def test_the_in_place_loss_addresses_rows_beyond_two_to_the_31():
    """4.4 GB of logits; a 32-bit offset of the last row would overflow."""
    vocab_size = 128_256
    rows = 2**31 // vocab_size + 2
    logits = torch.zeros(rows, vocab_size, dtype=LOW, device=DEVICE)
    logits[-1] = draw(DEVICE, vocab_size)
    last, targets = logits[-1].float().clone(), torch.full((rows,), 7, device=DEVICE)
    found = kernels.cross_entropy(logits, targets, 1.0, IGNORE_INDEX, gradient=True)
    wanted = torch.softmax(last, 0)
    assert found[-1].item() == pytest.approx(-wanted[7].log().item(), rel=1e-5)
    assert found[:-1].sub(math.log(vocab_size)).abs().max() < 1e-5
    wanted[7] -= 1
    assert (logits[-1].float() - wanted).norm() < 3e-3 * wanted.norm()


@pytest.mark.parametrize("dtype", [EXACT, LOW], ids=["fp32", "bf16"])
def test_scale_multiplies_and_skips_a_factor_of_one(dtype):
    check_scale(DEVICE, dtype)


def loss_operands():
    x = draw(DEVICE, 1300, 128).requires_grad_()
    weight = (draw(DEVICE, 4096, 128, dtype=EXACT, seed=1) / 11).requires_grad_()
    targets = torch.randint(0, 4096, (1300,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    targets[::7] = IGNORE_INDEX
    return x, weight, targets


@pytest.mark.parametrize("real", [1.0, 1 / 256, 0.1])
def test_gradients_do_not_depend_on_the_expected_loss_gradient(real):
    """If the loss gradient is not the expected one, the gradients are rescaled."""
    x, weight, targets = loss_operands()
    exact = [x.detach().float().requires_grad_(), weight.detach().bfloat16().float().requires_grad_()]
    plain = F.cross_entropy(exact[0] @ exact[1].T, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    wanted = torch.autograd.grad(plain * real, exact)
    for expected in (1.0, 1 / 256, 0.1):
        loss = linear_cross_entropy(x, weight, targets, 512, fused=True, expected=expected)
        assert loss.item() == pytest.approx(plain.item(), rel=1e-4)
        for ours, theirs in zip(torch.autograd.grad(loss * real, (x, weight)), wanted, strict=True):
            assert (ours.float() - theirs).norm() < 6e-3 * theirs.norm(), expected


@pytest.mark.parametrize("divisor", [1, 7, 13, 41, 256, 8191, 32768, 53248])
def test_the_expected_loss_gradient_needs_no_rescaling(monkeypatch, divisor):
    """As in training, the loss is divided by the targets of the step. The factor is then exactly 1."""
    factors = []
    monkeypatch.setattr(losses.kernels, "scale", lambda _, factor: factors.append(factor.item()))
    x, weight, targets = loss_operands()
    (linear_cross_entropy(x, weight, targets, 512, fused=True, expected=1 / divisor) / divisor).backward()
    assert factors == [1.0, 1.0]


def build(
    residual_dtype=LOW,
    *,
    triton: bool,
    copies: bool = True,
    recompute: str = "none",
    uses_fp8=False,
):
    """A decoder with the same weights every time; without copies it is the float32 reference."""
    with torch.device(DEVICE):
        net = Decoder(SHAPE, LENGTH, 64, recompute)
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            drawn = draw(DEVICE, *parameter.shape, dtype=EXACT, seed=number)
            parameter.copy_(1 + drawn / 10 if parameter.dim() == 1 else drawn / 16)
    convert(net, residual_dtype, triton=triton, copies=copies, uses_fp8=uses_fp8)
    return net


def step(net: Decoder, *, masked: bool = False, low: bool = True):
    """Loss and gradients."""
    generator = torch.Generator().manual_seed(99)
    tokens, targets = torch.randint(0, SHAPE.vocab_size, (2, SAMPLES, LENGTH), generator=generator).to(DEVICE)
    documents = (torch.rand(SAMPLES, LENGTH, generator=generator) < 0.1).cumsum(1).to(DEVICE)
    targets[:, ::5] = IGNORE_INDEX
    with torch.autocast(DEVICE, LOW, enabled=low):
        loss = net(tokens, targets, documents if masked else None)
    loss.backward()
    with torch.no_grad(), torch.autocast(DEVICE, LOW, enabled=low):
        again = net(tokens, targets, documents if masked else None)
    assert again.item() == pytest.approx(loss.item(), rel=1e-5), "the loss without gradients differs"
    return loss.item(), {name: parameter.grad for name, parameter in net.named_parameters()}


def gradient_error(found, exact) -> float:
    """Root mean square of the gradients' relative errors."""
    errors = [((grad - exact[name]).norm() / exact[name].norm()).item() for name, grad in found.items()]
    return math.sqrt(sum(error * error for error in errors) / len(errors))


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("residual_dtype", [EXACT, LOW], ids=["fp32", "bf16"])
@pytest.mark.parametrize("uses_fp8", [False, True], ids=["bf16", "fp8"])
def test_triton_blocks_are_as_close_to_float32_as_torch_modules(uses_fp8, residual_dtype, masked):
    """In every mode of activation checkpointing, with the loss kernel and an expected loss gradient."""
    exact_loss, exact = step(build(triton=False, copies=False), masked=masked, low=False)
    _, modules = step(build(residual_dtype, triton=False, uses_fp8=uses_fp8), masked=masked)
    for recompute in ("none", "selective", "full"):
        net = build(residual_dtype, triton=True, recompute=recompute, uses_fp8=uses_fp8)
        net.set_expected_loss_grad(1 / 64)
        loss, found = step(net, masked=masked)
        assert loss == pytest.approx(exact_loss, rel=2e-2 if uses_fp8 else 2e-3)
        assert gradient_error(found, exact) < 1.25 * gradient_error(modules, exact)
        assert gradient_error(found, exact) < (0.3 if uses_fp8 else 0.03)


TRAINED = (
    "cluster.device=cuda",
    "cluster.devices_per_node=1",
    "model.hidden_size=128",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_size=352",
    "data.seq_len=128",
    "train.precision=bf16",
    "train.block_backend=triton",
)


def test_a_triton_run_has_the_losses_of_a_compiled_run(train, job_file):
    """The runs differ in the block backend only; the audit passes."""
    triton, compiled = ([*TRAINED, f"train.block_backend={backend}"] for backend in ("triton", "compile"))
    assert uses_triton_blocks(load_job(str(job_file), triton))
    assert not uses_triton_blocks(load_job(str(job_file), compiled))
    found = train(*triton, "run_dir=triton")
    wanted = train(*compiled, "run_dir=compiled")
    assert found.losses == pytest.approx(wanted.losses, rel=1e-2)
    assert found.losses[-1] < found.losses[0]
    assert found.result["audit_ok"], found.result["differences"]


def test_a_run_with_bf16_gradients_has_the_losses_of_float32_gradients(train):
    """The audit passes: weight gradients have half the bytes."""
    one = (*TRAINED, "layout.dp_replicate=1", "layout.micro_batch=12")
    wanted = train(*one, "run_dir=float32")
    found = train(*one, "train.grad_dtype=bf16", "run_dir=narrow")
    assert found.losses == pytest.approx(wanted.losses, rel=5e-3)
    assert found.result["audit_ok"], found.result["differences"]
    assert wanted.result["audit_ok"], wanted.result["differences"]
