"""Rules of decoder models: heads, positions, latent attention, windows."""

from __future__ import annotations

from meshwright.core.errors import Problem
from meshwright.spec.job import Job
from meshwright.spec.legality.rule import ANY_VALUE, Rule, divides, needs_setting, not_built
from meshwright.spec.model import DecoderModel
from meshwright.spec.numbers import divisors, list_choices

ROPE_SCALING_KEYS = ("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_positions")
"""Keys that have an effect with `rope_factor` only."""
ROPE_KEYS = ("rope_theta", "rope_factor")
"""Keys that have an effect with rotary positions only."""
LATENT_KEYS = ("latent_size", "query_latent_size", "rope_head_dim", "value_head_dim")
"""Keys that have an effect with latent attention only."""


def check_heads(job: Job) -> Problem | None:
    """Heads have equal widths, and RoPE rotates pairs of elements."""
    model = job.model
    if not isinstance(model, DecoderModel):
        return None
    if model.head_dim is None and model.hidden_size % model.num_heads:
        rule = f"does not divide model.hidden_size={model.hidden_size}; all heads have the same width"
        near = [d for d in divisors(model.hidden_size) if d <= 2 * model.num_heads]
        fix = f"Use {list_choices(near[-4:])}, or set model.head_dim"
        return Problem("model-heads-width", rule, path="model.num_heads", value=model.num_heads, fix=fix)
    if model.head_size % 2 and model.positions == "rope":
        path, value = "model.head_dim", model.head_size
        rule, fix = "is odd; RoPE rotates pairs of elements", "Use an even one"
        return Problem("model-head-dim-odd", rule, path=path, value=value, fix=fix)
    return None


def check_positions(job: Job) -> Problem | None:
    """Learned positions are a table that covers the sequence."""
    model = job.model
    if not isinstance(model, DecoderModel) or model.positions == "rope":
        return None
    if model.max_positions is None:
        rule = "needs model.max_positions, the rows of the position embedding"
        fix = f"Set model.max_positions={job.data.seq_len} or more"
        return Problem("model-max-positions", rule, path="model.positions", value="learned", fix=fix)
    if job.data.seq_len <= model.max_positions:
        return None
    rule = f"is more than model.max_positions={model.max_positions}, the rows of the position embedding"
    fix = f"Use {model.max_positions} or less"
    return Problem("model-max-positions", rule, path="data.seq_len", value=job.data.seq_len, fix=fix)


def check_rope_factors(job: Job) -> Problem | None:
    """Llama 3.1's RoPE scaling interpolates between the two frequency factors."""
    model = job.model
    if not isinstance(model, DecoderModel) or model.rope_factor is None:
        return None
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if low < high:
        return None
    rule = f"is not below model.rope_high_freq_factor={high:g}; frequencies between the two are interpolated"
    fix = f"Use less than {high:g}, or a higher model.rope_high_freq_factor"
    return Problem("model-rope-factors", rule, path="model.rope_low_freq_factor", value=low, fix=fix)


def check_latent(job: Job) -> Problem | None:
    """Check the settings of latent attention (MLA)."""
    model = job.model
    if not isinstance(model, DecoderModel) or model.attention != "latent":
        return None
    code = "model-latent"
    for key in ("latent_size", "rope_head_dim"):
        if getattr(model, key) is None:
            rule = "is missing: model.attention=latent projects all keys and values from one latent vector, "
            rule += "and applies RoPE to a separate part of each head"
            fix = f"Set model.{key}={512 if key == 'latent_size' else 64}, as in DeepSeek-V3"
            return Problem(code, rule, path=f"model.{key}", fix=fix)
    if (model.rope_head_dim or 0) % 2:
        rule, fix = "is odd; RoPE rotates pairs of elements", "Use an even one"
        return Problem(code, rule, path="model.rope_head_dim", value=model.rope_head_dim, fix=fix)
    if model.positions != "rope":
        rule = "cannot be combined with model.attention=latent, which applies RoPE to a part of each head"
        fix = "Use model.positions=rope"
        return Problem(code, rule, path="model.positions", value=model.positions, fix=fix)
    if model.num_kv_heads != model.num_heads:
        rule = f"is not model.num_heads={model.num_heads}: with model.attention=latent every query head has "
        rule += "its own key head, projected from the latent vector"
        fix = f"Use model.num_kv_heads={model.num_heads}"
        return Problem(code, rule, path="model.num_kv_heads", value=model.num_kv_heads, fix=fix)
    return None


