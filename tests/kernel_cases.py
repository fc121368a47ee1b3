"""Each function of ``models.kernels.fused``: Triton kernels compared with torch operations.

On CPUs, Triton's interpreter runs in a subprocess (``python kernel_cases.py`` with ``TRITON_INTERPRET=1``),
as Triton reads the variable on import. The cases are in float32 there: the interpreter of Triton 3.6
truncates to 16 bits instead of rounding, and drops the carry when it rounds to 8 bits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F  # noqa: N812  (the usual alias)
from torch import Tensor

from meshwright.data.dataset import IGNORE_INDEX
from meshwright.models.kernels import fp8
from meshwright.models.kernels import fused as kernels

EXACT, LOW = torch.float32, torch.bfloat16
FLOAT32_TOLERANCE = 1e-6
"""Relative error of float32 sums in another order."""
ROUNDING_STEP = {LOW: 2.0**-7, torch.float16: 2.0**-10, fp8.E4M3: 2.0**-3}
"""Largest relative distance between neighbouring values."""
SMALLEST = {LOW: 0.0, torch.float16: 2.0**-24, fp8.E4M3: 2.0**-9}
"""Smallest positive value; for bf16 it is negligible."""

Case = Callable[[str], Iterable[Tensor | None]]
"""Draws fixed operands on a device and returns the outputs."""


def draw(device: str, *shape: int, dtype: torch.dtype = LOW, seed: int = 0) -> Tensor:
    """Normal random values, equal on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def norm_cases(rows: int, width: int, residual_dtype: torch.dtype, low: torch.dtype = LOW) -> dict[str, Case]:
    """RMS norm, forward and backward, with a residual dtype and a compute dtype."""

    def operands(device: str) -> tuple[Tensor, Tensor, Tensor]:
        x, delta = (
            draw(device, rows, width, dtype=residual_dtype),
            draw(device, rows, width, dtype=low, seed=1),
        )
        return x, delta, draw(device, width, dtype=EXACT, seed=2)

    def forward(dtype: torch.dtype, *, added: bool) -> Case:
        def work(device: str) -> Iterator[Tensor | None]:
            x, delta, weight = operands(device)
            total, normed, inverse = kernels.add_rms_norm(x, delta if added else None, weight, 1e-5, dtype)
            yield from (total, *normed, inverse)

        return work

    def backward(*, residual: bool, normed: bool) -> Case:
        def work(device: str) -> Iterable[Tensor | None]:
            x, grad, weight = operands(device)
            inverse = x.float().square().mean(-1).add(1e-5).rsqrt()
            residual_grad = draw(device, rows, width, dtype=residual_dtype, seed=3) if residual else None
            return kernels.rms_norm_backward(grad, x, inverse, weight, residual_grad, normed)

        return work

    return {
        "add_rms_norm": forward(low, added=True),
        "add_rms_norm without addition": forward(low, added=False),
        "add_rms_norm in fp8": forward(fp8.E4M3, added=True),
        "rms_norm_backward": backward(residual=True, normed=True),
        "rms_norm_backward of the final norm": backward(residual=False, normed=False),
    }


def embedding_cases(tokens: int, vocab_size: int, width: int, residual_dtype: torch.dtype) -> dict[str, Case]:
    """Embedding lookup and its gradient; some tokens occur often, some never."""

    def draw_tokens(device: str) -> Tensor:
        return (
            draw(device, tokens, dtype=EXACT, seed=1)
            .mul(vocab_size / 8)
            .abs()
            .long()
            .clamp(max=vocab_size - 1)
        )

    def backward(device: str) -> Iterable[Tensor]:
        grad = draw(device, tokens, width, dtype=residual_dtype)
        return [kernels.embedding_grad(grad, draw_tokens(device), vocab_size)]

    def forward(device: str) -> Iterable[Tensor]:
        table = draw(device, vocab_size, width, dtype=EXACT)
        return [kernels.embedding_lookup(table, draw_tokens(device), residual_dtype)]

    def strided(device: str) -> Iterable[Tensor]:
        """Tokens with a stride, like the last token of each sequence."""
        table = draw(device, vocab_size, width, dtype=EXACT)
        chosen = draw_tokens(device).repeat_interleave(3)[::3]
        yield kernels.embedding_lookup(table, chosen, residual_dtype)
        yield kernels.embedding_grad(draw(device, tokens, width, dtype=residual_dtype), chosen, vocab_size)

    return {
        "embedding_lookup": forward,
        "embedding_grad": backward,
        "embedding_lookup with a stride": strided,
    }


