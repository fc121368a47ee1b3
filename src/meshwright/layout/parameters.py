"""Every parameter of a model by name and shape, in the order in which the model registers them.

The same table as ``run.models`` builds, written down without torch: what a run is audited against must not
come from the run. Latent attention, not built in ``run.models`` yet, is listed for plans.
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
LOW_BYTES = dict.fromkeys(LOW_PRECISIONS, 2)
"""Bytes of an operand of matrix products in 16 bits; 4 in float32. What is cast to fp8 is kept in 16 bits."""
FP8_ALIGNED = 16
"""Both dims of a matrix that 8-bit products take are multiples of this."""
BLOCK_PREFIX = "blocks."
"""Names of the parameters of hidden layers begin with this."""
EXPERTS_PREFIX = "ffn.experts"
"""Names of the parameters of routed experts have this in them."""


def operand_bytes(precision: str) -> int:
    """Bytes of an element that matrix products read."""
    return LOW_BYTES.get(precision, FLOAT32_BYTES)


def residual_bytes(train: Train) -> int:
    """Bytes of an element of the residual stream."""
    return LOW_BYTES.get(train.residual_dtype, FLOAT32_BYTES)


def runs_in_fp8(job: Job, outputs: int, inputs: int) -> bool:
    """Whether a matrix's products are computed in 8 bits; that of its gradient where the job says so."""
    return job.train.precision == "fp8" and outputs % FP8_ALIGNED == 0 and inputs % FP8_ALIGNED == 0


@dataclass(frozen=True)
class Parameter:
    """One trained tensor, or in a list by kind all alike ones."""

    name: str
    shape: tuple[int, ...]
    gradient_bytes: int = FLOAT32_BYTES
    """Of an element of its gradient."""
    repeats: int = 1
    """Tensors that the entry stands for: in a list by kind, one in each of the alike blocks."""

    @functools.cached_property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape) * self.repeats


def count_gradient_bytes(parameters: Iterable[Parameter]) -> int:
    """Of all gradients."""
    return sum(p.count * p.gradient_bytes for p in parameters)


def matrix_gradient_bytes(job: Job) -> int:
    """Of an element of the gradient of a block's matrix, as it is kept."""
    return LOW_BYTES[job.train.grad_dtype] if keeps_bf16_grads(job) else FLOAT32_BYTES


def with_gradients(job: Job, parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """A job's parameters with gradients as they are kept: those of blocks' matrices may be of 16 bits."""
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
    """The parameters behind the last block; a tied head is the embedding and is not listed again."""
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
    """Elements of the running means and variances of batch norms, which are state but not trained."""
    if not isinstance(model, ResNetModel) or model.norm != "batch":
        return 0
    return sum(2 * conv.out_channels for conv in list_convs(model).convs)


def is_routed(model: DecoderModel, layer: int) -> bool:
    """Whether a block routes its tokens to experts."""
    return model.num_experts is not None and layer >= model.dense_layers


@functools.lru_cache(maxsize=4096)
def list_block(model: DecoderModel, layer: int, repeats: int = 1) -> tuple[Parameter, ...]:
    """The parameters of one block, or of so many alike ones by the first one's names."""
    kind = _list_block_kind(model, is_routed(model, layer))
    return tuple(Parameter(f"{BLOCK_PREFIX}{layer}.{p.name}", p.shape, repeats=repeats) for p in kind)


def name_in_block(name: str) -> str:
    """A parameter's name without the number of its block."""
    return name.split(".", 2)[2] if name.startswith(BLOCK_PREFIX) else name


@functools.lru_cache(maxsize=256)
def _list_block_kind(model: DecoderModel, routed: bool) -> tuple[Parameter, ...]:
    """The parameters of a dense block, or of one with experts, by their names inside it."""
    return (
        *_list_norm(model, "attention_norm"),
        *(_list_latent_attention(model) if model.attention == "latent" else _list_attention(model)),
        *_list_norm(model, "ffn_norm"),
        *(_list_experts(model) if routed else _list_ffn(model, "ffn", model.ffn_size)),
    )


def _list_attention(model: DecoderModel) -> list[Parameter]:
    """Queries, keys, values and the way back."""
    width, queries, keys = model.hidden_size, model.query_size, model.kv_size
    parts = (("wq", queries, width), ("wk", keys, width), ("wv", keys, width), ("wo", width, queries))
    return [p for part in parts for p in _list_linear("attention", *part, bias=model.attention_bias)]


def _list_latent_attention(model: DecoderModel) -> list[Parameter]:
    """DeepSeek-V2's (Liu et al. 2024, section 2.1): down to the latent vectors, their norms, up to the heads.

    The rotated part of the keys, one for all heads, comes beside the latent vector and is not normalised.
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
    """A feed-forward, or so many of them, one below the other in each matrix."""
    width = model.hidden_size
    parts = [("up", experts * ffn, width), ("down", experts * width, ffn)]
    if model.activation == "swiglu":
        parts.insert(0, ("gate", experts * ffn, width))
    return [p for part in parts for p in _list_linear(owner, *part, bias=model.ffn_bias)]


def _list_experts(model: DecoderModel) -> list[Parameter]:
    """The router, the routed experts one below the other in each matrix, the shared ones as one block."""
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
    """Trained elements."""
    return sum(p.count for p in list_parameters(model))


def count_matmul_parameters(model: DecoderModel) -> int:
    """Elements that multiply activations: all but the input embeddings, the head included."""
    embedding = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    if model.positions == "learned":
        embedding += (model.max_positions or 0) * model.hidden_size
    return count_parameters(model) - embedding


@functools.lru_cache(maxsize=64)
def count_active_parameters(model: Model) -> int:
    """Elements that one token meets: of the routed experts only those that it is sent to."""
    if not isinstance(model, DecoderModel) or not model.num_experts:
        return count_parameters(model)
    routed = sum(p.count for p in list_parameters(model) if EXPERTS_PREFIX in p.name)
    per_token = min(model.experts_per_token or model.num_experts, model.num_experts)
    return count_parameters(model) - routed + routed // model.num_experts * per_token


def count_active_matmul_parameters(model: DecoderModel) -> int:
    """Elements that multiply one token's activations: as above, without the input embeddings.

    The base of a token's FLOPs. Equal to :func:`count_matmul_parameters` for a dense model.
    """
    return count_matmul_parameters(model) - count_parameters(model) + count_active_parameters(model)


WIRE_BYTES = {"none": 4, "bf16": 2, "fp16": 2}
"""Bytes of a gradient element on the wire, by compression."""
