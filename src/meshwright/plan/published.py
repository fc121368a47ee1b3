"""Published measured runs: a CSV row as a workload and a layout, with every blank that had to be filled."""

from __future__ import annotations

import csv
import dataclasses
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from meshwright.core.errors import Problem, UserError
from meshwright.plan.estimate.profiles import PROFILES, Profile
from meshwright.plan.estimate.workload import Workload
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.model import DecoderModel

COLUMNS = (
    "id", "model_name", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len", "gpu",
    "num_gpus", "tp", "pp", "dp", "cp", "ep", "interleave", "zero_stage", "micro_batch", "global_batch", "recompute",
    "sequence_parallel", "precision", "step_time_s", "memory_gb_per_gpu", "confidence", "note", "framework",
)  # fmt: skip
"""Columns that a table must have; others are read where they are there."""
OLD_DEVICES = ("A100", "V100")
"""Devices of the years in which Megatron had no fused attention."""
GATED = re.compile(r"llama|qwen|mistral|mixtral|deepseek|kimi|gemma|oss|baichuan|yi-", re.IGNORECASE)
"""Models whose feed-forward is gated, where the parameter count does not say."""
_LATENT = {"attention": "latent", "latent_size": 512, "query_latent_size": 1536, "rope_head_dim": 64,
           "head_dim": 128, "value_head_dim": 128}  # fmt: skip
"""Sizes of multi-head latent attention in DeepSeek V2, V3 and Kimi K2."""


class NotExpressed(Exception):
    """A row that leaves out what no default can stand for; the message is the reason."""


@dataclass(frozen=True)
class Case:
    """One published run that can be predicted."""

    id: str
    workload: Workload
    layout: Layout
    step_s: float | None
    memory_bytes: float | None
    confidence: str
    filled: tuple[str, ...]
    """Blanks and what they were taken for."""

    @property
    def family(self) -> str:
        """The row's id without its trailing number."""
        return family_of(self.id)

    @property
    def gates(self) -> bool:
        """Whether the row counts in a verdict; the others inform."""
        return self.confidence == "found"


@dataclass(frozen=True)
class Row:
    """A row as it was read: a case, or the reason why there is none."""

    id: str
    case: Case | None
    reason: str
    step_s: float | None
    memory_bytes: float | None


def family_of(row_id: str) -> str:
    """A row's id without its trailing number."""
    return re.sub(r"-?\d+$", "", row_id)


def read_rows(path: Path) -> list[Row]:
    """Every row of a table; a bad cell costs its row, not the table.

    Raises:
        UserError: The file is not a table of runs.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                rule = f"has no column {', '.join(missing)}"
                raise UserError(Problem("validate-columns", rule, path=str(path), fix="See docs/validate.md"))
            return [_read_row(number, cells) for number, cells in enumerate(reader, start=2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(Problem("validate-unreadable", f"cannot be read: {error}", path=str(path))) from None


class _Cells:
    """The cells of one row, read by kind; remembers which blanks were filled."""

    def __init__(self, number: int, cells: dict[str, str | None]) -> None:
        self.number, self.cells = number, cells
        self.filled: list[str] = []

    def text(self, name: str) -> str:
        return (self.cells.get(name) or "").strip()

    def number_of(self, name: str) -> float | None:
        text = self.text(name)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 < value < float("inf") and not (
            value == 0 and name in ("zero_stage", "shared_experts", "dense_layers")
        ):
            raise NotExpressed(
                f"bad cell in line {self.number}, column {name}: {text!r} is not a positive number"
            )
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.number_of(name)
        if value is None and default is None:
            raise NotExpressed(f"{name} not published")
        if value is None:
            assert default is not None
            self.filled.append(f"{name} taken as {default}")
            return default
        if value != int(value):
            raise NotExpressed(
                f"bad cell in line {self.number}, column {name}: {value} is not a whole number"
            )
        return int(value)

    def optional(self, name: str) -> int | None:
        return self.count(name) if self.text(name) else None


def _read_row(number: int, raw: dict[str, str | None]) -> Row:
    cells = _Cells(number, raw)
    row_id = cells.text("id") or f"line {number}"
    step_s = memory = None
    try:
        step_s, memory_gb = cells.number_of("step_time_s"), cells.number_of("memory_gb_per_gpu")
        memory = None if memory_gb is None else memory_gb * 1e9
        case = _build_case(cells, row_id, step_s, memory)
    except NotExpressed as reason:
        return Row(row_id, None, str(reason), step_s, memory)
    return Row(row_id, case, "; ".join(case.filled), step_s, memory)


def _build_case(cells: _Cells, row_id: str, step_s: float | None, memory: float | None) -> Case:
    cluster = _build_cluster(cells)
    profile = choose_profile(cells.text("framework"), cells.text("gpu"))
    model = _build_model(cells)
    layout = _build_layout(cells, profile)
    note = cells.text("note").lower()
    workload = Workload(
        model=model,
        cluster=cluster,
        seq_len=cells.count("seq_len"),
        global_batch=_global_batch(cells, layout),
        precision=cells.text("precision") or "bf16",
        profile=profile,
        recipe=_recipe(note),
        compiled="compile" in note,
    )
    return Case(row_id, workload, layout, step_s, memory, cells.text("confidence"), tuple(cells.filled))


def _recipe(note: str) -> str:
    found = re.search(r"recipe ([\w-]+)", note)
    if found:
        return found[1]
    return next((name for name in ("rowwise", "tensorwise", "delayed") if name in note), "")


def choose_profile(framework: str, gpu: str) -> Profile:
    """The profile of a framework's name; Megatron's by the device's years."""
    name = framework.lower()
    if "deepspeed" in name:
        return PROFILES["megatron-deepspeed" if "megatron" in name else "deepspeed-zero"]
    if "composer" in name or "foundry" in name:
        return PROFILES["composer-fsdp"]
    if "titan" in name or "fsdp" in name:
        return PROFILES["torchtitan"]
    if gpu.startswith(OLD_DEVICES):
        return PROFILES["megatron-lm"]
    return PROFILES["megatron-core"]


