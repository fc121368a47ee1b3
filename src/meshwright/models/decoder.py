"""A pre-norm decoder: each block has grouped-query attention and a feed-forward or mixture of experts.

Llama-shaped by default; GPT-shaped with learned positions, LayerNorm, GELU and biases. Parameter names and
their registration order are the contract with ``layout.parameters``, which lists the same table without
torch; a test compares the two. ``block_backend`` replaces blocks, embedding and norm for
``train.block_backend``.

Shape suffixes: B batch, T tokens of a sequence, D hidden, H query heads, K key heads, E head size,
F feed-forward, V vocabulary, N = B x T.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812  (the usual alias)
from torch import Tensor, nn

from meshwright.layout.stages import StageSpec
from meshwright.models.activation_checkpointing import ActivationCheckpointing
from meshwright.models.attention import Context, document_positions
from meshwright.models.feed_forward import build_feed_forward
from meshwright.models.kernels.gemm import TORCH_GEMMS, Gemms
from meshwright.models.linear import Linear, MergedLinear
from meshwright.models.loss import linear_cross_entropy
from meshwright.models.moe import ExpertLinear, MixtureOfExperts
from meshwright.models.norms import build_norm, compute_dtype
from meshwright.models.rope import apply_rope, build_rope
from meshwright.models.routing import Router
from meshwright.spec.layout import Recompute
from meshwright.spec.model import DecoderModel

Residual = Tensor | tuple[Tensor, Tensor]
"""The residual stream between blocks: one tensor, or a pair whose sum it is (``triton_block``)."""


class Attention(nn.Module):
    """Causal grouped-query self-attention."""

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
        """The three projections as one GEMM, if bf16 weight copies are merged."""

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        """Causal attention; with a mask, within documents only.

        Args:
            x_BTD: This rank's tokens.
            rope: Cosine and sine of their positions.
            mask: From :meth:`Context.build_mask`.
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
        out_BHTE = self.context.attend(q_BHTE, k_BKTE, v_BKTE, mask)
        return self.wo(out_BHTE.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """A pre-norm transformer block: attention, then a feed-forward or a mixture of experts."""

    def __init__(self, model: DecoderModel, recompute: Recompute, layer: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(model)
        self.attention = Attention(model)
        self.ffn_norm = build_norm(model)
        self.is_moe = model.num_experts is not None and layer >= model.dense_layers
        self.ffn = MixtureOfExperts(model) if self.is_moe else build_feed_forward(model, model.ffn_size)
        gemms = list(self.list_gemm_modules())
        # No backward pass reads the output of the last GEMM, except of experts: routing weights multiply it.
        saved = [*[True] * (len(gemms) - 1), not isinstance(gemms[-1][1], Linear)]
        self.checkpointing = ActivationCheckpointing(recompute, saved)

    def list_gemm_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Its modules that are one GEMM each, by name, in the order of the forward pass."""
        kinds = (Linear, Router, ExpertLinear)
        return ((name, module) for name, module in self.named_modules() if isinstance(module, kinds))

    def forward(
        self,
        x_BTD: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        weights_B2: Tensor | None = None,
    ) -> Residual:
        """The residual stream after this block.

        Args:
            x_BTD: The residual stream.
            rope: Cosine and sine of the positions.
            mask: Added to attention scores.
            weights_B2: Each sequence's share of the batch and its tokens without padding; for experts.
        """
        if not isinstance(self.ffn, MixtureOfExperts):
            return self.checkpointing.run(self._compute, x_BTD, rope, mask, None)
        router = self.ffn.router
        router.is_counting = True  # in the forward pass, not in the recomputation
        out_BTD = self.checkpointing.run(self._compute, x_BTD, rope, mask, weights_B2)
        router.is_counting = False
        return out_BTD

    def _compute(
        self,
        x_BTD: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        weights_B2: Tensor | None,
    ) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope, mask)
        normed = self.ffn_norm(x_BTD)
        return x_BTD + (self.ffn(normed, weights_B2) if self.is_moe else self.ffn(normed))


class Head(nn.Linear):
    """The language-model head, from hidden states to logits and loss.

    Its weight may be the embedding of another stage (tied embeddings in a pipeline).
    """

    tied_embedding: tuple[nn.Embedding] | None = None
    """The embedding, in a tuple, so that it is no submodule of the head."""
    weight_copy: Tensor | None = None
    """The weight in the GEMM's dtype, if a copy persists."""
    uses_fused_loss = False
    """Whether the loss is compiled or a Triton kernel, on 16-bit logits."""
    expected_loss_grad = 1.0
    """Gradient of the loss that the backward pass is expected to start with."""
    gemms: Gemms = TORCH_GEMMS

    def get_weight(self) -> Tensor:
        """The weight, (V, D)."""
        return self.weight if self.tied_embedding is None else self.tied_embedding[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return F.linear(x, self.get_weight())

    def loss(self, x: Tensor, targets_BT: Tensor, chunk: int) -> Tensor:
        """The loss **summed** over the targets that are not ``IGNORE_INDEX``, ``chunk`` tokens at a time."""
        return linear_cross_entropy(
            x.flatten(0, 1),
            self.get_weight(),
            targets_BT.flatten(),
            chunk,
            weight_copy_VD=self.weight_copy,
            fused=self.uses_fused_loss,
            expected=self.expected_loss_grad,
            gemms=self.gemms,
        )


def _build_embedding(rows: int, width: int) -> nn.Embedding:
    """An uninitialised embedding: initialising one on the meta device would load torch's compiler."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class Decoder(nn.Module):
    """Token ids in; logits, or the summed loss if targets are given, out.

    It may be one stage of a pipeline: a range of the blocks under their names in the whole model, with the
    embedding in the first stage and the head in the last. A stage that is not the first reads the residual
    stream; one that is not the last returns it.
    """

    embed: nn.Embedding
    norm: nn.Module
    head: Head
    residual_dtype: torch.dtype = torch.float32

    def __init__(
        self,
        model: DecoderModel,
        seq_len: int,
        loss_chunk: int = 1024,
        recompute: Recompute = "none",
        stage: StageSpec | None = None,
        context: Context | None = None,
    ) -> None:
        """Build it with uninitialised weights.

        Args:
            model: Its shape.
            seq_len: Longest sequence; a stage without embedding reads exactly this many tokens.
            loss_chunk: Tokens whose logits are in memory at once in training.
            recompute: Activation checkpointing of each block.
            stage: The pipeline stage; the whole model if left out.
            context: Positions of this rank's tokens in their sequences; all of them if left out.
        """
        super().__init__()
        self.context = context or Context()
        stage = stage or StageSpec(model, 0, range(model.num_layers), first=True, last=True)
        self.seq_len, self.loss_chunk = seq_len, loss_chunk
        self.first, self.last = stage.first, stage.last
        if stage.first or stage.copies_embedding:
            self.embed = _build_embedding(model.vocab_size, model.hidden_size)
        self.positions: nn.Embedding | None = None
        if model.positions == "learned" and stage.first:
            assert model.max_positions is not None, "the legality table requires max_positions"
            self.positions = _build_embedding(model.max_positions, model.hidden_size)
        self.blocks = nn.ModuleDict({str(layer): Block(model, recompute, layer) for layer in stage.layers})
        for block in self.list_blocks():
            block.attention.context = self.context
        if stage.last:
            self.norm = build_norm(model)
            self.head = Head(model.hidden_size, model.vocab_size, bias=False)
            if stage.shares_embedding:
                self.head.register_parameter("weight", None)
            elif model.tied_embeddings:
                self.head.weight = self.embed.weight
        self.uses_rope = model.positions == "rope"
        self.rope_cos: Tensor
        self.rope_sin: Tensor
        if self.uses_rope:
            device = torch.get_default_device()
            if device.type == "meta":  # see _build_embedding
                cos_TE, sin_TE = torch.empty(2, seq_len, model.head_size)
            else:
                cos_TE, sin_TE = build_rope(model, self.context.local_positions(seq_len, device))
            self.register_buffer("rope_cos", cos_TE, persistent=False)
            self.register_buffer("rope_sin", sin_TE, persistent=False)

    def list_blocks(self) -> Iterator[Block]:
        """Its blocks, first to last."""
        return (cast(Block, block) for block in self.blocks.values())

    def find_block(self, module: str) -> Block:
        """The block that contains a module, by the module's name."""
        return cast(Block, self.blocks[module.split(".")[1]])

    def forward(
        self,
        x: Tensor,
        targets_BT: Tensor | None = None,
        segments_BT: Tensor | None = None,
        weights_B2: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, V), or the loss **summed** over the targets that are not ``IGNORE_INDEX``.

        The caller divides by the number of targets in the global batch: a mean here would weight ranks and
        micro-batches instead of tokens. With segments, attention does not cross documents.

        Args:
            x: Tokens (B, T); of a stage that is not the first, the residual stream.
            targets_BT: Token ids to predict; read by the last stage.
            segments_BT: The document index of each token of whole sequences.
            weights_B2: Each sequence's share of the batch and its tokens without padding; for experts.
        """
        x = self.run_blocks(x, segments_BT, weights_B2)
        if not self.last:
            return x
        x = self.norm(x)
        return self.head(x) if targets_BT is None else self.head.loss(x, targets_BT, self.loss_chunk)

    def run_blocks(
        self, x: Tensor, segments_BT: Tensor | None = None, weights_B2: Tensor | None = None
    ) -> Tensor:
        """The residual stream after the last block; arguments as in :meth:`forward`."""
        length = x.shape[1] if self.first else self.seq_len
        assert length <= self.seq_len, f"{length} tokens, but positions are built for {self.seq_len}"
        if self.first:
            x = self._embed(x, segments_BT).to(self.residual_dtype)
        rope = (self.rope_cos[:length], self.rope_sin[:length]) if self.uses_rope else None
        mask = None if segments_BT is None else self.context.build_mask(segments_BT, compute_dtype(x))
        for block in self.blocks.values():
            x = block(x, rope, mask, weights_B2)
        return x

    def set_expected_loss_grad(self, expected: float) -> None:
        """Set the expected gradient of the loss: the loss scales its gradients with it in the forward pass.

        If the backward pass starts with another gradient, the result is still right, at the cost of one more
        pass over the head's gradient.
        """
        if self.last and self.head.expected_loss_grad != expected:  # setting a module attribute is slow
            self.head.expected_loss_grad = expected

    def _embed(self, tokens_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        if self.positions is None:
            return x_BTD
        if segments_BT is None:
            index = self.context.local_positions(tokens_BT.shape[1], tokens_BT.device)
        else:
            index = self.context.local_columns(document_positions(segments_BT))
        return x_BTD + self.positions(index)


class Stages(nn.Module):
    """The pipeline stages of one rank; parameters have their names in the whole model."""

    def __init__(self, stages: Iterable[Decoder]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def __iter__(self) -> Iterator[Decoder]:
        return (cast(Decoder, stage) for stage in self.stages)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules of all stages; names of parameters and buffers derive from it too."""
        memo = set() if memo is None else memo
        for stage in self.stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)
