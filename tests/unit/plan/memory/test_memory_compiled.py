"""The ledger of compiled steps on a GPU: formulas by hand, and saved tensors of the compiler."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from meshwright.layout.parameters import FP8_ALIGNED, count_parameters
from meshwright.plan.memory.compiled import CompiledBlock, count_copied_weights, has_exact_peak, is_compiled
from meshwright.plan.memory.ledger import predict_ledger
from meshwright.plan.memory.triton_block import TritonBlock

SMALL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 8,
    "num_kv_heads": 2,
    "ffn_size": 256,
    "vocab_size": 256,
}


@pytest.fixture
def job(make_h200_job):
    """16 layers, 2048 wide, 8 x 4096 tokens on one H200."""
    return make_h200_job()


def with_train(job, **changes):
    return dataclasses.replace(job, train=dataclasses.replace(job.train, **changes))


def with_layout(job, **changes):
    return dataclasses.replace(job, layout=dataclasses.replace(job.layout, **changes))


def test_a_block_saves_its_input_and_its_gemm_outputs(job):
    tokens = 8 * 4096
    each = 2 * 2048 + 2 * (2048 + 2 * 512) + 2 * 2048 + 4 * 32 + 2 * 2048 + 4 * 8192
    assert CompiledBlock.of(job, job.model, 8).saved == tokens * each
    wide = CompiledBlock.of(with_train(job, residual_dtype="fp32"), job.model, 8)
    assert wide.saved - tokens * each == wide.residual // 2 == tokens * 2 * 2048
    assert CompiledBlock.of(with_layout(job, recompute="full"), job.model, 8).saved == tokens * 2 * 2048


@pytest.mark.parametrize(("backend", "block"), [("triton", TritonBlock), ("compile", CompiledBlock)])
def test_the_peak_is_state_copies_blocks_and_the_loss(job, backend, block):
    job = with_train(job, block_backend=backend)
    ledger, model = predict_ledger(job, 8, 1), job.model
    tokens, head, blocks = 8 * 4096, 128256 * 2048, block.of(job, job.model, 8).saved * 16
    state = count_parameters(model) * 12 + count_copied_weights(model) * 2
    loss = 3 * tokens * 2048 * 2 + head * 4 + 8192 * 128256 * 2
    assert ledger.peak_at == "loss, forward"
    assert ledger.peak_bytes == pytest.approx(state + blocks + loss, rel=0.003)
    assert count_copied_weights(model) == count_parameters(model) - head - 33 * 2048
    assert ledger.peak_bytes < 60 * 2**30


@pytest.mark.parametrize(
    ("mask", "layout", "held"),
    [("document", {}, 1.0), ("causal", {"tp": 2}, 0.5), ("causal", {"cp": 2}, 1.0)],
)
def test_bf16_weight_copies_are_counted_in_every_ledger(job, mask, layout, held):
    """The eager ledger counts them too. A tp rank has its shard of them."""
    other = with_layout(dataclasses.replace(job, data=dataclasses.replace(job.data, mask=mask)), **layout)
    assert not is_compiled(other)
    lines = {line.name: line.bytes for line in predict_ledger(other, 8, 1).lines}
    assert lines["bf16 weight copies"] == pytest.approx(held * 2 * count_copied_weights(job.model))


def test_state_equals_that_of_an_eager_step(job):
    """The audit requires equal state. Weight copies are a separate line."""
    eager = predict_ledger(with_train(job, block_backend="eager", residual_dtype="fp32"), 8, 1)
    assert predict_ledger(job, 8, 1).state_bytes == eager.state_bytes


@pytest.mark.parametrize(
    ("changed", "measured"),
    [
        ({}, 50_993_844_224),
        ({"num_layers": 1}, 12_988_696_064),
        ({"num_layers": 28, "hidden_size": 3072, "num_heads": 24}, 82_000_217_088),
    ],
)
def test_measured_peaks_on_an_h200_match(job, changed, measured):
    """Measured on 16 Nov 2026 with torch 2.11. The difference is rounding of the allocator."""
    model = dataclasses.replace(job.model, **changed)
    batch = 4 if model.hidden_size == 3072 else 8
    job = dataclasses.replace(with_layout(job, micro_batch=batch), model=model)
    assert predict_ledger(job, batch, 1).peak_bytes == pytest.approx(measured, rel=6e-4)


def test_backward_peaks_of_triton_blocks_by_hand(job):
    """With a small vocabulary the peak is in the feed-forward of a block, not in the loss."""
    tokens, width, inner = 8 * 4096, 2048, 8192
    job = dataclasses.replace(job, model=dataclasses.replace(job.model, vocab_size=256))
    kept = tokens * (2 * (2 * width + 4) + 2 * (2048 + 2 * 512) + 2 * 2048 + 4 * 32 + 4 * inner)
    gate = tokens * (2 * inner + 4 * inner + 2 * inner)  # what comes to it, what it gives, down's input again
    assert TritonBlock.of(job, job.model, 8).points[0].temporary == tokens * 2 * width + gate
    ledger = predict_ledger(job, 8, 1)
    lines = {line.name: line.bytes for line in ledger.lines}
    assert ledger.peak_at == "block 15, backward"
    assert lines["activations at peak"] == 16 * kept
    assert lines["temporary buffers at peak"] == tokens * 2 * width + gate
    assert lines["gradients at peak"] == (256 + 1) * width * 4
    # Without checkpointing the input of down is saved, and the peak is at the last weight gradient: the
    # residual's gradients before and after the norm are live, also cast for GEMMs if the residual is fp32.
    wide = with_train(with_layout(job, recompute="none"), residual_dtype="fp32")
    made = TritonBlock.of(wide, job.model, 8).points[0].temporary
    assert made == tokens * (6 * width + 4 * inner + 6 * width) + 4 * 3 * inner * width


def test_fp8_casts_are_live_beside_the_gemms(job):
    """No fp8 tensor is saved: no checkpointing and selective checkpointing give the same."""
    fp8, (tokens, width, inner) = with_train(job, precision="fp8"), (8 * 4096, 2048, 8192)
    blocks = {
        recompute: TritonBlock.of(with_layout(fp8, recompute=recompute), fp8.model, 8)
        for recompute in ("none", "selective")
    }
    assert blocks["none"] == blocks["selective"]
    output = blocks["none"].points[1].temporary - TritonBlock.of(job, job.model, 8).points[1].temporary
    assert output == tokens * width + width * 2048 - 4 * width * 2048, "casts for the input gradient's GEMM"
    fp8 = with_train(fp8, fp8_weight_grads=True)
    made = TritonBlock.of(fp8, fp8.model, 8).points[0].temporary
    matrices = 4 * 3 * inner * width
    assert made == tokens * (4 * width + 4 * inner + 2 * width) + matrices + tokens * (2 * inner + width)


def test_plan_counts_the_gemms_in_fp8():
    fp8 = pytest.importorskip("meshwright.models.kernels.fp8")
    assert fp8.ALIGNMENT == FP8_ALIGNED


def test_only_triton_blocks_are_exact(job):
    assert has_exact_peak(job)
    assert not has_exact_peak(with_train(job, block_backend="compile"))
    assert not has_exact_peak(dataclasses.replace(job, data=dataclasses.replace(job.data, mask="document")))


def test_activation_checkpointing_lowers_the_peak(job):
    peaks = [
        predict_ledger(with_layout(job, recompute=r), 8, 1).peak_bytes for r in ("none", "selective", "full")
    ]
    assert peaks == sorted(peaks, reverse=True)


def test_bf16_weight_gradients_are_half_as_large(job):
    """The 16 blocks have bf16 gradients. Embedding, head and norms keep float32. The plan explains both."""
    matrices = 16 * 2048 * (2 * 2048 + 2 * 512 + 3 * 8192)
    wide, narrow = (predict_ledger(with_train(job, grad_dtype=kind), 8, 1) for kind in ("fp32", "bf16"))
    assert wide.state_bytes["gradients"] - narrow.state_bytes["gradients"] == 2 * matrices
    assert narrow.state_bytes | {"gradients": 0} == wide.state_bytes | {"gradients": 0}
    (line,) = [line for line in narrow.lines if line.name == "gradients at peak"]
    rest = count_parameters(job.model) - matrices
    assert line.formula == f"of {rest} x 4 (float32) + {matrices} x 2 (16 bits)"
    layouts = [{"micro_batch": 4}, {"dp_replicate": 2, "micro_batch": 4}]
    for changes in layouts:  # what is added up is float32
        summed = with_layout(with_train(job, grad_dtype="bf16"), **changes)
        assert predict_ledger(summed, 4, 2).state_bytes == predict_ledger(job, 8, 1).state_bytes


def test_bf16_gradients_of_packed_documents_are_counted_too(job):
    """Packed documents have another ledger for attention. All gradients exist at the end of backward."""
    job = dataclasses.replace(job, data=dataclasses.replace(job.data, seq_len=64, mask="document"))
    wide, narrow = (predict_ledger(with_train(job, grad_dtype=kind), 8, 1) for kind in ("fp32", "bf16"))
    saved = wide.state_bytes["gradients"] - narrow.state_bytes["gradients"]
    lines = {line.name: line.bytes for line in wide.lines}
    assert wide.peak_at == "embedding, backward"
    assert lines["gradients at peak"] == wide.state_bytes["gradients"]
    assert 0 < wide.peak_bytes - narrow.peak_bytes < saved, "then the loss is the peak"


def test_accumulated_gradients_live_through_the_step(job):
    """Two micro-batches of half the size have fewer activations and all gradients."""
    two = predict_ledger(with_layout(job, micro_batch=4), 4, 2)
    line = next(line for line in two.lines if line.name == "gradients at peak")
    assert line.bytes == count_parameters(job.model) * 4


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("train", {"block_backend": "eager"}),
        ("train", {"compile_backend": "aot_eager"}),
        ("layout", {"dp_shard": 2, "zero": 3}),
    ],
)
def test_other_steps_have_their_own_ledgers(job, section, changes):
    assert is_compiled(job)
    assert not is_compiled(
        dataclasses.replace(job, **{section: dataclasses.replace(getattr(job, section), **changes)})
    )


@pytest.mark.filterwarnings(
    "ignore:.*:DeprecationWarning", "ignore:The .grad attribute:UserWarning"
)  # torch's
@pytest.mark.parametrize(("recompute", "residual"), [("selective", "bf16"), ("none", "fp32")])
def test_compiler_saves_exactly_the_predicted_bytes(make_job, recompute, residual):
    torch = pytest.importorskip("torch")
    from meshwright.models.bf16_weights import WeightCopies
    from meshwright.models.block_backend import compile_blocks
    from meshwright.models.decoder import Decoder

    torch._dynamo.reset()
    job = make_job(
        model={"preset": None, **SMALL, "tied_embeddings": False},
        cluster={"preset": "local", "device": "cpu"},
        train={"precision": "bf16", "block_backend": "compile", "residual_dtype": residual},
        layout={"dp_replicate": 1, "micro_batch": 4, "recompute": recompute},
    )
    decoder = Decoder(job.model, 32, recompute=recompute)
    decoder.residual_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[residual]
    decoder.weight_copies = WeightCopies(decoder, torch.bfloat16)
    compile_blocks(decoder, backend="aot_eager")

    def run(x, rope):
        for block in decoder.list_blocks():
            x = block(x, rope, None, None)

    assert sum_saved_bytes(job, decoder, run) == 2 * CompiledBlock.of(job, job.model, 4).saved


@pytest.mark.parametrize("residual", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("recompute", "precision"), [("selective", "bf16"), ("none", "bf16"), ("none", "fp8")]
)
def test_triton_blocks_save_exactly_the_predicted_bytes(make_job, recompute, residual, precision):
    """Torch operators replace the kernels. They save the same tensors."""
    torch = pytest.importorskip("torch")
    from meshwright.models.bf16_weights import WeightCopies
    from meshwright.models.block_backend import convert_to_triton
    from meshwright.models.decoder import Decoder
    from meshwright.models.linear import convert_linears_to_fp8

    job = make_job(
        model={"preset": None, **SMALL, "tied_embeddings": False},
        cluster={"preset": "local", "device": "cpu"},
        train={"precision": precision, "block_backend": "compile", "residual_dtype": residual},
        layout={"dp_replicate": 1, "micro_batch": 4, "recompute": recompute},
    )
    decoder = Decoder(job.model, 32, recompute=recompute)
    decoder.residual_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[residual]
    if precision == "fp8":
        convert_linears_to_fp8(decoder, weight_grads=True)
    decoder.weight_copies = WeightCopies(decoder, torch.bfloat16)
    convert_to_triton(decoder)

    def run(x, rope):
        for block in decoder.list_blocks():
            x = block(x, rope, None)
        decoder.norm(x)

    block = TritonBlock.of(job, job.model, 4)
    assert sum_saved_bytes(job, decoder, run) == 2 * block.saved + block.final_norm


def sum_saved_bytes(job, decoder, run):
    """Bytes that autograd saves in a call, without weight copies, tables and parameters."""
    import torch

    from meshwright.train.amp import MixedPrecision

    lasting = [
        *decoder.parameters(),
        *decoder.weight_copies.copies.values(),
        decoder.rope_cos,
        decoder.rope_sin,
    ]
    own = {tensor.untyped_storage().data_ptr() for tensor in lasting}
    kept = {}

    def save(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.zeros(4, 32, job.model.hidden_size, dtype=decoder.residual_dtype, requires_grad=True)
    rope = (decoder.rope_cos, decoder.rope_sin)
    with (
        MixedPrecision(job, torch.device("cpu")).autocast(),
        torch.autograd.graph.saved_tensors_hooks(save, save),
    ):
        run(x, rope)
    return sum(kept.values())


@pytest.fixture
def kernels_that_only_allocate(monkeypatch):
    """Replace the Triton kernels, GEMMs and attention by functions that only allocate their outputs."""
    torch = pytest.importorskip("torch")
    from meshwright.models import attention
    from meshwright.models.kernels import fp8, gemm
    from meshwright.models.kernels import fused as kernels

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out = torch.empty(q.transpose(1, 2).shape, dtype=q.dtype).transpose(1, 2)
            sums = torch.empty(q.shape[:3], dtype=torch.float32)
            ctx.save_for_backward(q, k, v, out, sums)
            return out

        @staticmethod
        def backward(ctx, grad):
            q, k, v, _, sums = ctx.saved_tensors
            inside = [torch.empty(q.shape, dtype=torch.float32), torch.empty_like(sums)]
            inside += [torch.empty_like(q) for _ in range(2) if k.shape != q.shape]
            made = [torch.empty(x.transpose(1, 2).shape, dtype=x.dtype).transpose(1, 2) for x in (q, k, v)]
            del inside
            return tuple(made)

    names = (
        "embedding_lookup",
        "embedding_grad",
        "add_rms_norm",
        "rotate",
        "swiglu",
        "swiglu_cast",
        "swiglu_backward",
        "swiglu_backward_amax",
        "cast_rows",
        "cast_columns",
        "cast_transposed",
        "column_amax",
    )
    quiet = SimpleNamespace(**{name: lambda *args: None for name in names})
    quiet.rms_norm_backward = lambda grad, *args: torch.empty(grad.shape[1], dtype=torch.float32)
    monkeypatch.setattr(kernels, "on_gpu", lambda x: True)
    monkeypatch.setattr(kernels, "_triton", lambda: quiet)
    monkeypatch.setattr(kernels, "scale", lambda x, factor: None)
    monkeypatch.setattr(
        gemm,
        "float32_weight_grad",
        lambda grad, x: torch.empty(grad.shape[1], x.shape[1], dtype=torch.float32),
    )
    monkeypatch.setattr(
        fp8,
        "scaled_mm",
        lambda a, b, fast, exact=False: torch.empty(
            len(a.values), len(b.values), dtype=torch.float32 if exact else torch.bfloat16
        ),
    )
    monkeypatch.setattr(attention.Context, "attend", lambda self, q, k, v, mask: Attention.apply(q, k, v))


@pytest.mark.parametrize("residual", ["bf16", "fp32"])
@pytest.mark.parametrize("recompute", ["selective", "none", "full"])
@pytest.mark.parametrize(
    ("precision", "narrow", "passes", "kept"),
    [
        ("bf16", False, 1, "fp32"),
        ("bf16", False, 2, "fp32"),
        ("bf16", True, 1, "fp32"),
        ("fp8", False, 1, "fp32"),
        ("all fp8", False, 1, "fp32"),
        ("bf16", False, 1, "bf16"),
        ("all fp8", False, 1, "bf16"),
    ],
)
def test_a_whole_step_matches_the_ledger(
    job, kernels_that_only_allocate, recompute, residual, precision, narrow, passes, kept
):
    """The peak of live tensors from the first block to the embedding, with a small vocabulary.

    With a narrow feed-forward it is in attention that most lives. A norm's gradient, the loss and scales of 8
    bits, which are not counted, are all that is beside it.
    """
    torch = pytest.importorskip("torch")
    from meshwright.measure.memory_tracker import PeakTracker
    from meshwright.models.bf16_weights import WeightCopies
    from meshwright.models.block_backend import convert_to_triton
    from meshwright.models.decoder import Decoder
    from meshwright.models.linear import convert_linears_to_fp8

    all_fp8 = precision == "all fp8"
    sizes = SMALL | {"hidden_size": 128, "ffn_size": 32 if narrow else 256, "vocab_size": 16}
    model = dataclasses.replace(job.model, **sizes)
    job = dataclasses.replace(job, model=model, data=dataclasses.replace(job.data, seq_len=64))
    job = with_train(job, precision=precision.split()[-1], residual_dtype=residual)
    job = with_train(job, grad_dtype=kept, fp8_weight_grads=all_fp8)
    job = with_layout(job, recompute=recompute)
    decoder = Decoder(model, 64, loss_chunk=512, recompute=recompute)
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    decoder.residual_dtype = dtypes[residual]
    if precision != "bf16":
        convert_linears_to_fp8(decoder, weight_grads=all_fp8)
    decoder.weight_copies = WeightCopies(decoder, torch.bfloat16)
    convert_to_triton(decoder, dtypes[kept])
    decoder.head.uses_fused_loss = False
    words = torch.zeros(2, 8, 64, dtype=torch.int64)
    lasting = [
        *decoder.parameters(),
        *decoder.weight_copies.copies.values(),
        decoder.rope_cos,
        decoder.rope_sin,
    ]
    with PeakTracker([*lasting, *words]) as tracker, torch.autocast("cpu", torch.bfloat16):
        for _ in range(passes):
            decoder(*words).backward()
    ledger = predict_ledger(job, 8, passes)
    beside = ("optimizer", "optimizer kernel table", "cuBLAS workspace")
    away = sum(line.bytes for line in ledger.lines if line.name in beside)
    assert "backward" in ledger.peak_at
    beside = tracker.peak_bytes - (ledger.peak_bytes - away)
    assert 0 <= beside < (8192 if precision == "bf16" else 16384), ledger.peak_at
