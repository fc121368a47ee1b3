"""The parameters of a model by name and shape, in registration order.

``models`` builds the same parameters. They are listed here without torch, because a run is audited against
figures that do not come from the run. Latent attention is listed for plans; ``models`` does not have it yet.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.layout.resnet_shapes import list_convs
from meshwright.spec.execution import LOW_PRECISIONS, keeps_bf16_grads
from meshwright.spec.job import Job, Train
from meshwright.spec.model import DecoderModel, Model, ResNetModel

FLOAT32_BYTES = 4
INT64_BYTES = 8
LOW_BYTES = dict.fromkeys(LOW_PRECISIONS, 2)
"""Bytes per element of a low-precision GEMM operand. Tensors that are cast to fp8 are stored in 16 bits."""
FP8_ALIGNED = 16
"""fp8 GEMMs need both dims of a weight to be multiples of this."""
BLOCK_PREFIX = "blocks."
"""Prefix of the parameter names of transformer blocks."""
EXPERTS_PREFIX = "ffn.experts"
"""Part of the parameter names of routed experts."""


def operand_bytes(precision: str) -> int:
    """Bytes per element of a GEMM operand."""
    return LOW_BYTES.get(precision, FLOAT32_BYTES)


def residual_bytes(train: Train) -> int:
    """Bytes per element of the residual stream."""
    return LOW_BYTES.get(train.residual_dtype, FLOAT32_BYTES)


def runs_in_fp8(job: Job, outputs: int, inputs: int) -> bool:
    """Whether the GEMMs of a linear run in fp8; its weight-gradient GEMM only with fp8_weight_grads."""
    return job.train.precision == "fp8" and outputs % FP8_ALIGNED == 0 and inputs % FP8_ALIGNED == 0


@dataclass(frozen=True)
class Parameter:
    """A parameter, or in a list by kind all identical ones."""

    name: str
    shape: tuple[int, ...]
    gradient_bytes: int = FLOAT32_BYTES
    """Bytes per element of its gradient."""
    repeats: int = 1
    """Number of tensors of the entry: in a list by kind, one per identical block."""

    @functools.cached_property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape) * self.repeats


def count_gradient_bytes(parameters: Iterable[Parameter]) -> int:
    """Bytes of all gradients."""
    return sum(p.count * p.gradient_bytes for p in parameters)


def matrix_gradient_bytes(job: Job) -> int:
    """Bytes per element of the gradient of a block's linear."""
    return LOW_BYTES[job.train.grad_dtype] if keeps_bf16_grads(job) else FLOAT32_BYTES


