"""The software of a published run: framework profile, fp8 recipe, options from the note."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from meshwright.plan.profiles import PROFILES, Profile
from meshwright.plan.time.interval import generation_of
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import DecoderModel
from meshwright.validation.cells import OFFLOADED_ACTIVATIONS, Cells, find_stated
from meshwright.validation.devices import device_name

OLD_DEVICES = ("A100", "A800", "V100")
"""Devices of the years before Megatron had fused attention."""
SINCE_2025 = ("Blackwell", "CDNA4")
"""Generations of devices that torch supports since 2025."""
FUSED_GRAD_ACCUMULATION_SINCE = 2205
"""Year and month of the first papers whose Megatron fused gradient accumulation into GEMMs."""
FLASH_ATTENTION_SINCE = 2402
"""Year and month of the first papers whose Megatron had fused attention."""
OVERLAPS_EXPERTS_SINCE = (26, 6)
"""First release of Megatron Bridge whose recipes overlap expert dispatch."""
LATENT_ON_BLACKWELL_SINCE = (25, 7)
"""First container of NeMo with cuDNN 9.11."""
_RELEASE = re.compile(r"\b(2\d)\.(0[1-9]|1[0-2])(?:\.\d+)?\b")
JAX = r"\b(jax|maxtext|levanter|pax(ml)?|t5x|easylm)\b|(?<![a-z])xla\b"
"""Frameworks on JAX."""
COMPILES = rf"{JAX}|\bthunder\b"
"""Frameworks that always compile."""
PROFILE_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"megatron.?swift|swift.*megatron", "megatron-core"),
    (
        r"hugging.?face|transformers|accelerate|llama-?factory|axolotl|xtuner|unsloth|trl\b|swift",
        "huggingface",
    ),
    (r"megatron.*deepspeed|deepspeed.*megatron|gpt-?neox", "megatron-deepspeed"),
    (r"deepspeed|zero(?:-?infinity|\+\+)?$", "deepspeed-zero"),
    (r"titan|fsdp-?2|torchtune|simple-?fsdp", "torchtitan"),
    (r"composer|foundry|metaseq|fairseq|fairscale", "composer-fsdp"),
    (r"fsdp|pytorch|lightning|lit-?gpt|olmo|llama-?(recipes|cookbook)|prime-?rl", "torchtitan"),
    (JAX, "torchtitan"),
    (r"meshwright", "meshwright"),
    (r"^aa-|aleph", "aleph-alpha-scaling"),
    (r"nanotron|internevo|colossal|llmq|like", "megatron-like"),
    (r"bridge|nemo", "megatron-bridge"),
    (r"megatron-?core|mcore|megascale|pai-|primus", "megatron-core"),
    (r"hai-?llm", "hai-llm"),
    (r"^(?!.*megatron).*\bhf\b", "huggingface"),
    (r"^(?!.*megatron).*\bddp\b", "torchtitan"),
)
"""Framework names and the nearest profile (first match wins); plain `megatron` is decided by date."""
_SIMILAR_TO = re.compile(r"\((?:as )?([^)]*)\)")
"""What a row says that an unknown framework is like: `maxtext (as fsdp)`."""
HAS_PROFILE = re.compile(
    r"megatron|deepspeed|composer|foundry|titan|meshwright|hugging|nemo|^aa-|aleph", re.IGNORECASE
)
"""Frameworks with their own profile; others use the nearest."""
RECIPES: tuple[tuple[str, str], ...] = (
    (r"nvfp4", "nvfp4"),
    (r"mxfp8|fp8[-_ ]?mx|mx[-_ ]?fp8", "mxfp8"),
    (r"fp8[-_ ]?sc|subchannel|sub-channel|blockwise|128x128", "subchannel"),
    (r"rowwise|row-wise", "rowwise"),
    (r"fp8[-_ ]?ds|delayed", "delayed"),
    (r"fp8[-_ ]?cs|tensorwise|tensor-wise|current scal|per-tensor", "current"),
)
"""Names of fp8 and fp4 scaling recipes; the first in the text wins."""


def choose_profile(framework: str, gpu: str, source: str = "", zero: int | None = None) -> Profile:
    """The profile nearest to a framework's name; for plain Megatron, by date of its source or device.

    Args:
        framework: As published.
        gpu: The device.
        source: Where the row was published; an arXiv number gives the date.
        zero: The ZeRO stage, if published. Old Megatron had none: ZeRO-3 in its tables is DeepSpeed's.

    The DeepSpeed profile is that of 2021, which gathered parameters one by one, without fused attention;
    newer devices and papers use that of transformers.
    """
    name = _SIMILAR_TO.sub("", framework.lower())
    similar_to = _SIMILAR_TO.search(framework.lower())
    # Another framework that is like Megatron has its axes, not its kernels.
    like = similar_to[1].replace("megatron-core", "megatron-like") if similar_to else ""
    names = (like, name) if "(as " in framework.lower() else (name, like)
    found = next(
        (one for text in names for pattern, one in PROFILE_PATTERNS if re.search(pattern, text)), None
    )
    gpu = device_name(gpu) or gpu
    recent_device = generation_of(gpu) in SINCE_2025
    if found == "torchtitan" and (recent_device or re.search(r"20(2[5-9]|[3-9]\d)-?\d\d", source)):
        return PROFILES["torchtitan-2025"]
    dated = re.search(r"arxiv[ :]*(\d{4})\.\d{4,5}", source.lower())
    recent = (
        int(dated[1]) >= FLASH_ATTENTION_SINCE
        if dated
        else bool(re.search(r"nemo|megatron-core|mcore", source.lower()))
    )
    old = gpu.upper().startswith(OLD_DEVICES) and not recent
    if found == "deepspeed-zero" and not old:
        return PROFILES["huggingface"]
    if found:
        return PROFILES[found]
    if re.search(r"nemo|bridge", source.lower()) and not gpu.upper().startswith(OLD_DEVICES):
        return PROFILES["megatron-bridge"]
    if old and zero == 3:
        return PROFILES["deepspeed-zero"]
    if not re.search(r"megatron|meta", name) and (zero in (2, 3) or name):
        return PROFILES["torchtitan" if zero in (2, 3) else "megatron-like"]
    if old:
        return PROFILES[
            "megatron-lm-2022" if dated and int(dated[1]) >= FUSED_GRAD_ACCUMULATION_SINCE else "megatron-lm"
        ]
    return PROFILES["megatron-core"]


def read_profile(cells: Cells) -> Profile:
    """The profile of a row, with options from its note."""
    framework = cells.text("framework")
    profile = choose_profile(framework, cells.text("gpu"), cells.text("source"), cells.zero_stage())
    if profile.name == "torchtitan-2025" and "titan" not in framework.lower():
        # Not its compiled loss.
        profile = dataclasses.replace(profile, memory=PROFILES["torchtitan"].memory)
    release = read_release(cells)
    if profile.name == "megatron-bridge" and release and release >= OVERLAPS_EXPERTS_SINCE:
        profile = PROFILES["megatron-bridge-2026"]
    if not framework:
        cells.fill("framework", profile.name)
    elif not HAS_PROFILE.search(framework):
        cells.remark(f"framework {framework}: predicted as {profile.name}, the nearest profile")
    elif profile.name == "huggingface" and "deepspeed" in framework.lower():
        cells.remark("DeepSpeed after 2022: predicted as huggingface, the nearest profile")
    elif profile.name == "deepspeed-zero" and "deepspeed" not in framework.lower():
        cells.remark("ZeRO-3 with Megatron before 2023: predicted as deepspeed-zero")
    return _apply_note(_with_flash_attention(profile, cells), cells)


FLASH_ATTENTION = re.compile(r"xtuner", re.IGNORECASE)
"""Frameworks that replace the attention of transformers by flash-attn 2 (`xtuner/model/modules/dispatch`)."""


def _with_flash_attention(profile: Profile, cells: Cells) -> Profile:
    """The profile of transformers without a mask tensor, where it has none.

    Ring attention and Ulysses call flash-attn 2 on their parts, and so do some frameworks. Versions of
    transformers that support Blackwell pass no mask where nothing is padded.
    """
    if profile.name != "huggingface":
        return profile
    parallel = (cells.optional("cp") or 1) > 1
    generation = generation_of(device_name(cells.text("gpu")) or "")
    if parallel and cells.says(r"\bsdpa\b|torch context parallel") and generation in ("Hopper", "Blackwell"):
        cells.remark("cuDNN attention, that of torch's context parallelism")
        time = dataclasses.replace(profile.time, attention_kernel="native", skips_masked=True)
    elif parallel or FLASH_ATTENTION.search(cells.text("framework")):
        cells.remark(f"flash-attn 2, that of {'context parallelism' if parallel else 'the framework'}")
        time = dataclasses.replace(profile.time, attention_kernel="flash-2", skips_masked=True)
    elif generation == "Blackwell":
        time = dataclasses.replace(profile.time, skips_masked=True)
    else:
        return profile
    return dataclasses.replace(profile, time=time)


def read_release(cells: Cells) -> tuple[int, int] | None:
    """Year and month of the release of NeMo or Megatron Bridge, such as `NeMo 25.02`."""
    for text in (cells.text("framework"), cells.text("source")):
        if re.search(r"nemo|bridge", text.lower()) and (found := _RELEASE.search(text)):
            return int(found[1]), int(found[2])
    return None


def with_available_attention(
    profile: Profile, model: DecoderModel, cluster: Cluster, cells: Cells
) -> Profile:
    """The profile without fused attention, if the row's release had no kernel for the model on the device.

    cuDNN before 9.11 has no backward pass for latent attention (heads of 192 and 128) on Blackwell
    (Transformer Engine, `fused_attn.cpp`), and FlashAttention 2 needs equal heads.
    """
    release = read_release(cells)
    latent = model.attention == "latent" and generation_of(cluster.device_name) == "Blackwell"
    if not latent or release is None or release >= LATENT_ON_BLACKWELL_SINCE:
        return profile
    cells.remark("attention not fused: cuDNN of that release has none for latent attention on Blackwell")
    return dataclasses.replace(
        profile,
        memory=dataclasses.replace(profile.memory, fused_attention=False),
        time=dataclasses.replace(profile.time, flash_attention=False),
    )


_EXCHANGE = r"(\bep|a2a|all.?to.?all|dispatch|expert)"
_FEW_NODES = re.compile(r"(?:at most|max(?:imum)?|up to|limited to) (\d+) nodes")
"""Node-limited routing."""
_FUSED_ATTENTION = (
    r"flash[ _-]?att(?:entio)?n\w*|\bfa[1234]\b|sdpa[ _-]flash|"
    r"cudnn[ _-](?:flash|attention)"
)
_UNFUSED_ATTENTION = (
    r"(no|without) (flash|fused)[ _-]?att|flash_?att\w* ?= ?(false|off)|unfused att|eager att"
)
_TE_CROSS_ENTROPY = r"cross[ -]entropy fusion te\b|\bte(\b|'s)[^;,.]{0,12}cross[ -]entropy"
"""Transformer Engine's cross entropy; Megatron's own fusion, `native`, is the profiles' default."""
NOTE_SETTINGS: tuple[tuple[str, dict[str, object]], ...] = (
    (r"\bliger\b|own cuda kernels|fused kernels",
     {"fused_norms": True, "fused_rope": True, "fused_activation": True, "loss_bytes": 12.0}),
    (r"rms ?(norm)? kernel|fused[ _-]?(rms|layer)?[ _-]?norm|apex",
     {"fused_norms": True}),
    (r"fused[ _-]?(rope|rotary)", {"fused_rope": True}),
    (r"fused[ _-]?(swiglu|geglu|silu|activation|gate)", {"fused_activation": True}),
    (r"fused[ _-]?(linear )?cross[ _-]entropy", {"loss_bytes": 12.0}),
    (_TE_CROSS_ENTROPY, {"loss_bytes": 12.0}),
    (r"unfused norm|no fused (rms|layer)?[ -]?norm|fused_(rms|layer)_?norm ?= ?false",
     {"fused_norms": False}),
    (_FUSED_ATTENTION, {"flash_attention": True}),
    (_UNFUSED_ATTENTION, {"flash_attention": False}),
    (_FUSED_ATTENTION, {"skips_masked": True}),
    (r"flash.?att(entio)?n.?[34]\b|\bfa[34]\b|cudnn[ _-](flash|attention)", {"attention_kernel": "native"}),
    (r"flash.?att(entio)?n.?v?2\b|flash v2|\bfa2\b|zigzag|flex[ _-]?attention",
     {"attention_kernel": "flash-2", "skips_masked": True}),
    (r"flash.?attention.?1|triton attention", {"attention_kernel": "flash-1", "skips_masked": True}),
    (rf"{_EXCHANGE} (comm\w* )?overlap|overlap\w* (of )?{_EXCHANGE}", {"overlap_ep": True}),
    (r"fp8 dispatch|dispatch in fp8", {"fp8_dispatch": True}),
    (r"all-?to-?all (token )?dispatcher|dispatcher all-?to-?all|(?<!default )\balltoall\b",
     {"one_copy_per_node": False}),
    (r"deepep|hybridep", {"one_copy_per_node": True}),
    (r"cuda_launch_blocking=1", {"blocking_launches": True}),
    (r"cuda[ _-]?graphs?\b", {"cuda_graphs": True}),
    (r"cuda[ _-]?graphs?[^;.]*(attn|attention|router|scope)", {"cuda_graphs": False}),
    (r"no overlap|overlap off", {"overlap_grad_reduce": False, "overlap_param_gather": False}),
)  # fmt: skip
"""What notes say about kernels and overlap, and the settings of the profile for it."""


