"""Maps parameter names to Hugging Face tensors, for import and export; without torch.

Llama's weights only have other names. Each of Mixtral's experts has its own weights, which are concatenated
along the first dim here. GPT-2's weights are transposed (``Conv1D``), and its queries, keys and values share
one tensor, concatenated along the last dim.
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
"""In the order of their columns."""
_BUFFERS = re.compile(r".*(\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)")
"""Masks and frequencies that older versions of transformers saved; not needed here."""


@dataclass(frozen=True)
class HfLocation:
    """The Hugging Face tensor, or tensors, of one parameter."""

    name: str
    """Name of the tensor, or of the first part."""
    transposed: bool = False
    begin: int | None = None
    """First column in a tensor that several parameters share; None if it is not shared."""
    end: int | None = None
    parts: tuple[str, ...] = ()
    """The tensors that are concatenated along the first dim, if there are several."""

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors of the parameter."""
        return self.parts or (self.name,)

    @property
    def columns(self) -> slice | None:
        """The columns in a shared tensor; None if it is not shared."""
        return None if self.begin is None else slice(self.begin, self.end)


def architecture_of(model: DecoderModel) -> str:
    """The closest class of transformers."""
    if model.positions == "learned":
        return GPT2
    return MIXTRAL if model.num_experts else LLAMA


def list_hf_locations(model: DecoderModel) -> dict[str, HfLocation]:
    """The Hugging Face location of each parameter, in the order of the model."""
    gpt2 = architecture_of(model) == GPT2
    location = functools.partial(_locate_gpt2 if gpt2 else _locate_llama, model)
    return {parameter.name: location(parameter) for parameter in list_parameters(model)}


def list_hf_shapes(model: DecoderModel) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Hugging Face folder, and its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    locations = list_hf_locations(model)
    for parameter in list_parameters(model):
        location = locations[parameter.name]
        shape = parameter.shape[::-1] if location.transposed else parameter.shape
        if location.end is not None:
            shape = (*shape[:-1], max(location.end, shapes.get(location.name, (0,))[-1]))
        elif location.parts:
            shape = (shape[0] // len(location.parts), *shape[1:])
        shapes |= dict.fromkeys(location.names, shape)
    return shapes


def full_name(name: str, model: DecoderModel) -> str:
    """A tensor name with the prefix that files of a model without head omit."""
    prefix = _prefix(model)
    return name if name.startswith(prefix) or name == HEAD else prefix + name


def bare_name(name: str, model: DecoderModel) -> str:
    """The name without that prefix."""
    return name.removeprefix(_prefix(model))


def _prefix(model: DecoderModel) -> str:
    return "transformer." if architecture_of(model) == GPT2 else "model."


def is_buffer(name: str) -> bool:
    """Whether a tensor is a buffer and not a weight."""
    return _BUFFERS.fullmatch(name) is not None


def _locate_llama(model: DecoderModel, parameter: Parameter) -> HfLocation:
    if match := _BLOCK.fullmatch(parameter.name):
        if part := _MIXTRAL_EXPERT.get(match[2]):
            owner = f"model.layers.{match[1]}.block_sparse_moe.experts"
            parts = tuple(f"{owner}.{e}.{part}.{match[3]}" for e in range(model.num_experts or 0))
            return HfLocation(parts[0], parts=parts)
        return HfLocation(f"model.layers.{match[1]}.{_LLAMA_BLOCK[match[2]]}.{match[3]}")
    owner, _, kind = parameter.name.rpartition(".")
    return HfLocation(f"{_LLAMA_TOP[owner]}.{kind}")


def _locate_gpt2(model: DecoderModel, parameter: Parameter) -> HfLocation:
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
