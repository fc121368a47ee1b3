"""Tensor and sequence parallelism: ranks of ``tp`` share each matrix, and the tokens between the blocks.

The model is built with the matrices that a rank holds (``plan.tensor.narrow``), and the modules of the table
beside it (``run.models.decoder_sharding``) are given a style:

``enter``       its input is the same on all ranks. Plain: it is already, and the parts of its gradient are
                summed in the backward pass. Sequence parallel: ranks send their tokens and get all of them.
``column``      a product with the rank's rows of the weight. Below ``enter`` the input is ready; elsewhere
                the product enters by itself, which is as right, and one collective more.
``keys``        the same for keys and values: where there are fewer heads than ranks, several hold one head.
``row``         a product with the rank's columns, which is a part of a sum: it **leaves**, every rank sending
                its part and getting the sum (sequence parallel: the sum of its own tokens). A bias is added
                behind the sum.
``vocabulary``  rows of the words. The embedding looks up the rank's own words and leaves. The head gives the
                logits of the rank's own words, of which the loss needs two small sums over the ranks.
``positions``   whole; a rank looks up the positions of its own tokens.

Shape suffixes: B batch, T tokens of a sequence, D hidden, V the rank's words, N = B x T, C a chunk of N.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor, nn

from meshwright.data.dataset import IGNORE_INDEX
from meshwright.models.decoder import Block, Decoder, Head
from meshwright.models.decoder_sharding import style_of
from meshwright.models.linear import Linear
from meshwright.models.loss import linear_cross_entropy
from meshwright.models.moe import MixtureOfExperts
from meshwright.parallel.tensor_collectives import TensorParallel


class ColumnLinear(Linear):
    """A product with the rank's rows of the weight."""

    def __init__(self, linear: nn.Linear, tp: TensorParallel) -> None:
        nn.Module.__init__(self)
        _take_over(self, linear)
        self._tp = tp
        self.prepared = False
        """Whether a module around it has entered already."""

    def forward(self, x: Tensor) -> Tensor:
        """The rank's columns of the result."""
        return super().forward(x if self.prepared else self._tp.prepare_input(x))


class RowLinear(Linear):
    """A product with the rank's columns of the weight; the bias comes behind the sum."""

    adds_bias = False

    def __init__(self, linear: nn.Linear, tp: TensorParallel) -> None:
        nn.Module.__init__(self)
        _take_over(self, linear)
        self._tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """The whole result."""
        summed = self._tp.reduce_output(self.matmul(x, bias=None))
        return summed if self.bias is None else summed + self.bias.to(summed.dtype)


class VocabularyEmbedding(nn.Embedding):
    """Looks up the words whose rows the rank holds; the others are zero, and other ranks have them."""

    def __init__(self, embedding: nn.Embedding, tp: TensorParallel) -> None:
        nn.Module.__init__(self)
        _take_over(self, embedding)
        self._tp = tp

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """The residual stream of the first block."""
        self._tp.batch = (tokens_BT.shape[0], tokens_BT.shape[1])
        own_BT = tokens_BT - self._tp.rank * self.num_embeddings
        elsewhere_BT = (own_BT < 0) | (own_BT >= self.num_embeddings)
        found_BTD = F.embedding(own_BT.masked_fill_(elsewhere_BT, 0), self.weight)
        return self._tp.reduce_output(found_BTD.masked_fill(elsewhere_BT.unsqueeze(-1), 0.0))


