"""Tensor parallel and sequence parallel: ``tp`` ranks shard the weights, and the tokens between blocks.

The model is built with the shapes of a shard (``layout.tensor_parallel.shard_decoder``). The table beside it
(``models.decoder_sharding``) gives modules a style:

``prepare_input``  The input becomes the full (B, T, D) on every rank (``TensorParallel.prepare_input``).
``colwise``        A linear with this rank's rows of the weight: it computes this rank's output columns. Below
                   a ``prepare_input`` module the input is ready. Elsewhere the linear prepares it itself, at
                   the cost of one more collective.
``colwise_kv``     The same for keys and values. With fewer heads than ranks, several ranks hold one head.
``rowwise``        A linear with this rank's columns of the weight: it computes a partial sum. Every rank
                   sends its partial sum and gets the sum (sequence parallel: of its tokens). The bias is
                   added after the sum.
``vocab``          Rows of the vocabulary. The embedding looks up this rank's tokens and reduces the output.
                   The head computes the logits of this rank's vocabulary (loss parallel); the loss needs
                   two small all-reduces.
``positions``      Replicated. A rank looks up the positions of its tokens.

Shape suffixes: B batch, T tokens of a sequence, D hidden, V this rank's vocabulary, N = B x T, C chunk of N.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812  (the usual alias)
from torch import Tensor, nn

from meshwright.data.dataset import IGNORE_INDEX
from meshwright.models.decoder import Block, Decoder, Head
from meshwright.models.decoder_sharding import style_of
from meshwright.models.linear import Linear
from meshwright.models.loss import linear_cross_entropy
from meshwright.models.moe import MixtureOfExperts
from meshwright.parallel.tensor_collectives import TensorParallel


class ColumnParallelLinear(Linear):
    """A linear with this rank's rows of the weight."""

    def __init__(self, linear: nn.Linear, tp: TensorParallel, input_prepared: bool) -> None:
        """Take the parameters of the linear that it replaces.

        Args:
            linear: With the shapes of a shard.
            tp: The group.
            input_prepared: Whether a module around it prepares the input.
        """
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._tp, self._input_prepared = tp, input_prepared

    def forward(self, x: Tensor) -> Tensor:
        """This rank's columns of the output."""
        return super().forward(x if self._input_prepared else self._tp.prepare_input(x))


class RowParallelLinear(Linear):
    """A linear with this rank's columns of the weight. The bias is added after the sum over the ranks."""

    adds_bias = False

    def __init__(self, linear: nn.Linear, tp: TensorParallel) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """The full output."""
        summed = self._tp.reduce_output(self.matmul(x, bias=None))
        return summed if self.bias is None else summed + self.bias.to(summed.dtype)


class VocabParallelEmbedding(nn.Embedding):
    """Looks up the tokens of this rank's vocabulary. The others are zero here and come from other ranks."""

    def __init__(self, embedding: nn.Embedding, tp: TensorParallel) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, _weight=embedding.weight)
        self.weight = embedding.weight
        self._tp = tp

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """The residual stream before the first block."""
        self._tp.batch = (tokens_BT.shape[0], tokens_BT.shape[1])
        local_BT = tokens_BT - self._tp.rank * self.num_embeddings
        elsewhere_BT = (local_BT < 0) | (local_BT >= self.num_embeddings)
        found_BTD = F.embedding(local_BT.masked_fill_(elsewhere_BT, 0), self.weight)
        return self._tp.reduce_output(found_BTD.masked_fill(elsewhere_BT.unsqueeze(-1), 0.0))


