"""The software of a published run: framework profile, fp8 recipe, options from the note."""

from __future__ import annotations

import dataclasses
import re

from meshwright.plan.profiles import PROFILES, Profile
from meshwright.validation.cells import Cells
from meshwright.validation.devices import device_name

OLD_DEVICES = ("A100", "A800", "V100")
"""Devices of the years before Megatron had fused attention."""
FASTER_MOE_RELEASE = (26, 6)
"""Year and month of the Megatron Bridge release with faster MoE layers."""
FUSED_GRAD_ACCUMULATION_SINCE = 2205
"""Year and month of the first papers whose Megatron fused gradient accumulation into GEMMs."""
FLASH_ATTENTION_SINCE = 2306
"""Year and month of the first papers whose Megatron had fused attention."""
PROFILE_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"megatron.*deepspeed|deepspeed.*megatron|gpt-?neox", "megatron-deepspeed"),
    (r"deepspeed|zero(?:-?infinity|\+\+)?$|colossal", "deepspeed-zero"),
    (r"titan|fsdp-?2|torchtune|simple-?fsdp", "torchtitan"),
    (r"composer|foundry|fsdp|metaseq|fairseq|accelerate|lightning|lit-?gpt|transformers", "composer-fsdp"),
    (r"hugging.?face|olmo|pytorch|axolotl|llama-?factory|xtuner|unsloth", "composer-fsdp"),
    (r"meshwright", "meshwright"),
    (r"bridge|nemo", "megatron-bridge"),
    (r"megatron-?core|mcore|megascale|nanotron|pai-", "megatron-core"),
)
"""Framework names and the nearest profile (first match wins); plain `megatron` is decided by date."""
HAS_PROFILE = re.compile(r"megatron|deepspeed|composer|foundry|titan|meshwright", re.IGNORECASE)
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
    newer devices and papers use the FSDP profile.
    """
    name = framework.lower()
    found = next((profile for pattern, profile in PROFILE_PATTERNS if re.search(pattern, name)), None)
    gpu = device_name(gpu) or gpu
    if found == "torchtitan" and re.search(r"20(2[5-9]|[3-9]\d)-?\d\d", source):
        return PROFILES["torchtitan-2025"]
    dated = re.search(r"arxiv[ :]*(\d{4})\.\d{4,5}", source.lower())
    recent = (
        int(dated[1]) >= FLASH_ATTENTION_SINCE
        if dated
        else bool(re.search(r"nemo|megatron-core|mcore", source.lower()))
    )
    old = gpu.upper().startswith(OLD_DEVICES) and not recent
    if found == "deepspeed-zero" and not old:
        return PROFILES["composer-fsdp"]
    if found:
        return PROFILES[found]
    release = re.search(r"\b(2\d)\.(\d\d)[\d.]* nemo container", source.lower())
    if release:
        late = (int(release[1]), int(release[2])) >= FASTER_MOE_RELEASE
        return PROFILES["megatron-bridge-26.06" if late else "megatron-bridge"]
    if re.search(r"nemo|bridge", source.lower()) and not gpu.upper().startswith(OLD_DEVICES):
        return PROFILES["megatron-bridge"]
    if old and zero == 3:
        return PROFILES["deepspeed-zero"]
    if not re.search(r"megatron|meta", name) and zero in (2, 3):
        return PROFILES["composer-fsdp" if old else "torchtitan"]
    if old:
        return PROFILES[
            "megatron-lm-2022" if dated and int(dated[1]) >= FUSED_GRAD_ACCUMULATION_SINCE else "megatron-lm"
        ]
    return PROFILES["megatron-core"]


def read_profile(cells: Cells) -> Profile:
    """The profile of a row, with options from its note."""
    framework = cells.text("framework")
    profile = choose_profile(framework, cells.text("gpu"), cells.text("source"), cells.optional("zero_stage"))
    if not framework:
        cells.fill("framework", profile.name)
    elif not HAS_PROFILE.search(framework):
        cells.remark(f"framework {framework}: predicted as {profile.name}, the nearest profile")
    elif profile.name == "composer-fsdp" and "deepspeed" in framework.lower():
        cells.remark("DeepSpeed of these years: predicted as composer-fsdp, the nearest profile")
    elif profile.name == "deepspeed-zero" and "deepspeed" not in framework.lower():
        cells.remark("ZeRO-3 with Megatron of these years: predicted as deepspeed-zero")
    return _apply_note(profile, cells)


def _apply_note(profile: Profile, cells: Cells) -> Profile:
    note = cells.note
    overlaps: bool | None = None
    if re.search(r"async[- ]?tp|tp[-_ ]comm[-_ ]overlap on|userbuffer", note):
        overlaps = True
    elif re.search(r"vanilla tp|no tp[-_ ]comm[-_ ]overlap", note):
        overlaps = False
    elif re.search(r"megatron-lm (core_)?v?\d", note):
        overlaps = False  # --tp-comm-overlap is off by default; NeMo's recipes turn it on
    if overlaps is None or overlaps == profile.time.overlap_tp or (cells.optional("tp") or 1) == 1:
        return profile
    cells.remark(f"tensor-parallel overlap {'on' if overlaps else 'off'}, from the note")
    return dataclasses.replace(profile, time=dataclasses.replace(profile.time, overlap_tp=overlaps))


def read_precision(cells: Cells) -> str:
    """The GEMM precision.

    Raises:
        NotExpressedError: The cell names an unknown precision.
    """
    text = cells.text("precision").lower()
    if not text:
        cells.fill("precision", "bf16")
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
        return "fp32"
    if re.search(r"amp|mixed|\b16\b", text):
        cells.remark(f"precision {text}: predicted as bf16")
        return "bf16"
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
    elif profile.name in ("composer-fsdp", "deepspeed-zero") or re.search(
        r"nemo 2[34]\.", cells.text("source").lower()
    ):
        recipe = "delayed"
    else:
        recipe = "current"
    cells.fill("recipe", recipe)
    return recipe


def read_compiled(cells: Cells, precision: str, profile: Profile) -> bool:
    """Whether blocks were compiled: from the note; torchtitan compiles for float8 and async TP."""
    if re.search(r"(no|without|not) compiled?\b|eager", cells.note):
        return False
    if "compile" in cells.note:
        return True
    about = f"{cells.note} {cells.text('source').lower()}"
    if profile.name.startswith("torchtitan") and (precision == "fp8" or re.search(r"async[- ]?tp", about)):
        cells.remark("compiled, as always with float8 or async TP")
        return True
    return False