def check_window_every(job: Job) -> Problem | None:
    """At least one layer has a sliding window."""
    model = job.model
    if not isinstance(model, DecoderModel) or model.window is None or model.window_every <= model.num_layers:
        return None
    rule = f"is more than model.num_layers={model.num_layers}: no layer would have a sliding window"
    fix = f"Use {model.num_layers} or less, or leave model.window out"
    return Problem("model-window-every", rule, path="model.window_every", value=model.window_every, fix=fix)


def check_template_fields(job: Job) -> Problem | None:
    """Prompt and answer fields are read by a chat template only, the text field without one."""
    for key in ("prompt_field", "answer_field"):
        value = getattr(job.data, key)
        if value is not None and job.data.template is None:
            rule = "has no effect without data.template: only a chat template joins prompts and answers"
            fix = "Set data.template, for example to chatml, or leave it out"
            return Problem("data-template-needed", rule, path=f"data.{key}", value=value, fix=fix)
    if job.data.text_field is not None and job.data.template is not None:
        rule = "has no effect with data.template: conversations have their own fields"
        fix = "Leave out data.text_field or data.template"
        return Problem(
            "data-template-needed", rule, path="data.text_field", value=job.data.text_field, fix=fix
        )
    return None


def check_data_path(job: Job) -> Problem | None:
    """The data come from one path or from sources."""
    if bool(job.data.path) != bool(job.data.sources):
        return None
    rule = "and data.sources are both given" if job.data.path else "is empty, and there are no data.sources"
    fix = "Set data.path, or tables [[data.sources]] with name, path and weight"
    return Problem("data-path-or-sources", rule, path="data.path", fix=fix)


def check_source_names(job: Job) -> Problem | None:
    """The names of sources differ."""
    names = [source.name for source in job.data.sources]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is None:
        return None
    rule, fix = f"has two sources with the name {twice}", "Give each source its own name"
    return Problem("data-source-names", rule, path="data.sources", fix=fix)


def check_weights(job: Job) -> Problem | None:
    """One of the weights is above 0."""
    if not job.data.sources or any(source.weight for source in job.data.sources):
        return None
    rule, fix = "has only weights of 0: there is nothing to train on", "Set a weight above 0"
    return Problem("data-weights-zero", rule, path="data.sources", fix=fix)


def _needs(key: str, other: str, needed: object, why: str) -> Rule:
    return needs_setting(DecoderModel, f"model.{key}", other, needed, why)


RULES: tuple[Rule, ...] = (
    Rule(
        "model-heads-width",
        "`model.num_heads` divides `model.hidden_size`, unless `head_dim` is set.",
        check_heads,
    ),
    Rule("model-head-dim-odd", "`model.head_dim` is even: RoPE rotates pairs of elements.", check_heads),
    divides(
        "model-kv-heads",
        "model.num_kv_heads",
        "model.num_heads",
        "each key head serves the same number of query heads",
    ),
    Rule(
        "model-max-positions",
        '`positions = "learned"` needs `max_positions`, at least `data.seq_len`.',
        check_positions,
    ),
    Rule(
        "model-rope-factors",
        "`model.rope_low_freq_factor` is below `rope_high_freq_factor`: RoPE scaling interpolates.",
        check_rope_factors,
    ),
    *(
        _needs(key, "model.rope_factor", ANY_VALUE, "RoPE is not scaled without it")
        for key in ROPE_SCALING_KEYS
    ),
    *(_needs(key, "model.positions", "rope", "learned positions do not rotate") for key in ROPE_KEYS),
    Rule(
        "model-latent",
        "Latent attention needs `latent_size`, an even `rope_head_dim`, RoPE, and a key head per query head.",
        check_latent,
    ),
    *(_needs(key, "model.attention", "latent", "plain heads have no latent vector") for key in LATENT_KEYS),
    Rule("model-window-every", "`model.window_every` is at most `num_layers`.", check_window_every),
    _needs("window_every", "model.window", ANY_VALUE, "no layer has a sliding window"),
    Rule(
        "data-template-needed",
        "`data.prompt_field` and `answer_field` need `data.template`; `text_field` excludes it.",
        check_template_fields,
    ),
    Rule("data-path-or-sources", "`data.path` or `data.sources`, not both.", check_data_path),
    Rule("data-source-names", "The names of `data.sources` differ.", check_source_names),
    Rule("data-weights-zero", "One of the weights of `data.sources` is above 0.", check_weights),
    not_built("model.attention", ("heads",), "latent attention"),
    not_built("model.window", (None,), "sliding-window attention"),
)
