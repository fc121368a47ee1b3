"""Every parameter of a model by name and shape, in the order in which the model registers them.

The same table as ``run.models`` builds, written down without torch: what a run is audited against must not
come from the run.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from meshwright.spec.model import DecoderModel, Model

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Parameter:
    """One trained tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@functools.lru_cache(maxsize=64)
def list_parameters(model: Model) -> tuple[Parameter, ...]:
    """All parameters, in registration order; a tied head is the embedding and is not listed again."""
    assert isinstance(model, DecoderModel), "only decoders are planned yet"
    width = model.hidden_size
    parameters = [Parameter("embed.weight", (model.vocab_size, width))]
    if model.positions == "learned":
        parameters.append(Parameter("positions.weight", (model.max_positions or 0, width)))
    for layer in range(model.num_layers):
        parameters += [Parameter(f"blocks.{layer}.{p.name}", p.shape) for p in _list_block(model)]
    parameters += _list_norm(model, "norm")
    if not model.tied_embeddings:
        parameters.append(Parameter("head.weight", (model.vocab_size, width)))
    return tuple(parameters)


def _list_block(model: DecoderModel) -> list[Parameter]:
    """The parameters of one block."""
    width, queries, keys, ffn = model.hidden_size, model.query_size, model.kv_size, model.ffn_size
    attention = (("wq", queries, width), ("wk", keys, width), ("wv", keys, width), ("wo", width, queries))
    feed_forward = [("up", ffn, width), ("down", width, ffn)]
    if model.activation == "swiglu":
        feed_forward.insert(0, ("gate", ffn, width))
    return [
        *_list_norm(model, "attention_norm"),
        *(p for part in attention for p in _list_linear("attention", *part, bias=model.attention_bias)),
        *_list_norm(model, "ffn_norm"),
        *(p for part in feed_forward for p in _list_linear("ffn", *part, bias=model.ffn_bias)),
    ]


def _list_norm(model: DecoderModel, name: str) -> list[Parameter]:
    parts = ("weight",) if model.norm == "rms" else ("weight", "bias")
    return [Parameter(f"{name}.{part}", (model.hidden_size,)) for part in parts]


def _list_linear(owner: str, name: str, rows: int, columns: int, bias: bool) -> list[Parameter]:
    weight = Parameter(f"{owner}.{name}.weight", (rows, columns))
    return [weight, Parameter(f"{owner}.{name}.bias", (rows,))] if bias else [weight]


def count_parameters(model: Model) -> int:
    """Trained elements."""
    return sum(p.count for p in list_parameters(model))


def count_matmul_parameters(model: DecoderModel) -> int:
    """Elements that multiply activations: all but the input embeddings, the head included."""
    embedding = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    if model.positions == "learned":
        embedding += (model.max_positions or 0) * model.hidden_size
    return count_parameters(model) - embedding