def _logits(size: float) -> dict[str, object]:
    """The settings for this many bytes for each logit."""
    return {"logit_bytes": size, "split_logit_bytes": size, "compiled_logit_bytes": size}


_CHUNKED_LOGITS: dict[str, object] = {**_logits(0.5), "gathers_logits": False}
_CHUNKED_LOSS = (
    r"chunked[ _-](loss|logits|cross|nll)|loss (is )?computed in chunks|fused[ _]linear[ _]c|"
    r"no full logits|logits (are )?(not|never) materiali[sz]ed"
)
_ALL_IN_16_BITS = (
    r"(bf16|bfloat16) (for )?(param|weight)((?!fp32|float32|master)[^;.])*(moment|state)"
    r"(?!\w* (in|as) (fp32|float32))"
)
NOTE_STATE_TYPES: tuple[tuple[str, dict[str, object]], ...] = (
    (_FUSED_ATTENTION, {"fused_attention": True}),
    (_UNFUSED_ATTENTION, {"fused_attention": False}),
    (rf"pure bf16|bf16 master|adamw?_?bf16|{_ALL_IN_16_BITS}|param\w* and optimizer states? (in |are )?bf16",
     {"master_weights": True, "master_bytes": 0.0, "gradient_bytes": 2.0, "moment_bytes": 2.0}),
    (r"bf16 states", {"moment_bytes": 2.0, "master_bytes": 0.0}),
    (r"bf16 (moments|optimizer)", {"moment_bytes": 2.0}),
    (r"8-?bit (adam|optimizer)|adamw?_?8bit", {"moment_bytes": 1.0}),
    (r"(fp32|float32) grad", {"gradient_bytes": 4.0}),
    (r"\bliger\b", _CHUNKED_LOGITS),
    (r"liger (ce|cross[- ]entropy)", _logits(2.0)),  # replaced by gradients
    (_CHUNKED_LOSS, _CHUNKED_LOGITS),
    (r"fused[ -]?cross[ -]entropy", _logits(4.0)),
    (_TE_CROSS_ENTROPY, _logits(2.0)),  # replaced by gradients
    (r"own cuda kernels|fused kernels",
     {**_logits(2.0), "gathers_logits": False}),
    (r"(bf16|16-bit) grad", {"gradient_bytes": 2.0}),
    (OFFLOADED_ACTIVATIONS.pattern, {"offloads_activations": True}),
)  # fmt: skip
"""Types of gradients, optimizer state and logits that notes name."""
NO_NORM_KERNEL_NAMED = re.compile(r"^flash_attention2$")
"""A note that lists the kernels of a run, without one for norms."""