def check_unknown_tokens(device: str) -> None:
    """Tokens outside the table give NaN and no gradient; memory outside the table is not written."""
    memory, tokens = draw(device, 12, 16, dtype=EXACT), torch.tensor([0, -1, 4, 3], device=device)
    before, table = memory.clone(), memory[4:8]
    rows = kernels.embedding_lookup(table, tokens, EXACT)
    assert torch.equal(rows[[0, 3]], table[[0, 3]])
    assert rows[[1, 2]].isnan().all()
    kernels._triton().embedding_grad(torch.ones(4, 16, device=device), tokens, table)
    before[[4, 7]] += 1
    assert torch.equal(memory, before)


def swiglu_cases(rows: int, width: int, low: torch.dtype = LOW) -> dict[str, Case]:
    """SwiGLU, forward and backward."""

    def operands(device: str) -> tuple[Tensor, Tensor]:
        both, grad = draw(device, rows, 2 * width, dtype=low), draw(device, rows, width, dtype=low, seed=1)
        return 2 * both, grad

    def with_amax(device: str) -> Iterable[Tensor]:
        """The amax equals that of the output values exactly; the outputs may differ by one rounding step."""
        out, inner, *found = kernels.swiglu_backward_amax(*operands(device))
        wanted = [values.abs().amax(0).float() for values in (out, inner)]
        return out, inner, *((amax == own).float() for amax, own in zip(found, wanted, strict=True))

    return {
        "swiglu": lambda device: kernels.swiglu(operands(device)[0], low),
        "swiglu in fp8": lambda device: kernels.swiglu(operands(device)[0], fp8.E4M3),
        "swiglu_backward": lambda device: kernels.swiglu_backward(*operands(device)),
        "swiglu_backward without output": lambda device: kernels.swiglu_backward(
            *operands(device), inner=False
        ),
        "swiglu_backward_amax": with_amax,
    }