def load_devices() -> Iterator[tuple[str, Cluster]]:
    """Cluster presets by the name of their device."""
    folder = resources.files("meshwright.spec").joinpath("presets/clusters")
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        tree = tomllib.loads(entry.read_text(encoding="utf-8"))
        if tree.get("device") == "cuda" and tree.get("device_name"):
            yield str(tree["device_name"]), Cluster(**{"preset": entry.name.removesuffix(".toml"), **tree})


def _build_cluster(cells: _Cells) -> Cluster:
    gpu, devices = cells.text("gpu"), cells.count("num_gpus")
    known = dict(load_devices())
    cluster = known.get(gpu)
    if cluster is None:
        raise NotExpressed(f"no figures for the device {gpu!r}")
    nic = cells.number_of("nic_gbytes_per_s_per_gpu")
    per_node = min(devices, cluster.devices_per_node)
    return dataclasses.replace(
        cluster,
        devices_per_node=per_node,
        nodes=-(-devices // per_node),
        nic_bytes_per_s=nic * 1e9 if nic else cluster.nic_bytes_per_s,
    )


def _build_model(cells: _Cells) -> DecoderModel:
    width, name = cells.count("hidden"), cells.text("model_name")
    attention = cells.text("attention").lower()
    ffn = cells.optional("ffn_hidden")
    gated = bool(GATED.search(name))
    if ffn is None:
        ffn = -(-width * 8 // 3 // 256) * 256 if gated else 4 * width
        cells.filled.append(f"ffn_hidden taken as {ffn}")
    heads = cells.optional("heads")
    if heads is None:
        tp = cells.count("tp", 1)
        heads = next((n for n in (width // 128, 64, 48, 80, 96) if n and width % n == 0 and n % tp == 0), tp)
        cells.filled.append(f"heads taken as {heads}")
    fields: dict[str, object] = {
        "num_layers": cells.count("layers"),
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": cells.count("kv_heads", heads),
        "ffn_size": ffn,
        "vocab_size": cells.count("vocab", 51200),
        "head_dim": None if width % heads == 0 else -(-width // heads),
    }
    if cells.optional("experts"):
        fields |= {
            "num_experts": cells.count("experts"),
            "experts_per_token": cells.count("top_k", 2),
            "expert_ffn_size": cells.count("moe_ffn", ffn),
            "shared_experts": cells.count("shared_experts", 0),
            "dense_layers": cells.count("dense_layers", 0),
        }
    if "mla" in attention:
        fields |= _LATENT
    if found := re.search(r"sliding(\d+)(?:/(\d+))?", attention):
        fields |= {"window": int(found[1]), "window_every": int(found[2] or 1)}
    if head := HEAD_DIMS.get(_plain(name)):
        fields["head_dim"] = head
    return _choose_parts(fields, gated, cells.number_of("params_b"))


HEAD_DIMS = {"gptoss120b": 64, "gptoss20b": 64, "qwen330ba3b": 128, "qwen3235ba22b": 128}
"""Published head widths that are not hidden / heads."""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _choose_parts(fields: dict[str, object], gated: bool, params_b: float | None) -> DecoderModel:
    """GPT parts or Llama parts: by the published parameter count where it decides, else by the name."""
    del params_b
    llama = DecoderModel(**fields)  # type: ignore[arg-type]
    if gated:
        return llama
    return dataclasses.replace(
        llama,
        positions="learned",
        max_positions=2048,
        norm="layer",
        activation="gelu",
        attention_bias=True,
        ffn_bias=True,
        tied_embeddings=True,
    )


def _build_layout(cells: _Cells, profile: Profile) -> Layout:
    devices = cells.count("num_gpus")
    tp, pp, cp = cells.count("tp"), cells.count("pp"), cells.count("cp", 1)
    ep = cells.count("ep", 1)
    rest = devices // (tp * pp * cp)
    dp = cells.count("dp", max(rest, 1))
    if tp * pp * cp * dp != devices:
        raise NotExpressed(f"degrees multiply to {tp * pp * cp * dp}, not to {devices} devices")
    zero = cells.optional("zero_stage")
    if zero is None:
        zero = 1 if profile.name == "megatron-core" else 0
        cells.filled.append(f"zero_stage taken as {zero}")
    virtual = cells.count("interleave", 1)
    recompute = cells.text("recompute")
    if not recompute:
        recompute = "none"
        cells.filled.append("recompute taken as none")
    if recompute not in ("none", "selective", "full"):
        raise NotExpressed(f"bad cell in line {cells.number}, column recompute: {recompute!r}")
    sharded = zero > 0 and dp > 1
    return Layout(
        mode="given",
        pp=pp,
        dp_replicate=1 if sharded else dp,
        dp_shard=dp if sharded else 1,
        cp=cp,
        tp=tp,
        ep=ep,
        zero=zero if sharded else 0,
        sequence_parallel=tp > 1 and cells.text("sequence_parallel") in ("y", "yes", "true", "1"),
        schedule="interleaved" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
        micro_batch=cells.count("micro_batch", 1),
        recompute=recompute,  # type: ignore[arg-type]
    )


def _global_batch(cells: _Cells, layout: Layout) -> int:
    return cells.count("global_batch", layout.data_degree * (layout.micro_batch or 1))
