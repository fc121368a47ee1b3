"""The model of a published run: widths from the row, architecture by parameter count or name."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

from meshwright.plan.estimate.weights import count_elements
from meshwright.spec.model import DecoderModel
from meshwright.spec.presets import preset_names, read_preset
from meshwright.validation.cells import Cells, NotExpressedError

GATED_MODELS = re.compile(
    r"llama|qwen|mistral|mixtral|ministral|deepseek|kimi|gemma|oss|baichuan|\byi\b|internlm|olmo|glm-?4|phi-?[34]|"
    r"grok|dbrx|skywork|ernie|minimax|hunyuan|vicuna|tulu|granite|smollm|moonlight",
    re.IGNORECASE,
)
"""Models with a gated feed-forward (SwiGLU)."""
UNGATED_MODELS = re.compile(
    r"gpt-?(?!.*oss)|opt-|bloom|mpt|megatron|turing|mt-nlg|nemotron|falcon|pythia|starcoder|neox|bert|t-nlg",
    re.IGNORECASE,
)
"""Models with an ungated feed-forward (two matrices)."""
NOT_ATTENTION = re.compile(
    r"mamba|hybrid|nemotron[-_ ]?(?:h(?![a-z])|nano|3[-_ ](?:nano|super|ultra))|jamba|zamba|rwkv|linear|"
    r"qwen3.?next|deltanet|retnet",
    re.IGNORECASE,
)
"""Models with layers other than attention and feed-forward."""
NOT_DECODERS = re.compile(
    r"\bbert|\bt5\b|\bvit\b|resnet|diffusion|dlrm|swin|wan.?2|flux|clip\b|whisper", re.IGNORECASE
)
HEAD_DIMS = (
    (re.compile(r"gpt.?oss", re.IGNORECASE), 64),
    (re.compile(r"qwen.?3", re.IGNORECASE), 128),
    (re.compile(r"mistral.?nemo", re.IGNORECASE), 128),
    (re.compile(r"gemma.?[23]?.?27b", re.IGNORECASE), 128),
    (re.compile(r"gemma", re.IGNORECASE), 256),
)
"""Published head widths that are not hidden / heads; first match wins."""
LATENT = {"attention": "latent", "latent_size": 512, "query_latent_size": 1536, "rope_head_dim": 64,
          "head_dim": 128, "value_head_dim": 128}  # fmt: skip
"""Sizes of multi-head latent attention in DeepSeek V2 and V3 and in Kimi K2."""
UNTIED_UNGATED = re.compile(r"nemotron|pythia|neox|falcon", re.IGNORECASE)
"""Ungated models with untied embeddings."""
NO_LEARNED_POSITIONS = re.compile(r"nemotron|pythia|neox|falcon|bloom|starcoder2", re.IGNORECASE)
"""Ungated models without learned positions (RoPE, or BLOOM's ALiBi, which has no parameters)."""
NO_BIAS = re.compile(r"mpt|nemotron|falcon", re.IGNORECASE)
LABEL_ERROR = 0.002
"""Relative error of published parameter counts, beyond rounding."""


def build_model(cells: Cells, tp: int | None) -> DecoderModel:
    """The model of a row.

    Raises:
        NotExpressedError: It is not a transformer decoder, or a width is missing.
    """
    name = cells.text("model_name")
    attention = cells.text("attention").lower()
    for pattern, what in ((NOT_ATTENTION, "layers that are not attention"), (NOT_DECODERS, "no decoder")):
        found = pattern.search(name) or pattern.search(attention)
        if found:
            raise NotExpressedError(f"{what} ({found[0].lower()}): not modelled")
    preset = _named_preset(name) if not (cells.text("layers") and cells.text("hidden")) else None
    if preset:
        cells.remark(f"dimensions of the preset {preset['preset']}")
    width = cells.optional("hidden") or _from(preset, "hidden_size", "hidden")
    experts = cells.optional("experts")
    guess = _guess_gated(cells, name, width, experts)
    heads = cells.optional("heads") or (preset or {}).get("num_heads") or _guess_heads(cells, width, tp or 1)
    ffn = (
        cells.optional("ffn_hidden")
        or (preset or {}).get("ffn_size")
        or _guess_ffn(cells, width, guess, experts)
    )
    fields: dict[str, Any] = {
        "num_layers": cells.optional("layers") or _from(preset, "num_layers", "layers"),
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": (preset or {}).get("num_kv_heads") or _kv_heads(cells, heads, attention),
        "ffn_size": ffn,
        "vocab_size": cells.optional("vocab")
        or (preset or {}).get("vocab_size")
        or _guess_vocab(cells, guess),
        "head_dim": _head_dim(cells, name, width, heads),
    }
    if experts:
        fields |= _expert_fields(cells, name, experts, ffn)
    if "mla" in attention or "latent" in attention:
        fields |= LATENT | ({"query_latent_size": None} if "lite" in name.lower() else {})
    if found := re.search(r"sliding[\s_-]*(\d+)(?:\s*/\s*(\d+))?", attention):
        fields |= {"window": int(found[1]), "window_every": int(found[2] or 1)}
    if _has_mtp(cells, name):
        fields["num_layers"] += 1
        cells.remark("multi-token prediction counted as one more layer")
    return choose_architecture(fields, name, guess, cells)


def _from(preset: dict[str, Any] | None, key: str, column: str) -> int:
    if preset is None:
        raise NotExpressedError(f"{column} not published")
    return int(preset[key])


def _normalize_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", re.sub(r"\(.*?\)", "", name).lower())


@functools.cache
def _presets() -> dict[str, dict[str, Any]]:
    found = {}
    for name in preset_names("models"):
        tree = read_preset("models", name)
        if isinstance(tree, dict) and tree.get("architecture") != "resnet":
            found[_normalize_name(name)] = {**tree, "preset": name}
    return found


def _named_preset(name: str) -> dict[str, Any] | None:
    plain = _normalize_name(name)
    return _presets().get(plain) or _presets().get(plain.replace("llama31", "llama3"))


def _guess_gated(cells: Cells, name: str, width: int, experts: int | None) -> bool:
    """Whether the feed-forward is gated: by name, else by width."""
    if GATED_MODELS.search(name):
        return True
    if UNGATED_MODELS.search(name):
        return False
    if experts:
        return True
    ffn, kv_heads = cells.optional("ffn_hidden"), cells.optional("kv_heads")
    shared = kv_heads is not None and kv_heads < (cells.optional("heads") or kv_heads)
    return shared or (ffn is not None and ffn != 4 * width)


GPT3_WIDTH, GPT3_HEADS = 12288, 96


def _guess_heads(cells: Cells, width: int, tp: int) -> int:
    """96 heads near GPT-3's width; else the number divisible by tp with a head dim closest to 128."""
    options = [n for n in range(tp, width // 32 + 1, tp) if width % n == 0]
    heads = min(options, key=lambda n: abs(width / n - 128)) if options else tp
    if GPT3_WIDTH <= width <= 1.25 * GPT3_WIDTH and GPT3_HEADS in options:
        heads = GPT3_HEADS
    cells.fill("heads", heads)
    return heads


def _guess_ffn(cells: Cells, width: int, gated: bool, experts: int | None) -> int:
    moe = cells.optional("moe_ffn") if experts else None
    ffn = moe or (-(-width * 8 // 3 // 256) * 256 if gated else 4 * width)
    cells.fill("ffn_hidden", ffn)
    return ffn


def _guess_vocab(cells: Cells, gated: bool) -> int:
    vocab = 32000 if gated else 51200
    cells.fill("vocab", vocab, "Llama's" if gated else "GPT-2's, padded")
    return vocab


def _kv_heads(cells: Cells, heads: int, attention: str) -> int:
    given = cells.optional("kv_heads")
    if given is not None:
        return given
    groups = 1 if "mqa" in attention else min(8, heads) if "gqa" in attention else heads
    cells.fill("kv_heads", groups)
    return groups


def _head_dim(cells: Cells, name: str, width: int, heads: int) -> int | None:
    given = cells.optional("head_dim")
    known = given or next((size for pattern, size in HEAD_DIMS if pattern.search(name)), None)
    if known:
        return None if known * heads == width else known
    return None if width % heads == 0 else -(-width // heads)


def _expert_fields(cells: Cells, name: str, experts: int, ffn: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "num_experts": experts,
        "experts_per_token": cells.count_or("top_k", min(2, experts)),
        "expert_ffn_size": cells.optional("moe_ffn") or ffn,
        "shared_experts": cells.optional("shared_experts") or 0,
        "dense_layers": cells.optional("dense_layers") or 0,
    }
    every = cells.optional("moe_every") or _note_count(cells, r"(?:moe|experts) (?:on )?every (\d+)")
    if every and every > 1:
        layers = cells.count("layers")
        fields["dense_layers"] = layers - layers // every
        cells.remark(f"experts on every {every}. layer: {fields['dense_layers']} dense layers")
    if re.search(r"token.?drop|capacity factor 1\b", f"{name} {cells.note}".lower()):
        fields["capacity_factor"] = 1.0
        cells.remark("dropped tokens read as a capacity factor of 1")
    return fields


def _note_count(cells: Cells, pattern: str) -> int | None:
    found = re.search(pattern, cells.note)
    return int(found[1]) if found else None


def _has_mtp(cells: Cells, name: str) -> bool:
    """Whether the run trained DeepSeek's multi-token prediction layer, from name and note."""
    text = f"{name} {cells.note}".lower()
    return "mtp" in text and not re.search(r"(w/o|without|no) mtp", text)


def choose_architecture(fields: dict[str, Any], name: str, gated: bool, cells: Cells) -> DecoderModel:
    """GPT or Llama architecture, tied or untied: by published parameter count if decisive, else by name."""
    tied = not gated and not UNTIED_UNGATED.search(name) and not fields.get("num_experts")
    positions = cells.count("seq_len")
    first = _with_architecture(fields, name, gated, tied, positions)
    published = cells.number_of("params_b")
    if published is None:
        return first
    options = [(g, t) for g in (gated, not gated) for t in (tied, not tied)]
    others = [_with_architecture(fields, name, g, t, positions) for g, t in options]
    error = [abs(count_elements(model) / 1e9 - published) for model in others]
    text = cells.text("params_b")
    digits = _decimals(text, published)
    best = min(range(len(others)), key=error.__getitem__)
    if error[0] <= 0.5 * 10.0**-digits + LABEL_ERROR * published or error[best] > 0.5 * error[0]:
        return first
    model = others[best]
    told = "ungated" if model.activation != "swiglu" else "gated"
    tying = "tied" if model.tied_embeddings else "untied"
    cells.remark(f"from params_b={text}: {told} feed-forward, {tying} embeddings")
    return model


def _decimals(text: str, published: float) -> int:
    """Decimals of a published number of 10^9 parameters, such as `7.5`, `7B` or `350M`."""
    if published == int(published):
        return 0
    number = text.lower().rstrip(" bmt")
    return len(number.partition(".")[2]) + (3 if text.lower().endswith("m") else 0)


def _with_architecture(
    fields: dict[str, Any], name: str, gated: bool, tied: bool, positions: int
) -> DecoderModel:
    llama = DecoderModel(**fields, tied_embeddings=tied)
    if gated:
        return llama
    bias = not NO_BIAS.search(name)
    learned = not NO_LEARNED_POSITIONS.search(name)
    return dataclasses.replace(
        llama,
        positions="learned" if learned else "rope",
        max_positions=positions if learned else None,
        norm="layer",
        activation="gelu",
        attention_bias=bias,
        ffn_bias=bias,
    )