class VocabParallelHead(Head):
    """The logits of this rank's vocabulary, and the loss over the whole vocabulary."""

    def __init__(self, head: nn.Linear, tp: TensorParallel) -> None:
        super().__init__(head.in_features, head.out_features, bias=False, device="meta")
        self.register_parameter(
            "weight", cast("nn.Parameter | None", head.weight)
        )  # None where it is another stage's embedding
        self._tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """All logits (B, T, V), on every rank."""
        local_BTV = F.linear(self._tp.prepare_input(x), self.get_weight())
        return self._tp.all_gather_columns(local_BTV)[..., : self._tp.vocab_size]

    def loss(self, x: Tensor, targets_BT: Tensor, chunk: int) -> Tensor:
        """The loss summed over the targets, on every rank."""
        x_ND = self._tp.prepare_input(x).flatten(0, 1)
        targets_N = targets_BT.flatten()
        return linear_cross_entropy(
            x_ND, self.get_weight(), targets_N, chunk, self._softmax, weight_copy_VD=self.weight_copy
        )

    def _softmax(
        self, logits_CV: Tensor, targets_C: Tensor, needs_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The summed loss of a chunk and its gradient by this rank's logits, which it overwrites.

        Two all-reduces: the largest logit; then the sum of exponentials together with the target's logit.
        """
        first = self._tp.rank * self.out_features
        logits_CV[:, max(0, self._tp.vocab_size - first) :] = float("-inf")  # padding of the vocabulary
        local_C = targets_C - first
        is_local_C = (local_C >= 0) & (local_C < self.out_features)
        local_C = local_C.clamp_(0, self.out_features - 1)
        logits_CV -= self._tp.all_reduce_max(logits_CV.amax(-1)).unsqueeze(1)
        of_target_C = logits_CV.gather(1, local_C.unsqueeze(1)).squeeze(1).masked_fill_(~is_local_C, 0.0)
        sum_C, of_target_C = self._tp.all_reduce(torch.stack((logits_CV.exp_().sum(-1), of_target_C)))
        counted_C = targets_C != IGNORE_INDEX
        loss = (sum_C.log() - of_target_C).masked_fill_(~counted_C, 0.0).sum()
        if not needs_grad:
            return loss, None
        grad_CV = logits_CV.div_(sum_C.unsqueeze(1))
        rows_C = torch.arange(len(local_C), device=local_C.device)
        grad_CV[rows_C, local_C] -= is_local_C.to(grad_CV.dtype)
        return loss, grad_CV.mul_(counted_C.unsqueeze(1))


def apply_tensor_parallel(decoder: Decoder, tp: TensorParallel | None) -> None:
    """Replace the modules of the sharding table by tensor-parallel ones. Parameters may be on meta."""
    if tp is None:
        return
    _set_saved_activations(decoder)
    for name, module in list(decoder.named_modules()):
        if isinstance(module, MixtureOfExperts):  # routes local tokens; see ``parallel.expert``
            continue
        style = style_of(name)
        if style == "prepare_input":
            module.register_forward_pre_hook(
                lambda _, inputs: (tp.prepare_input(inputs[0]), *inputs[1:]), prepend=True
            )
        elif style == "positions":
            module.register_forward_pre_hook(lambda _, inputs: (tp.local_tokens(inputs[0]),))
        elif style is not None:
            parent, _, leaf = name.rpartition(".")
            prepared = style_of(parent) == "prepare_input"
            setattr(decoder.get_submodule(parent), leaf, _parallelize_module(module, style, tp, prepared))


def _parallelize_module(module: nn.Module, style: str, tp: TensorParallel, prepared: bool) -> nn.Module:
    """The tensor-parallel module that replaces another one, with its parameters."""
    if isinstance(module, nn.Embedding):
        return VocabParallelEmbedding(module, tp)
    assert isinstance(module, nn.Linear), f"{type(module).__name__} has no style {style}"
    if style == "vocab":
        return VocabParallelHead(module, tp)
    return RowParallelLinear(module, tp) if style == "rowwise" else ColumnParallelLinear(module, tp, prepared)


def _set_saved_activations(decoder: Decoder) -> None:
    """Selective activation checkpointing saves the reduced output of a row-parallel linear.

    It does not save a partial sum, nor the block's last output, which no backward pass reads.
    """
    for number, block in decoder.blocks.items():
        assert isinstance(block, Block), "a decoder's blocks"
        gemms = list(block.list_gemm_modules())
        rowwise = [style_of(f"blocks.{number}.{name}") == "rowwise" for name, _ in gemms]
        last = len(gemms) - 1 if isinstance(gemms[-1][1], Linear) else None
        block.checkpointing.saved_gemms = [not row for row in rowwise]
        block.checkpointing.saved_reductions = [index != last for index, row in enumerate(rowwise) if row]


@torch.no_grad()
def gather_full_activation(tp: TensorParallel, module: str, what: str, tensor: Tensor) -> Tensor:
    """The input or output that a module has in one process. All ranks call it for the same module together.

    Args:
        tp: The group.
        module: Its name.
        what: ``input`` or ``output``.
        tensor: The local output, or the local input before ``prepare_input``.
    """
    style, is_output = style_of(module), what == "output"
    if (style in ("colwise", "colwise_kv") and is_output) or (style == "rowwise" and not is_output):
        return tp.all_gather_columns(tensor, tp.kv_replicas if style == "colwise_kv" else 1)
    is_residual = tensor.is_floating_point() and tensor.ndim == 2  # neither tokens nor a loss
    return tp.all_gather_tokens(tensor) if is_residual else tensor
