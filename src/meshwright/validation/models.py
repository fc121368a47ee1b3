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
        return _preset_model(cells, name, preset)
    width, layers = cells.count("hidden"), cells.count("layers")
    experts = cells.optional("experts")
    guess = _guess_gated(cells, name, width, experts)
    heads = cells.optional("heads") or _guess_heads(cells, width, tp or 1)
    ffn = cells.optional("ffn_hidden") or _guess_ffn(cells, width, guess, experts)
    fields: dict[str, Any] = {
        "num_layers": layers + _mtp_layers(cells, name),
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": _kv_heads(cells, heads, attention),
        "ffn_size": ffn,
        "vocab_size": cells.optional("vocab") or _guess_vocab(cells, guess),
        "head_dim": _head_dim(cells, name, width, heads),
    }
    if experts:
        fields |= _expert_fields(cells, name, experts, ffn)
    if "mla" in attention or "latent" in attention:
        fields |= LATENT | ({"query_latent_size": None} if "lite" in name.lower() else {})
    if found := re.search(r"(?:sliding|swa|window)[\s_-]*(\d+)(?:\s*/\s*(\d+))?", attention):
        fields |= {"window": int(found[1]), "window_every": int(found[2] or 1)}
    return choose_architecture(fields, name, guess, cells)


FIELDS = {
    "layers": "num_layers", "hidden": "hidden_size", "heads": "num_heads", "kv_heads": "num_kv_heads",
    "head_dim": "head_dim", "ffn_hidden": "ffn_size", "vocab": "vocab_size", "experts": "num_experts",
    "top_k": "experts_per_token", "moe_ffn": "expert_ffn_size", "shared_experts": "shared_experts",
    "dense_layers": "dense_layers",
}  # fmt: skip
"""Columns, and the fields of a model that they set."""


def _preset_model(cells: Cells, name: str, preset: dict[str, Any]) -> DecoderModel:
    """A preset with all its parts, such as experts and latent attention; cells replace its numbers."""
    fields = {key: value for key, value in preset.items() if key != "preset"}
    for column, field in FIELDS.items():
        given = cells.optional(column)
        fields |= {} if given is None else {field: given}
    fields["num_layers"] += _mtp_layers(cells, name)
    if fields.get("num_experts"):
        fields |= _capacity(cells, name)
    if fields.get("positions") == "learned":
        fields["max_positions"] = cells.count("seq_len")
    return DecoderModel(**fields)


_VARIANT = re.compile(r"(instruct|chat|base|hf|it|pretrain(ing|ed)?|v0\d|2507)+$")
"""Ends of names that do not change a model's shape."""
_RENAMED = (
    (r"^meta(?=llama)", ""),
    (r"^llama3[13](?=(8|70|405)b$)", "llama3"),
    (r"^llama(?=(7|13|65)b$)", "llama1"),
    (r"^llama3[03]b$", "llama133b"),
    (r"^gpt175b$", "gpt3175b"),
    (r"^bloom$", "bloom176b"),
    (r"^(mtnlg|megatronturing(nlg)?)530b$", "gpt530b"),
    (r"^nemotron4(?=340b$)", "nemotron"),
    (r"^(deepseekv[23])(236|671)b$", r"\1"),
    (r"^qwen3moe(?=30b|235b)", "qwen3"),
    (r"^qwen330b$", "qwen330ba3b"),
    (r"^qwen3235b$", "qwen3235ba22b"),
)
"""Other names of presets, normalized."""


def _normalize_name(name: str) -> str:
    plain = re.sub(r"\(.*?\)", "", name).rpartition("/")[2]
    plain = _VARIANT.sub("", re.sub(r"[^a-z0-9]", "", plain.lower()))
    for pattern, other in _RENAMED:
        plain = re.sub(pattern, other, plain)
    return plain


@functools.cache
def _presets() -> dict[str, dict[str, Any]]:
    found = {}
    for name in preset_names("models"):
        tree = read_preset("models", name)
        if isinstance(tree, dict) and tree.get("architecture") != "resnet":
            found[_normalize_name(name)] = {**tree, "preset": name}
    return found


def _named_preset(name: str) -> dict[str, Any] | None:
    return _presets().get(_normalize_name(name))


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
    return fields | _capacity(cells, name)


def _capacity(cells: Cells, name: str) -> dict[str, float]:
    """The capacity factor of a row that drops tokens."""
    if not re.search(r"token.?drop|capacity factor 1\b", f"{name} {cells.note}".lower()):
        return {}
    cells.remark("dropped tokens read as a capacity factor of 1")
    return {"capacity_factor": 1.0}


def _note_count(cells: Cells, pattern: str) -> int | None:
    found = re.search(pattern, cells.note)
    return int(found[1]) if found else None


def _mtp_layers(cells: Cells, name: str) -> int:
    """Layers of DeepSeek's multi-token prediction that the run trained, from name and note."""
    text = f"{name} {cells.note}".lower()
    if "mtp" not in text or re.search(r"(w/o|without|no) mtp", text):
        return 0
    cells.remark("multi-token prediction counted as one more layer")
    return 1


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
    kind = "ungated" if model.activation != "swiglu" else "gated"
    tying = "tied" if model.tied_embeddings else "untied"
    cells.remark(f"from params_b={text}: {kind} feed-forward, {tying} embeddings")
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