MODULES = (
    ("mla_up_proj", r"(mla|kv|latent)?[_ -]?up[_ -]?proj"),
    ("layernorm", r"norm"),
    ("act", r"(moe_)?act\b|swiglu|gelu"),
)
"""Modules that are recomputed, and how rows name them."""
_RECOMPUTES = re.compile(r"recomput\w*( modules?| of)? ([^;.)]*)|([^;.]*?)(?: is| are)? recomputed")


def _recomputed_modules(cells: Cells) -> tuple[str, ...]:
    """The modules that a row says are recomputed: in its cell, or in its note."""
    found = find_stated(_RECOMPUTES, cells.note)
    said = "" if found is None or re.search(r"\bnot recomputed", found[0]) else found[0]
    text = f"{cells.text('recompute').lower()}; {said}"
    return tuple(name for name, pattern in MODULES if re.search(pattern, text))


def _apply_note(profile: Profile, cells: Cells) -> Profile:
    """The profile with the kernels and the overlap that the note names."""
    note = cells.note
    changes: dict[str, Any] = {}
    for pattern, settings in NOTE_SETTINGS:
        if cells.says(pattern):
            changes |= settings
    if few := _FEW_NODES.search(note):
        changes["max_nodes_per_token"] = float(few[1])
    if NO_NORM_KERNEL_NAMED.search(note):
        changes["fused_norms"] = False
    overlaps: bool | None = None
    if re.search(r"async[- ]?tp|tp[-_ ]comm[-_ ]overlap on|userbuffer", note):
        overlaps = True
    elif re.search(r"vanilla tp|no tp[-_ ]comm[-_ ]overlap", note):
        overlaps = False
    elif re.search(r"megatron-lm (core_)?v?\d", note):
        overlaps = False  # --tp-comm-overlap is off by default; NeMo's recipes turn it on
    if overlaps is not None and overlaps != profile.time.overlap_tp and (cells.optional("tp") or 1) > 1:
        cells.remark(f"tensor-parallel overlap {'on' if overlaps else 'off'}, from the note")
        changes["overlap_tp"] = overlaps
    changes = {key: value for key, value in changes.items() if getattr(profile.time, key) != value}
    kernels = sorted(set(changes) - {"overlap_tp"})
    if kernels:
        cells.remark("from the note: " + ", ".join(f"{key}={changes[key]}" for key in kernels))
    return _apply_states(
        dataclasses.replace(profile, time=dataclasses.replace(profile.time, **changes)), cells
    )