def with_gradients(job: Job, parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """The parameters with the gradient dtype of the job; bf16 for linears of blocks under grad_dtype."""
    each = matrix_gradient_bytes(job)
    if each == FLOAT32_BYTES:
        return parameters
    return tuple(
        dataclasses.replace(p, gradient_bytes=each)
        if len(p.shape) == 2 and p.name.startswith(BLOCK_PREFIX)
        else p
        for p in parameters
    )


@functools.lru_cache(maxsize=64)
def list_parameters(model: Model) -> tuple[Parameter, ...]:
    """All parameters, in registration order; a tied head is the embedding and is not listed again."""
    if isinstance(model, ResNetModel):
        return tuple(_list_resnet(model))
    blocks = [p for layer in range(model.num_layers) for p in list_block(model, layer)]
    return (*list_embeddings(model), *blocks, *list_head(model))


def list_embeddings(model: DecoderModel) -> list[Parameter]:
    """The parameters before the first block."""
    width = model.hidden_size
    parameters = [Parameter("embed.weight", (model.vocab_size, width))]
    if model.positions == "learned":
        parameters.append(Parameter("positions.weight", (model.max_positions or 0, width)))
    return parameters


def list_head(model: DecoderModel) -> list[Parameter]:
    """The parameters after the last block; a tied head is the embedding and is not listed again."""
    tied = model.tied_embeddings
    head = [] if tied else [Parameter("head.weight", (model.vocab_size, model.hidden_size))]
    return [*_list_norm(model, "norm"), *head]


def _list_resnet(model: ResNetModel) -> list[Parameter]:
    """Each convolution with its norm, then the classifier."""
    shape = list_convs(model)
    parameters: list[Parameter] = []
    for conv in shape.convs:
        parameters.append(
            Parameter(
                f"{conv.name}.conv.weight", (conv.out_channels, conv.in_channels, conv.kernel, conv.kernel)
            )
        )
        parameters += [
            Parameter(f"{conv.name}.norm.{part}", (conv.out_channels,)) for part in ("weight", "bias")
        ]
    head = Parameter("head.weight", (model.num_classes, shape.features))
    return [*parameters, head, Parameter("head.bias", (model.num_classes,))]


def count_statistics(model: Model) -> int:
    """Elements of the running means and variances of batch norms (buffers)."""
    if not isinstance(model, ResNetModel) or model.norm != "batch":
        return 0
    return sum(2 * conv.out_channels for conv in list_convs(model).convs)


def is_routed(model: DecoderModel, layer: int) -> bool:
    """Whether a block has experts."""
    return model.num_experts is not None and layer >= model.dense_layers


@functools.lru_cache(maxsize=4096)
def list_block(model: DecoderModel, layer: int, repeats: int = 1) -> tuple[Parameter, ...]:
    """The parameters of one block, or of ``repeats`` identical ones with the names of the first."""
    kind = _list_block_kind(model, is_routed(model, layer))
    return tuple(Parameter(f"{BLOCK_PREFIX}{layer}.{p.name}", p.shape, repeats=repeats) for p in kind)


def name_in_block(name: str) -> str:
    """A parameter's name without the index of its block."""
    return name.split(".", 2)[2] if name.startswith(BLOCK_PREFIX) else name


@functools.lru_cache(maxsize=256)
def _list_block_kind(model: DecoderModel, routed: bool) -> tuple[Parameter, ...]:
    """The parameters of a dense block or of one with experts, with their names inside the block."""
    return (
        *_list_norm(model, "attention_norm"),
        *(_list_latent_attention(model) if model.attention == "latent" else _list_attention(model)),
        *_list_norm(model, "ffn_norm"),
        *(_list_experts(model) if routed else _list_ffn(model, "ffn", model.ffn_size)),
    )


def _list_attention(model: DecoderModel) -> list[Parameter]:
    """The q, k, v and output projections."""
    width, queries, keys = model.hidden_size, model.query_size, model.kv_size
    parts = (("wq", queries, width), ("wk", keys, width), ("wv", keys, width), ("wo", width, queries))
    return [p for part in parts for p in _list_linear("attention", *part, bias=model.attention_bias)]


def _list_latent_attention(model: DecoderModel) -> list[Parameter]:
    """MLA (DeepSeek-V2, Liu et al. 2024, section 2.1): down projections, norms, up projections.

    The RoPE part of the keys, shared by all heads, comes from the same down projection and is not normalised.
    """
    width, heads = model.hidden_size, model.num_heads
    latent, rotated, bias = model.latent_size or 0, model.rope_head_dim or 0, model.attention_bias
    queries = heads * (model.head_size + rotated)
    if model.query_latent_size is None:
        parts = _list_linear("attention", "wq", queries, width, bias=False)
    else:
        parts = [
            *_list_linear("attention", "q_down", model.query_latent_size, width, bias=bias),
            Parameter("attention.q_norm.weight", (model.query_latent_size,)),
            *_list_linear("attention", "q_up", queries, model.query_latent_size, bias=False),
        ]
    values = model.value_size
    return [
        *parts,
        *_list_linear("attention", "kv_down", latent + rotated, width, bias=bias),
        Parameter("attention.kv_norm.weight", (latent,)),
        *_list_linear("attention", "kv_up", heads * model.head_size + values, latent, bias=False),
        *_list_linear("attention", "wo", width, values, bias=bias),
    ]


def _list_ffn(model: DecoderModel, owner: str, ffn: int, experts: int = 1) -> list[Parameter]:
    """A feed-forward, or several with concatenated weights."""
    width = model.hidden_size
    parts = [("up", experts * ffn, width), ("down", experts * width, ffn)]
    if model.activation == "swiglu":
        parts.insert(0, ("gate", experts * ffn, width))
    return [p for part in parts for p in _list_linear(owner, *part, bias=model.ffn_bias)]


def _list_experts(model: DecoderModel) -> list[Parameter]:
    """Router, routed experts with concatenated weights, and shared experts as one feed-forward."""
    return [
        Parameter("ffn.router.weight", (model.num_experts or 0, model.hidden_size)),
        *_list_ffn(model, EXPERTS_PREFIX, model.local_expert_width, model.local_experts),
        *(_list_ffn(model, "ffn.shared", model.shared_width) if model.shared_width else ()),
    ]


def _list_norm(model: DecoderModel, name: str) -> list[Parameter]:
    parts = ("weight",) if model.norm == "rms" else ("weight", "bias")
    return [Parameter(f"{name}.{part}", (model.hidden_size,)) for part in parts]


def _list_linear(owner: str, name: str, rows: int, columns: int, bias: bool) -> list[Parameter]:
    weight = Parameter(f"{owner}.{name}.weight", (rows, columns))
    return [weight, Parameter(f"{owner}.{name}.bias", (rows,))] if bias else [weight]


@functools.lru_cache(maxsize=64)
def count_parameters(model: Model) -> int:
    """Number of parameters."""
    return sum(p.count for p in list_parameters(model))


def count_matmul_parameters(model: DecoderModel) -> int:
    """Parameters of linears: all but the input embeddings; the head is included."""
    embedding = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    if model.positions == "learned":
        embedding += (model.max_positions or 0) * model.hidden_size
    return count_parameters(model) - embedding


@functools.lru_cache(maxsize=64)
def count_active_parameters(model: Model) -> int:
    """Active parameters per token: of the routed experts only the top-k."""
    if not isinstance(model, DecoderModel) or not model.num_experts:
        return count_parameters(model)
    routed = sum(p.count for p in list_parameters(model) if EXPERTS_PREFIX in p.name)
    per_token = min(model.experts_per_token or model.num_experts, model.num_experts)
    return count_parameters(model) - routed + routed // model.num_experts * per_token


def count_active_matmul_parameters(model: DecoderModel) -> int:
    """Active parameters of linears per token: as above, without the input embeddings.

    The base of the FLOPs per token. Equal to :func:`count_matmul_parameters` for a dense model.
    """
    return count_matmul_parameters(model) - count_parameters(model) + count_active_parameters(model)


WIRE_BYTES = {"none": 4, "bf16": 2, "fp16": 2}
"""Bytes per gradient element in communication, by compression."""


def selection_bias_shape(model: object) -> tuple[int, int] | None:
    """Layers with experts and experts: the shape of the selection biases; None for a model without experts.

    A run with ``train.balance_rate=0`` has biases, too, if its checkpoint has some: they stay fixed.
    """
    if not isinstance(model, DecoderModel) or not model.num_experts:
        return None
    return model.expert_layers, model.num_experts
