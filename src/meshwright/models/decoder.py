"""A decoder: grouped-query attention and a feed-forward or experts, each behind a norm, as the model says.

Llama-shaped as it stands, GPT-shaped with learned positions, LayerNorm, GELU and biases. Parameter names and
registration order are the contract with ``plan.shapes``, which lists the same table without torch; a test
holds the two together.

Shape suffixes: B batch, T tokens of a sequence, D hidden, H query heads, K key heads, E head size,
F feed-forward, V vocabulary, N = B x T.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.layout.stages import StageSpec
from meshwright.models.activation_checkpointing import checkpoint_block
from meshwright.models.attention import Context, apply_rope, document_positions, prefer_fast_attention
from meshwright.models.bf16_weights import WeightCopies
from meshwright.models.feed_forward import build_feed_forward
from meshwright.models.linear import Linear, MergedLinear
from meshwright.models.loss import linear_cross_entropy
from meshwright.models.moe import ExpertLinear, MixtureOfExperts
from meshwright.models.norms import RMSNorm, build_norm, compute_dtype
from meshwright.models.routing import Router
from meshwright.models.triton_block import TritonBlock, embed, final_norm
from meshwright.spec.layout import Recompute
from meshwright.spec.model import DecoderModel


def build_rope(model: DecoderModel, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and frequency, each (T, head_size), float32."""
    device = positions_T.device
    exponents = torch.arange(0, model.head_size, 2, dtype=torch.float64, device=device) / model.head_size
    frequencies = scale_rope_frequencies(model, model.rope_theta**-exponents)
    angles = torch.outer(positions_T.double(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


def scale_rope_frequencies(model: DecoderModel, frequencies: Tensor) -> Tensor:
    """Llama 3.1's rule for longer contexts: slow rotations are slowed down further, fast ones left alone.

    In between, the two are mixed by how often the rotation turns within the original positions.
    """
    if model.rope_factor is None:
        return frequencies
    rotations = model.rope_original_positions * frequencies / (2 * math.pi)
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / model.rope_factor)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share one key and value head."""

    def __init__(self, model: DecoderModel) -> None:
        super().__init__()
        self.head_size = model.head_size
        self.context = Context()
        bias = model.attention_bias
        self.wq = Linear(model.hidden_size, model.query_size, bias=bias)
        self.wk = Linear(model.hidden_size, model.kv_size, bias=bias)
        self.wv = Linear(model.hidden_size, model.kv_size, bias=bias)
        self.wo = Linear(model.query_size, model.hidden_size, bias=bias)
        self.qkv: MergedLinear | None = None
        """The first three as one, where they are."""

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        """Mix along the sequence; position t sees positions up to t, of its own document with a mask.

        Args:
            x_BTD: The tokens that are here.
            rope: The turn of each of them.
            mask: What the context makes of documents.
        """
        batch, length, _ = x_BTD.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, self.head_size).transpose(1, 2)

        if self.qkv is None:
            q_BHTE, k_BKTE, v_BKTE = heads(self.wq(x_BTD)), heads(self.wk(x_BTD)), heads(self.wv(x_BTD))
        else:
            q_BHTE, k_BKTE, v_BKTE = map(heads, self.qkv.matmul(x_BTD))
        if rope is not None:
            q_BHTE, k_BKTE = apply_rope(q_BHTE, *rope), apply_rope(k_BKTE, *rope)
        mixed_BHTE = self.context.attend(q_BHTE, k_BKTE, v_BKTE, mask)
        return self.wo(mixed_BHTE.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """Attention and feed-forward, or experts, each behind a norm and beside a residual."""

    def __init__(self, model: DecoderModel, recompute: Recompute, layer: int) -> None:
        super().__init__()
        self.recompute: Recompute = recompute
        self.attention_norm = build_norm(model)
        self.attention = Attention(model)
        self.ffn_norm = build_norm(model)
        self.is_moe = model.num_experts is not None and layer >= model.dense_layers
        """Whether it has experts."""
        self.ffn = MixtureOfExperts(model) if self.is_moe else build_feed_forward(model, model.ffn_size)
        products = list(self.list_gemm_modules())
        # Nothing in the backward pass reads the last one; but those who weigh experts' answers read them.
        self.saved_gemms = [*[True] * (len(products) - 1), not isinstance(products[-1][1], Linear)]
        """Of the block's products, in order, those that selective recomputation keeps."""
        self.saved_reductions: list[bool] = []
        """Of the sums over ranks that some become where matrices are split, in order, those that it keeps."""

    def list_gemm_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Its matrix products by name, in the order in which they are computed."""
        kinds = (Linear, Router, ExpertLinear)
        return ((name, module) for name, module in self.named_modules() if isinstance(module, kinds))

    def forward(
        self,
        x_BTD: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        weights_B: Tensor | None = None,
    ) -> Tensor:
        """One block, keeping for the backward pass what the layout says.

        Args:
            x_BTD: The residual stream.
            rope: Tables of rotations.
            mask: Added to the scores of attention.
            weights_B: Each sequence's share of the batch, for experts.
        """
        if not isinstance(self.ffn, MixtureOfExperts):
            return self._run(x_BTD, rope, mask, None)
        router = self.ffn.router
        router.is_counting = True  # and not where it is computed again
        out = self._run(x_BTD, rope, mask, weights_B)
        router.is_counting = False
        return out

    def _run(self, *inputs: Any) -> Tensor:
        return checkpoint_block(
            self._compute, self.recompute, self.saved_gemms, self.saved_reductions, *inputs
        )

    def _compute(
        self,
        x_BTD: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        weights_B: Tensor | None,
    ) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope, mask)
        normal = self.ffn_norm(x_BTD)
        return x_BTD + (self.ffn(normal, weights_B) if self.is_moe else self.ffn(normal))


class Head(nn.Linear):
    """The last product, to the logits of the words; its matrix may be the embedding of another stage."""

    tied_embedding: tuple[nn.Embedding] | None = None
    """That embedding; in a tuple, so that it is no part of the head."""
    weight_copy: Tensor | None = None
    """Its matrix in the precision of the product, where a copy is kept."""
    fused = False
    """Whether its loss is made by compiled code or a kernel of our own, of logits in 16 bits."""
    expected_loss_grad = 1.0
    """Of the loss, in the backward passes to come."""

    def get_weight(self) -> Tensor:
        """The rows of the words."""
        return self.weight if self.tied_embedding is None else self.tied_embedding[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return F.linear(x, self.get_weight())

    def loss(self, x: Tensor, targets_BT: Tensor, chunk: int) -> Tensor:
        """The loss **summed** over the targets that are not ``IGNORE_INDEX``, ``chunk`` tokens at a time."""
        x_ND, targets_N = x.flatten(0, 1), targets_BT.flatten()
        return linear_cross_entropy(
            x_ND,
            self.get_weight(),
            targets_N,
            chunk,
            weight_copy_VD=self.weight_copy,
            fused=self.fused,
            expected=self.expected_loss_grad,
        )


def _build_table(rows: int, width: int) -> nn.Embedding:
    """A table whose weights come later: drawing them on the meta device would load torch's compiler."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class Decoder(nn.Module):
    """Token ids in; logits, or the summed loss where targets are given, out.

    It may be a part of the model, a stage of a pipeline: a run of its blocks under the names that they have
    in the whole, with the embedding if it is the first stage and the head if it is the last. A stage that is
    not the first reads the residual stream, one that is not the last puts it out.
    """

    embed: nn.Embedding
    norm: nn.Module
    head: Head
    residual_dtype: torch.dtype = torch.float32
    """Precision of the residual stream."""
    weight_copies: WeightCopies | None = None
    """Of its matrices, where products read copies."""
    fused: list[TritonBlock] | None = None
    """Its blocks, where our own kernels compute them."""

    def __init__(
        self,
        model: DecoderModel,
        seq_len: int,
        loss_chunk: int = 1024,
        recompute: Recompute = "none",
        part: StageSpec | None = None,
        context: Context | None = None,
    ) -> None:
        """Build it with uninitialised weights.

        Args:
            model: Its shape.
            seq_len: Most tokens of a sequence that it will read; a stage without embedding reads this many.
            loss_chunk: Tokens whose logits are held at once in training.
            recompute: What each block computes again in the backward pass.
            part: Which stage it is; all of the model if left out.
            context: Where its tokens stand in their sequences; those are whole if left out.
        """
        super().__init__()
        self.context = context or Context()
        part = part or StageSpec(model, 0, range(model.num_layers), first=True, last=True)
        self.seq_len, self.loss_chunk = seq_len, loss_chunk
        self.first, self.last = part.first, part.last
        if part.first or part.copies_embedding:
            self.embed = _build_table(model.vocab_size, model.hidden_size)
        self.positions: nn.Embedding | None = None
        if model.positions == "learned" and part.first:
            assert model.max_positions is not None, "the legality table asks for max_positions"
            self.positions = _build_table(model.max_positions, model.hidden_size)
        self.blocks = nn.ModuleDict({str(layer): Block(model, recompute, layer) for layer in part.layers})
        for block in self.list_blocks():
            block.attention.context = self.context
        if part.last:
            self.norm = build_norm(model)
            self.head = Head(model.hidden_size, model.vocab_size, bias=False)
            if part.shares_embedding:
                self.head.register_parameter("weight", None)
            elif model.tied_embeddings:
                self.head.weight = self.embed.weight
        self.uses_rope = model.positions == "rope"
        self.rope_cos: Tensor
        self.rope_sin: Tensor
        if self.uses_rope:
            device = torch.get_default_device()
            if device.type == "meta":  # as above
                cos_TE, sin_TE = torch.empty(2, seq_len, model.head_size)
            else:
                cos_TE, sin_TE = build_rope(model, self.context.local_positions(seq_len, device))
            self.register_buffer("rope_cos", cos_TE, persistent=False)
            self.register_buffer("rope_sin", sin_TE, persistent=False)

    def list_blocks(self) -> Iterator[Block]:
        """Its blocks, first to last."""
        return (cast(Block, block) for block in self.blocks.values())

    def forward(
        self,
        x: Tensor,
        targets_BT: Tensor | None = None,
        segments_BT: Tensor | None = None,
        weights_B: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, V), or the loss **summed** over the targets that are not ``IGNORE_INDEX``.

        The caller divides by the number of targets in the whole global batch: a mean here would weigh
        ranks and micro-batches instead of tokens. With segments, no position sees another document.

        Args:
            x: Tokens (B, T); of a stage that is not the first, the residual stream.
            targets_BT: Words to predict; read by the last stage.
            segments_BT: The number of each token's document, of whole sequences.
            weights_B: Each sequence's share of the batch, 0 for one that only fills up; for experts.
        """
        length = x.shape[1] if self.first else self.seq_len
        assert length <= self.seq_len, f"{length} tokens, but positions are built for {self.seq_len}"
        if self.weight_copies is not None:
            self.weight_copies.refresh()
        if self.fused is not None:
            x = embed(self.embed, x, self.residual_dtype)
        elif self.first:
            x = self._embed(x, segments_BT).to(self.residual_dtype)
        rope = (self.rope_cos[:length], self.rope_sin[:length]) if self.uses_rope else None
        mask = None if segments_BT is None else self.context.build_mask(segments_BT, compute_dtype(x))
        if self.fused is not None:
            assert isinstance(self.norm, RMSNorm), "the spec's uses_triton_blocks wants this norm"
            x = final_norm(self.norm, *self.run_fused(x, rope, mask))
        else:
            for block in self.blocks.values():
                x = block(x, rope, mask, weights_B)
            if not self.last:
                return x
            x = self.norm(x)
        return self.head(x) if targets_BT is None else self.head.loss(x, targets_BT, self.loss_chunk)

    def set_expected_loss_grad(self, expected: float) -> None:
        """Tell what the loss's gradient will be: then gradients are made with it, and not scaled after.

        Another one comes out right as well, and costs a pass over the head's gradient.
        """
        if self.last and self.head.expected_loss_grad != expected:  # a module is slow to set
            self.head.expected_loss_grad = expected

    def run_fused(
        self, x_BTD: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream behind all blocks and what the last one adds to it, by our own kernels.

        Args:
            x_BTD: The stream before them.
            rope: Tables of rotations.
            mask: Added to the scores of attention.
        """
        assert self.fused is not None, "asked where they are"
        assert rope is not None, "the spec's uses_triton_blocks wants rotations"
        delta_BTD: Tensor | None = None
        for fused, block in zip(self.fused, self.list_blocks(), strict=True):
            if block.recompute == "full" and torch.is_grad_enabled():
                x_BTD = x_BTD if delta_BTD is None else x_BTD + delta_BTD  # the one tensor that is kept
                x_BTD, delta_BTD = checkpoint(
                    fused,
                    x_BTD,
                    None,
                    rope,
                    mask,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=functools.partial(_same_attention, x_BTD.device.type),
                )
            else:
                x_BTD, delta_BTD = fused(x_BTD, delta_BTD, rope, mask)
        assert delta_BTD is not None, "a decoder has blocks"
        return x_BTD, delta_BTD

    def _embed(self, tokens_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        if self.positions is None:
            return x_BTD
        if segments_BT is None:
            index = self.context.local_positions(tokens_BT.shape[1], tokens_BT.device)
        else:
            index = self.context.local_columns(document_positions(segments_BT))
        return x_BTD + self.positions(index)


def _same_attention(device: str) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around a block, and where it is computed again: there too the kernel that the forward pass wants."""
    return nullcontext(), prefer_fast_attention(device)


class Stages(nn.Module):
    """What one rank holds of a model: its stages, with the names that parameters have in the whole."""

    def __init__(self, stages: Iterable[Decoder]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def __iter__(self) -> Iterator[Decoder]:
        return (cast(Decoder, stage) for stage in self.stages)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules of all stages; parameters and buffers get their names from here, too."""
        memo = set() if memo is None else memo
        for stage in self.stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)


def fuse_blocks(decoder: Decoder, gradients: torch.dtype = torch.float32) -> None:
    """From now on our own kernels compute a whole decoder's blocks, its last norm and its loss.

    Args:
        decoder: With RMS norms, rotations, SwiGLU and no biases, whose products read copies.
        gradients: Precision in which those of the blocks' matrices are kept.
    """
    decoder.fused = [TritonBlock(block, gradients) for block in decoder.list_blocks()]
    decoder.head.fused = True


def compile_blocks(decoder: Decoder, backend: str = "inductor") -> None:
    """Compile each block on its own, as they share one graph; the last norm and the loss, too.

    Args:
        decoder: Or a stage of one.
        backend: Of torch's compiler; one that makes no code leaves the loss as it is.
    """
    # It would cut graphs at DDP's buckets, which here lie outside them, and asserts how large those are.
    torch._dynamo.config.optimize_ddp = False
    for block in decoder.list_blocks():
        if isinstance(block.ffn, MixtureOfExperts):  # how many rows an expert gets is known when it runs
            block.ffn.forward = torch.compiler.disable(block.ffn.forward)  # type: ignore[method-assign]
        block.compile(dynamic=False, backend=backend)
    if decoder.last:
        decoder.norm.compile(dynamic=False, backend=backend)
        decoder.head.fused = backend == "inductor"
