"""One table for both directions: where each of our parameters lies in Hugging Face's files; without torch.

Llama's matrices are ours under other names; of Mixtral's experts each has matrices of its own, which here lie
one below the other. GPT-2's are transposed (its ``Conv1D`` multiplies from the other
side), and queries, keys and values share one matrix, side by side along its last dim.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from meshwright.layout.parameters import Parameter, list_parameters
from meshwright.spec.model import DecoderModel

LLAMA = "LlamaForCausalLM"
MIXTRAL = "MixtralForCausalLM"
GPT2 = "GPT2LMHeadModel"
HEAD = "lm_head.weight"

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")
_LLAMA_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
    "ffn.router": "block_sparse_moe.gate",
}
_MIXTRAL_EXPERT = {"ffn.experts.gate": "w1", "ffn.experts.down": "w2", "ffn.experts.up": "w3"}
_GPT2_TOP = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.wq": "attn.c_attn",
    "attention.wk": "attn.c_attn",
    "attention.wv": "attn.c_attn",
    "attention.wo": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn.up": "mlp.c_fc",
    "ffn.down": "mlp.c_proj",
}
_FUSED = ("attention.wq", "attention.wk", "attention.wv")
"""In the order in which they lie side by side."""
_BUFFERS = re.compile(r".*(\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)")
"""Masks and frequencies that older versions saved; they are computed here."""


@dataclass(frozen=True)
class HfLocation:
    """Where one of our parameters lies."""

    name: str
    """The tensor in Hugging Face's files; the first of its pieces."""
    transposed: bool = False
    begin: int | None = None
    """First column of a shared tensor, along its last dim; None if the tensor is ours alone."""
    end: int | None = None
    pieces: tuple[str, ...] = ()
    """The tensors that lie one below the other in ours, where there are several."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor that holds a part of ours."""
        return self.pieces or (self.name,)

    @property
    def columns(self) -> slice | None:
        """The part of a shared tensor, if it is shared."""
        return None if self.begin is None else slice(self.begin, self.end)


def architecture_of(model: DecoderModel) -> str:
    """The class in transformers whose parts come closest."""
    if model.positions == "learned":
        return GPT2
    return MIXTRAL if model.num_experts else LLAMA


def list_hf_locations(model: DecoderModel) -> dict[str, HfLocation]:
    """The place of each of our parameters, in our order."""
    gpt2 = architecture_of(model) == GPT2
    place = functools.partial(_gpt2_place if gpt2 else _llama_place, model)
    return {parameter.name: place(parameter) for parameter in list_parameters(model)}


def list_hf_shapes(model: DecoderModel) -> dict[str, tuple[int, ...]]:
    """Every tensor of a whole Hugging Face folder, and its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    places = list_hf_locations(model)
    for parameter in list_parameters(model):
        place = places[parameter.name]
        shape = parameter.shape[::-1] if place.transposed else parameter.shape
        if place.end is not None:
            shape = (*shape[:-1], max(place.end, shapes.get(place.name, (0,))[-1]))
        elif place.pieces:
            shape = (shape[0] // len(place.pieces), *shape[1:])
        shapes |= dict.fromkeys(place.names, shape)
    return shapes


def full_name(name: str, model: DecoderModel) -> str:
    """A tensor's name with the prefix that files of a bare model without head leave out."""
    prefix = _prefix(model)
    return name if name.startswith(prefix) or name == HEAD else prefix + name


def bare_name(name: str, model: DecoderModel) -> str:
    """The same name as files of a bare model have it."""
    return name.removeprefix(_prefix(model))


def _prefix(model: DecoderModel) -> str:
    return "transformer." if architecture_of(model) == GPT2 else "model."


def is_buffer(name: str) -> bool:
    """Whether a tensor is no weight."""
    return _BUFFERS.fullmatch(name) is not None


def _llama_place(model: DecoderModel, parameter: Parameter) -> HfLocation:
    if match := _BLOCK.fullmatch(parameter.name):
        if part := _MIXTRAL_EXPERT.get(match[2]):
            owner = f"model.layers.{match[1]}.block_sparse_moe.experts"
            pieces = tuple(f"{owner}.{e}.{part}.{match[3]}" for e in range(model.num_experts or 0))
            return HfLocation(pieces[0], pieces=pieces)
        return HfLocation(f"model.layers.{match[1]}.{_LLAMA_BLOCK[match[2]]}.{match[3]}")
    owner, _, kind = parameter.name.rpartition(".")
    return HfLocation(f"{_LLAMA_TOP[owner]}.{kind}")


def _gpt2_place(model: DecoderModel, parameter: Parameter) -> HfLocation:
    match = _BLOCK.fullmatch(parameter.name)
    if match is None:
        owner, _, kind = parameter.name.rpartition(".")
        return HfLocation(f"{_GPT2_TOP[owner]}.{kind}")
    layer, part, kind = match.groups()
    name = f"transformer.h.{layer}.{_GPT2_BLOCK[part]}.{kind}"
    transposed = len(parameter.shape) == 2
    if part not in _FUSED:
        return HfLocation(name, transposed)
    ends = (model.query_size, model.query_size + model.kv_size, model.query_size + 2 * model.kv_size)
    index = _FUSED.index(part)
    return HfLocation(name, transposed, (0, *ends)[index], ends[index])