def _apply_states(profile: Profile, cells: Cells) -> Profile:
    """The profile with the types of state that the note names; our own rows have their exact ledger."""
    if profile.name == "meshwright":
        return profile
    changes: dict[str, Any] = {}
    for pattern, settings in NOTE_STATE_TYPES:
        if cells.says(pattern):
            changes |= settings
    if modules := _recomputed_modules(cells):
        cells.remark("recomputed: " + ", ".join(modules))
        profile = dataclasses.replace(
            profile, memory=dataclasses.replace(profile.memory, recomputed_modules=modules)
        )
    if changes.get("gradient_bytes", 0.0) < profile.memory.gradient_bytes and "16" not in cells.note:
        changes.pop("gradient_bytes", None)  # a float32 sum besides 16-bit gradients
    if changes.get("master_bytes") == 0 and changes.get("moment_bytes") == 2:
        # Weight, gradient and two moments are read, all but the gradient written, in 16 bits each.
        time = dataclasses.replace(profile.time, optimizer_bytes=min(14.0, profile.time.optimizer_bytes))
        profile = dataclasses.replace(profile, time=time)
    if not changes:
        return profile
    cells.remark("from the note: " + ", ".join(f"{key}={value:g}" for key, value in sorted(changes.items())))
    return dataclasses.replace(profile, memory=dataclasses.replace(profile.memory, **changes))