def cast_cases(rows: int, width: int, dtype: torch.dtype = LOW) -> dict[str, Case]:
    """FP8 casts; one column and one row are zero."""

    def matrix(device: str) -> Tensor:
        x = draw(device, rows, width, dtype=dtype) * torch.logspace(-3, 3, rows).to(device, dtype)[:, None]
        x[rows // 2 :][1:2], x[:, width // 2] = 0, 0
        return x

    def with_factors(device: str) -> Iterable[Tensor | None]:
        return kernels.cast_rows(matrix(device), by=draw(device, width, 1, dtype=EXACT, seed=1).abs() + 0.1)

    def transposed(device: str) -> Iterable[Tensor]:
        x = matrix(device)
        return [
            kernels.cast_transposed(x, x.abs().amax(1, keepdim=True).float().clamp(min=1e-3) / fp8.E4M3_MAX)
        ]

    def with_amax(device: str) -> Iterable[Tensor | None]:
        x = matrix(device)
        return kernels.cast_columns(x, x.abs().amax(0).float() * 2)

    def integers(device: str) -> Iterable[Tensor | None]:
        """Integers with a scale of 1: nothing is rounded."""
        x = (8 * draw(device, rows, width, dtype=EXACT)).round().clamp(-15, 15).to(dtype)
        yield kernels.cast_transposed(x, torch.ones(rows, 1, device=device))
        yield kernels.cast_columns(x, torch.full((width,), fp8.E4M3_MAX, device=device)).values

    return {
        "casts of integers": integers,
        "cast_rows": lambda device: kernels.cast_rows(matrix(device)),
        "cast_rows with column factors": with_factors,
        "cast_columns": lambda device: kernels.cast_columns(matrix(device)),
        "cast_columns with a given amax": with_amax,
        "cast_transposed": transposed,
        "column_amax": lambda device: [kernels.column_amax(matrix(device))],
    }


def rope_cases(
    batch: int, length: int, queries: int, keys: int, size: int, low: torch.dtype = LOW
) -> dict[str, Case]:
    """RoPE of concatenated heads, and its backward pass for several layouts of gradients."""

    def rope(device: str) -> tuple[Tensor, Tensor]:
        angles = draw(device, length, size // 2, dtype=EXACT, seed=1).repeat(1, 2)
        return angles.cos(), angles.sin()

    def rows(device: str) -> Tensor:
        return draw(device, batch, length, queries + 2 * keys, size, dtype=low)

    def forward(device: str) -> Iterable[Tensor]:
        heads = rows(device)
        kernels.rotate_heads(heads.transpose(1, 2)[:, : queries + keys], *rope(device))
        return [heads]

    def backward(device: str) -> Iterable[Tensor]:
        q, k, v = rows(device).transpose(1, 2).split((queries, keys, keys), dim=1)
        copies = k.contiguous(), v.transpose(1, 2).contiguous().transpose(1, 2)
        return [kernels.rope_backward(q, *copies, *rope(device))]

    def transposed(device: str) -> Iterable[Tensor]:
        """The key gradient of unfused attention: the last two dims are transposed."""
        q, k, v = rows(device).transpose(1, 2).split((queries, keys, keys), dim=1)
        return [kernels.rope_backward(q, k.mT.contiguous().mT, v, *rope(device))]

    return {"rotate_heads": forward, "rope_backward": backward, "rope_backward transposed": transposed}


@contextmanager
def computed_by(triton: bool) -> Iterator[None]:
    """Use Triton kernels or torch operations, on any device."""
    usual, kernels.on_gpu = kernels.on_gpu, lambda _: triton
    try:
        yield
    finally:
        kernels.on_gpu = usual


def compare(case: Case, device: str, *, rounded: bool = True) -> None:
    """Require that Triton kernels and torch operations give equal outputs.

    Args:
        case: The computation.
        device: Its device.
        rounded: Whether to compare outputs of less than 32 bits, too.
    """
    with computed_by(triton=False):
        expected = [tensor for tensor in case(device) if tensor is not None]
    with computed_by(triton=True):
        found = [tensor for tensor in case(device) if tensor is not None]
    assert len(found) == len(expected) > 0, "the numbers of outputs differ"
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), f"tensor {number}"
        if ours.dtype == EXACT:
            assert_close_in_float32(ours, theirs, f"tensor {number}")
        elif rounded:
            assert_close_after_rounding(ours, theirs, f"tensor {number}")


def assert_close_in_float32(found: Tensor, expected: Tensor, label: str) -> None:
    """Equal up to the order of summation in float32."""
    exact = expected.double()
    error = (found.double() - exact).abs()
    if (exact >= 0).all():  # scales and norms: sums without cancellation
        assert (error <= FLOAT32_TOLERANCE * exact).all(), f"{label}: off by {(error / exact).max():.1e}"
    else:
        relative = error.norm() / exact.norm()
        assert error.norm() <= FLOAT32_TOLERANCE * exact.norm(), f"{label}: off by {relative:.1e}"


def assert_close_after_rounding(found: Tensor, expected: Tensor, label: str) -> None:
    """At most 1% of the values differ, each by at most one rounding step."""
    ours, theirs = found.float(), expected.float()
    error, largest = (ours - theirs).abs(), theirs.abs().max()
    # Where large terms cancel, the error is relative to the terms, not to the result.
    bound = ROUNDING_STEP[found.dtype] * theirs.abs() + SMALLEST[found.dtype] + FLOAT32_TOLERANCE * largest
    assert (error <= bound).all(), f"{label}: off by {error.max():.1e} of {largest:.1e}"
    differ = int((error > 0).sum())
    assert differ <= 2 + error.numel() // 100, f"{label}: {differ} of {error.numel()} differ"


def check_cross_entropy(
    device: str, vocab_size: int, *, dtype: torch.dtype = LOW, spread: float = 3.0, factor: float = 1.0
) -> None:
    """Losses and gradients match torch's cross-entropy in float32; those of ignored targets are zero.

    Args:
        device: Device of the logits.
        vocab_size: Size of the vocabulary.
        dtype: Dtype of the logits.
        spread: Standard deviation of the logits.
        factor: Factor of the gradient.
    """
    logits = (spread * draw("cpu", 6, vocab_size, dtype=EXACT)).to(device, dtype)
    targets = torch.randint(0, vocab_size, (6,), generator=torch.Generator().manual_seed(1)).to(device)
    targets[1], targets[2], targets[3], targets[4] = IGNORE_INDEX, 0, vocab_size - 1, logits[4].argmax()
    exact = logits.float().requires_grad_()
    losses = F.cross_entropy(exact, targets, ignore_index=IGNORE_INDEX, reduction="none")
    (wanted,) = torch.autograd.grad(losses.sum() * factor, exact)
    before = logits.clone()
    without_grad = kernels.cross_entropy(logits, targets, factor, IGNORE_INDEX, gradient=False)
    assert torch.equal(logits, before), "the logits were overwritten without gradient=True"
    found = kernels.cross_entropy(logits, targets, factor, IGNORE_INDEX, gradient=True)
    # The largest logit is a term of the loss: the error is relative to it.
    for own in (found, without_grad):
        torch.testing.assert_close(
            own, losses.detach(), rtol=FLOAT32_TOLERANCE, atol=4 * FLOAT32_TOLERANCE * spread
        )
    assert found[1] == 0
    assert logits[1].count_nonzero() == 0
    error = (logits.float() - wanted).norm() / wanted.norm()
    assert error < (3e-3 if dtype == LOW else 20 * FLOAT32_TOLERANCE), f"gradient off by {error:.1e}"


def check_scale(device: str, dtype: torch.dtype) -> None:
    """A factor multiplies every value. With a factor of 1 nothing is written: a NaN keeps its bits."""
    x = draw(device, 3, 5000, dtype=dtype)
    before = x.clone()
    kernels.scale(x, torch.full((), 0.3, device=device))
    torch.testing.assert_close(x, (before.float() * 0.3).to(dtype), rtol=FLOAT32_TOLERANCE, atol=0.0)
    integer, nan_bits = (torch.int16, 0x7F81) if dtype == LOW else (torch.int32, 0x7F800001)
    nans = torch.full((5000,), nan_bits, dtype=integer, device=device)
    kernels.scale(nans.view(dtype), torch.ones((), device=device))
    assert (nans == nan_bits).all()


def check_adamw(device: str) -> None:
    """Updates match torch operations, also after a gradient was reallocated. A NaN factor updates nothing."""
    from meshwright.train.optimizers import triton_adamw
    from meshwright.train.optimizers.parameter_update import ParameterUpdate, update_parameter

    shapes, table = [(50, 96), (33,), (7, 3), (100, 100), (16,)], triton_adamw.ParameterTable()
    scalars = draw(device, len(shapes), 4, dtype=EXACT, seed=9).abs()

    def build(number: int) -> ParameterUpdate:
        drawn = [draw(device, *shapes[number], dtype=EXACT, seed=10 * number + i) for i in range(4)]
        parameter, gradient, exp_avg, exp_avg_sq = drawn
        copy = torch.zeros_like(parameter) if number % 2 else None
        return ParameterUpdate(parameter, gradient, exp_avg, exp_avg_sq.abs(), copy)

    ours, theirs = ([build(number) for number in range(len(shapes))] for _ in range(2))
    for _ in range(2):
        triton_adamw.adamw_step(table, ours, scalars, (0.9, 0.95), 1e-8)
        for update, row in zip(theirs, scalars, strict=True):
            update_parameter(update, row, (0.9, 0.95), 1e-8)
        for own, other in zip(ours, theirs, strict=True):
            for found, wanted in zip(own, other, strict=True):
                assert (found is None) == (wanted is None)
                if found is not None:
                    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        ours[0] = ours[0]._replace(grad=ours[0].grad.clone())
    before = [[tensor if tensor is None else tensor.clone() for tensor in update] for update in ours]
    scalars[:, 3] = float("nan")
    triton_adamw.adamw_step(table, ours, scalars, (0.9, 0.95), 1e-8)
    for own, kept in zip(ours, before, strict=True):
        assert all(a is b or torch.equal(a, b) for a, b in zip(own, kept, strict=True))


def check_interpreted() -> None:
    """All kernels on a CPU, with sizes smaller than one block."""
    from meshwright.models.kernels import triton_block as triton_kernels

    triton_kernels._multiprocessors = lambda _: 3  # several rows per program
    triton_kernels.THREADS = 32
    cases = norm_cases(20, 96, EXACT, EXACT) | swiglu_cases(20, 160, EXACT) | cast_cases(80, 144, EXACT)
    cases |= rope_cases(2, 5, 6, 3, 16, EXACT) | embedding_cases(50, 30, 96, EXACT)
    cases |= {f"{name}, with row prefetch": case for name, case in norm_cases(20, 2100, EXACT, EXACT).items()}
    for name, case in cases.items():
        compare(case, "cpu", rounded=name == "casts of integers")
        sys.stdout.write(f"{name}\n")  # the test counts the lines
    with computed_by(triton=True):
        check_cross_entropy("cpu", 300, dtype=EXACT)
        check_cross_entropy("cpu", 40_000, dtype=EXACT, factor=0.1)
        check_scale("cpu", EXACT)
        check_unknown_tokens("cpu")
    check_adamw("cpu")
    sys.stdout.write("adamw\n")
    sys.stdout.write("cross_entropy and scale\n")


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("set TRITON_INTERPRET=1")
    check_interpreted()
