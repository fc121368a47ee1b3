"""Every parameter of a model by name and shape, in the order in which the model registers them.

The same table as ``run.models`` builds, written down without torch: what a run is audited against must not
come from the run.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from meshwright.spec.model import Model

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
    width, queries, keys, ffn = model.hidden_size, model.query_size, model.kv_size, model.ffn_size
    block = [
        ("attention_norm.weight", (width,)),
        ("attention.wq.weight", (queries, width)),
        ("attention.wk.weight", (keys, width)),
        ("attention.wv.weight", (keys, width)),
        ("attention.wo.weight", (width, queries)),
        ("ffn_norm.weight", (width,)),
        ("ffn.gate.weight", (ffn, width)),
        ("ffn.up.weight", (ffn, width)),
        ("ffn.down.weight", (width, ffn)),
    ]
    parameters = [Parameter("embed.weight", (model.vocab_size, width))]
    for layer in range(model.num_layers):
        parameters += [Parameter(f"blocks.{layer}.{name}", shape) for name, shape in block]
    parameters.append(Parameter("norm.weight", (width,)))
    if not model.tied_embeddings:
        parameters.append(Parameter("head.weight", (model.vocab_size, width)))
    return tuple(parameters)


def count_parameters(model: Model) -> int:
    """Trained elements."""
    return sum(p.count for p in list_parameters(model))


def count_matmul_parameters(model: Model) -> int:
    """Elements that multiply activations: all but the input embedding, the head included."""
    embedding = model.vocab_size * model.hidden_size
    return count_parameters(model) - (0 if model.tied_embeddings else embedding)