def read_precision(cells: Cells) -> str:
    """The GEMM precision.

    Raises:
        NotExpressedError: The cell names an unknown precision.
    """
    text = cells.text("precision").lower()
    if not text:
        cells.fill("precision", "bf16")
        return "bf16"
    if cells.says(r"(fp8|fp4) on (the )?attention( \w+)?( and lm_head)? only") and cells.optional("experts"):
        cells.remark(f"{text} in attention alone: predicted as bf16")
        return "bf16"
    kinds = (
        ("fp4", r"fp4|int4"),
        ("fp8", r"fp8|float8|e4m3|mx8"),
        ("bf16", r"bf16|bfloat"),
        ("fp16", r"fp16|half|float16"),
    )
    found = next((kind for kind, pattern in kinds if re.search(pattern, text)), None)
    if found:
        return found
    if re.search(r"fp32|tf32|float32", text):
        if "tf32" in text:
            cells.remark("precision tf32: predicted as fp32, without tensor cores")
        return "fp32"
    if re.search(r"amp|mixed|\b16\b", text):
        kind = "fp16" if (device_name(cells.text("gpu")) or "").startswith("V100") else "bf16"
        cells.remark(f"precision {text}: predicted as {kind}")
        return kind
    raise cells.cell_error("precision", "is none of fp32, fp16, bf16, fp8, fp4")