class VocabularyHead(Head):
    """The logits of the rank's own words, and a loss of all."""

    def __init__(self, head: nn.Linear, tp: TensorParallel) -> None:
        nn.Module.__init__(self)
        _take_over(self, head)
        self._tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """All logits (B, T, V), on every rank."""
        own_BTV = F.linear(self._tp.prepare_input(x), self.get_weight())
        return self._tp.all_gather_columns(own_BTV)[..., : self._tp.words]

    def loss(self, x: Tensor, targets_BT: Tensor, chunk: int) -> Tensor:
        """Summed over the targets; every rank has it."""
        x_ND = self._tp.prepare_input(x).flatten(0, 1)
        targets_N = targets_BT.flatten()
        return linear_cross_entropy(
            x_ND, self.get_weight(), targets_N, chunk, self._softmax, weight_copy_VD=self.weight_copy
        )

    def _softmax(self, logits_CV: Tensor, targets_C: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
        """The summed loss of a chunk, and its gradient by the rank's logits, which it overwrites.

        Ranks agree on the largest logit, then on the sum of exponentials and the target's logit.
        """
        first = self._tp.rank * self.out_features
        logits_CV[:, max(0, self._tp.words - first) :] = float("-inf")  # rows that are no word
        own_C = targets_C - first
        mine_C = (own_C >= 0) & (own_C < self.out_features)
        own_C = own_C.clamp_(0, self.out_features - 1)
        logits_CV -= self._tp.all_reduce_max(logits_CV.amax(-1)).unsqueeze(1)
        of_target_C = logits_CV.gather(1, own_C.unsqueeze(1)).squeeze(1).masked_fill_(~mine_C, 0.0)
        sum_C, of_target_C = self._tp.all_reduce(torch.stack((logits_CV.exp_().sum(-1), of_target_C)))
        counted_C = targets_C != IGNORE_INDEX
        loss = (sum_C.log() - of_target_C).masked_fill_(~counted_C, 0.0).sum()
        if not wanted:
            return loss, None
        grad_CV = logits_CV.div_(sum_C.unsqueeze(1))
        rows_C = torch.arange(len(own_C), device=own_C.device)
        grad_CV[rows_C, own_C] -= mine_C.to(grad_CV.dtype)
        return loss, grad_CV.mul_(counted_C.unsqueeze(1))


@torch.no_grad()
def gather_full_activation(tp: TensorParallel, module: str, what: str, tensor: Tensor) -> Tensor:
    """What a module would have read or put out in one process; all ranks ask for the same at the same time.

    Args:
        tp: The rank's place.
        module: Its name.
        what: ``input`` or ``output``.
        tensor: What it really put out, or was called with, before its style made something of it.
    """
    style, output = style_of(module), what == "output"
    if (style in ("column", "keys") and output) or (style == "row" and not output):
        return tp.all_gather_columns(tensor, tp.copies if style == "keys" else 1)
    floating = tensor.is_floating_point() and tensor.ndim == 2  # tokens and their loss are no streams
    return tp.all_gather_tokens(tensor) if floating else tensor


def _take_over(module: nn.Module, old: nn.Module) -> None:
    """Parameters and sizes of the module that is replaced."""
    state = {
        key: value for key, value in old.__dict__.items() if not key.startswith("_") or key == "_parameters"
    }
    module.__dict__.update(state)
    module.training = old.training


def apply_tensor_parallel(network: Decoder, tp: TensorParallel) -> None:
    """Give the modules of the table their styles, in place; the parameters may lie nowhere yet."""
    _keep_sums(network)
    for name, module in list(network.named_modules()):
        style = style_of(name)
        owner_name, _, leaf = name.rpartition(".")
        owner = network.get_submodule(owner_name)
        if isinstance(module, MixtureOfExperts):  # routes what a rank has, and shares the rest out itself
            continue
        if style == "enter":
            module.register_forward_pre_hook(
                lambda _, inputs: (tp.prepare_input(inputs[0]), *inputs[1:]), prepend=True
            )
        elif style == "positions":
            module.register_forward_pre_hook(lambda _, inputs: (tp.local_tokens(inputs[0]),))
        elif isinstance(module, nn.Embedding) and style == "vocabulary":
            setattr(owner, leaf, VocabularyEmbedding(module, tp))
        elif isinstance(module, nn.Linear):
            if style == "vocabulary":
                setattr(owner, leaf, VocabularyHead(module, tp))
            elif style == "row":
                setattr(owner, leaf, RowLinear(module, tp))
            elif style in ("column", "keys"):
                column = ColumnLinear(module, tp)
                column.prepared = style_of(owner_name) == "enter"
                setattr(owner, leaf, column)


def _keep_sums(network: Decoder) -> None:
    """Recomputation keeps the sum that a product becomes; not a block's last one, which nobody reads."""
    for number, block in network.blocks.items():
        assert isinstance(block, Block), "a decoder's blocks"
        products = list(block.list_gemm_modules())
        rows = [style_of(f"blocks.{number}.{name}") == "row" for name, _ in products]
        last = len(products) - 1 if isinstance(products[-1][1], Linear) else None
        block.saved_gemms = [not row for row in rows]
        block.saved_reductions = [index != last for index, row in enumerate(rows) if row]