def read_recipe(cells: Cells, precision: str, profile: Profile) -> str:
    """The fp8 or fp4 recipe: from the cell or the note, else the framework's default."""
    if precision not in ("fp8", "fp4"):
        return ""
    text = f"{cells.text('precision')} {cells.note}".lower()
    found = [(match.start(), name) for pattern, name in RECIPES if (match := re.search(pattern, text))]
    if found:
        return min(found)[1]
    if precision == "fp4":
        recipe = "nvfp4"
    elif profile.name in ("composer-fsdp", "deepspeed-zero", "huggingface") or re.search(
        r"nemo 2[34]\.", f"{cells.text('source')} {cells.text('framework')}".lower()
    ):
        recipe = "delayed"
    else:
        recipe = "current"
    cells.fill("recipe", recipe)
    return recipe


def read_compiled(cells: Cells, precision: str, profile: Profile) -> bool:
    """Whether blocks were compiled: from the note; torchtitan compiles for float8 and async TP."""
    if cells.says(r"\beager\b"):
        return False
    named = cells.says(r"(torch[. ])?compil(ed?|ation)\b(?! from)")
    if named or re.search(COMPILES, cells.text("framework").lower()):
        return True
    about = f"{cells.note} {cells.text('source').lower()}"
    if profile.name.startswith("torchtitan") and (precision == "fp8" or re.search(r"async[- ]?tp", about)):
        cells.remark("compiled, as always with float8 or async TP")
        return True
    return False
