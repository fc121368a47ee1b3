"""Loads a ``Job`` from a TOML file and ``key.path=value`` overrides.

Overrides win over the file, the file over presets, presets over defaults. Paths in the file are relative to
its folder, and those in overrides to the working folder. Validation comes last, and one error reports all
mistakes.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_plural
from meshwright.spec.cluster import chip_of, count_cores, find_gpus, machine_memory_bytes
from meshwright.spec.hf_config import is_settled, merge_hf_config
from meshwright.spec.job import SYNTHETIC_IMAGES, Job
from meshwright.spec.job_keys import takes_text
from meshwright.spec.layout import DEGREES, V_SCHEDULES
from meshwright.spec.legality.table import find_problems
from meshwright.spec.model import READ_WITH
from meshwright.spec.paths import resolve_paths
from meshwright.spec.presets import preset_names, read_preset, suggest_preset
from meshwright.spec.validation_errors import JOB, translate_errors

Tree = dict[str, Any]

PLAN_KEY = "meshwright_plan"
"""A file with this key is a plan; it has the job under ``job``."""
LAYERS_ASSIGNED = "layers_assigned"
"""In a plan's predictions: whether the planner assigned the layers to stages."""

PRESET_IMAGE_DATA: Tree = {"data": {"path": SYNTHETIC_IMAGES}}
OTHER_FORMATS = (".json", ".yaml", ".yml")
"""Suffixes of configuration files in other formats."""
HF_CHECKED = ("model.", "data.seq_len")
"""Overrides of a plan after which the Hugging Face config is checked again."""

PRESET_JOB: Tree = {
    "data": {"path": "builtin:python-stdlib", "seq_len": 4096},
    "train": {"steps": 1000, "global_batch": 512, "precision": "bf16"},
}
"""The job of a bare model preset, for ``plan``."""

DECODER_PLACEHOLDERS: Tree = {
    "num_layers": 2**20,
    "hidden_size": 2**20,
    "num_heads": 2**10,
    "num_kv_heads": 2**10,
    "ffn_size": 2**20,
    "vocab_size": 2**20,
}
PLACEHOLDERS: Tree = {
    "model": {**DECODER_PLACEHOLDERS, "blocks": (2**20,), "num_classes": 2**20, "image_size": 2**10},
    "cluster": {
        "preset": "local",
        "device": "cpu",
        "devices_per_node": 2**20,
        "memory_bytes": 2**60,
        "memory_bytes_per_s": 1.0,
        "fp32_flops_per_s": 1.0,
        "bf16_flops_per_s": 1.0,
        "link_bytes_per_s": 1.0,
        "link_latency_s": 1.0,
    },
    "data": {"path": "-", "seq_len": 2**20},
    "train": {"steps": 2**40, "global_batch": 2**40},
}
"""Values for required keys that are missing or wrong, so that the other rules can still be checked.

Problems with these values are not reported.
"""


class SpecError(UserError):
    """A job that cannot run. It has the job if only legality rules forbid it."""

    def __init__(self, job: Job | None, *problems: Problem) -> None:
        super().__init__(*problems)
        self.job = job

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.job, *self.problems)


def load_job(
    source: str, overrides: Sequence[str] = (), on: str | None = None, *, to_run: bool = True
) -> Job:
    """Read a job file, a plan, or a model preset's name.

    Args:
        source: Path of a TOML file, or the name of a model preset.
        overrides: ``key.path=value`` texts, the last one wins.
        on: A cluster such as ``8x8xh100-sxm`` (nodes x devices x preset) instead of the job's.
        to_run: False for a job that is only planned: combinations that are not implemented yet are allowed.

    Raises:
        UserError: With all problems.
    """
    tree = read_tree(source)
    settled = is_settled(tree.get("model")) and not any(t.startswith(HF_CHECKED) for t in overrides)
    problems: list[Problem] = []
    if on is not None and (problem := apply_on(tree, on)):
        problems.append(problem)
    problems += [p for text in overrides if (p := apply_override(tree, text))]
    return build_job(tree, problems, settled, to_run=to_run)


def build_job(
    tree: Tree, problems: Sequence[Problem] = (), settled: bool = False, *, to_run: bool = True
) -> Job:
    """Fill in presets and defaults, then validate.

    Args:
        tree: The raw tables; relative paths start from the working folder.
        problems: Found earlier, to be reported too.
        settled: The model comes from a plan: its Hugging Face folder is not read again.
        to_run: False for a job that is only planned.
    """
    found = list(problems)
    tree = copy.deepcopy(tree)
    resolve_paths(tree, Path.cwd())
    found += _fill_presets(tree, settled)
    found += _settle_layout(tree)
    job, wrong = _validate(tree)
    found += wrong
    if job is not None and not found:
        found = find_problems(job, to_run)
        if found:
            raise SpecError(job, *found)
        return job
    # Validate again without the wrong keys, to report all problems at once.
    unsure = {p.path for p in found}
    unsure |= {path.rpartition(".")[0] for path in unsure if path.endswith((".preset", ".hf"))}
    unsure |= {"cluster" for path in unsure if path == "cluster.file"}
    checkable = job or _validate(_without(tree, {p.path for p in wrong}))[0]
    if checkable is not None:
        found += [
            p for p in find_problems(checkable, to_run) if not any(_is_about(p, path) for path in unsure)
        ]
    raise SpecError(None, *found)


def require_runnable(job: Job) -> None:
    """Refuse a job that was loaded for planning and cannot run.

    Raises:
        SpecError: With the problems, and the job to find the nearest layout that runs.
    """
    if found := find_problems(job):
        raise SpecError(job, *found)


def _is_about(problem: Problem, path: str) -> bool:
    """Whether a problem is about a key, or about a value in its table."""
    return re.search(rf"(?<![\w.]){re.escape(path)}(\.\w+)*=", str(problem)) is not None


def named_layout_keys(source: str, overrides: Sequence[str]) -> list[str]:
    """Keys of the layout that the user set, in the file or as overrides."""
    table = read_tree(source).get("layout")
    named = list(table) if isinstance(table, dict) else []
    return [
        *named,
        *(t.partition("=")[0].removeprefix("layout.") for t in overrides if t.startswith("layout.")),
    ]


def is_named(source: str, overrides: Sequence[str], key: str) -> bool:
    """Whether the user set a key ``section.name``, in the file or as an override."""
    section, _, name = key.partition(".")
    table = read_tree(source).get(section)
    in_file = isinstance(table, dict) and name in table
    return in_file or any(text.partition("=")[0] == key for text in overrides)


def read_tree(source: str) -> Tree:
    """The raw tables of a job file, of the job inside a plan, or of a bare model preset.

    Paths in the file are relative to its folder; here they become absolute.
    """
    path = Path(source)
    if not path.exists() and source in preset_names("models"):
        tree = {"name": source, "model": {"preset": source}, **copy.deepcopy(PRESET_JOB)}
        fields = read_preset("models", source)
        if isinstance(fields, dict) and fields.get("architecture") == "resnet":
            tree |= copy.deepcopy(PRESET_IMAGE_DATA)
        elif isinstance(fields, dict) and fields.get("positions") == "learned":
            tree["data"]["seq_len"] = min(PRESET_JOB["data"]["seq_len"], fields["max_positions"])
        return tree
    tree = _read_toml(path)
    if PLAN_KEY in tree:
        if not isinstance(tree.get("job"), dict):
            raise UserError(Problem("plan-unreadable", "is not a complete plan: it has no job", path=source))
        job = copy.deepcopy(tree["job"])
        resolve_paths(job, path.parent)
        if tree.get("predicted", {}).get(LAYERS_ASSIGNED):  # assigned again, as overrides may change the cost
            job.get("layout", {}).pop("stage_layers", None)
        return dict(job)
    resolve_paths(tree, path.parent)
    tree.setdefault("name", re.sub(r"[^\w.-]", "-", path.stem).lstrip(".-") or "job")
    return tree


def _read_toml(path: Path) -> Tree:
    if path.is_file() and (problem := other_format_problem(path)):
        raise UserError(problem)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(_missing_file(str(path))) from None
    except IsADirectoryError:
        raise UserError(_is_folder(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(Problem("job-unreadable", f"cannot be read: {reason}", path=str(path))) from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(Problem("job-bad-toml", f"is not TOML: {error}", path=str(path))) from None


def _missing_file(source: str) -> Problem:
    """A path is a file that is not there; a bare name may be meant as a model preset."""
    if Path(source).suffix in (".toml", *OTHER_FORMATS) or Path(source).name != source:
        fix = "Check the path, or write a job file with meshwright init"
        return Problem("job-missing-file", "is not a file", path=source, fix=fix)
    rule, fix = "is neither a file nor a model preset", suggest_preset("models", source)
    return Problem("job-missing-file", rule, path=source, fix=fix)


def _is_folder(path: Path) -> Problem:
    """A folder was given; it may hold job files, or the plan of a run."""
    files = [str(file) for file in sorted(path.glob("*.toml"))][:3]
    fix = f"Name a file: {' or '.join(files)}" if files else "Name a job file"
    return Problem("job-unreadable", "is a folder, not a job file", path=str(path), fix=fix)


def other_format_problem(path: Path) -> Problem | None:
    """The problem with a job file that is YAML or JSON by its name."""
    suffix = path.suffix.lower()
    if suffix not in OTHER_FORMATS:
        return None
    rule = f"is a {suffix[1:].upper()} file; job files are TOML"
    fix = "Write it as TOML, for example with meshwright init -o job.toml"
    fix += " (YAML reads 3e-4 as text)" if "y" in suffix else ""
    return Problem("job-not-toml", rule, path=str(path), fix=fix)


def apply_override(tree: Tree, text: str) -> Problem | None:
    """Apply one ``key.path=value`` to the tables; returns the problem, if any."""
    key, separator, value = text.partition("=")
    if not separator or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        return Problem(
            "job-bad-override",
            "is not of the form key.path=value",
            path=text,
            fix="For example train.lr=3e-4",
        )
    table: Any = tree
    *parents, leaf = key.split(".")
    for depth, parent in enumerate(parents):
        if isinstance(table, list) or parent.isdigit():
            rows = table if isinstance(table, list) else []
            if not parent.isdigit() or int(parent) >= len(rows):
                return _wrong_row(key, ".".join(parents[:depth]), len(rows))
            table = rows[int(parent)]
        else:
            table = table.setdefault(parent, {})
        if not isinstance(table, dict | list):
            return Problem("job-bad-override", f"cannot be set: {parent} is not a table", path=key)
    if isinstance(table, list):
        return _wrong_row(key, ".".join(parents), len(table))
    table[leaf] = value if takes_text(key.split(".")) and value[:1] not in "'\"" else _parse_value(value)
    return None


def _wrong_row(key: str, name: str, count: int) -> Problem:
    """A key inside a list of tables needs the number of one of them."""
    rule = f"cannot be set: {name} is a list of {format_plural(count, 'table')}"
    fix = f"Write {name}.0.KEY=VALUE for the first one" if count else f"Write [[{name}]] in the job file"
    return Problem("job-bad-override", rule, path=key, fix=fix)


def _parse_value(text: str) -> Any:
    """A TOML value, or the text itself, so that ``bf16`` needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def apply_on(tree: Tree, on: str) -> Problem | None:
    """Set the cluster from a text such as ``8x8xh100-sxm``; returns the problem, if any."""
    match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?([a-z][\w.-]*)", on.lower())
    if match is not None and any(count is not None and int(count) == 0 for count in match.groups()[:2]):
        rule = "needs at least 1 node" if int(match[1]) == 0 else "needs at least 1 device per node"
        return Problem(
            "cluster-bad-on",
            rule,
            path="on",
            value=on,
            fix="Write, for example, 1x8xh100-sxm",
            is_argument=True,
        )
    if match is None:
        fix = "Write nodes x devices x preset, such as 8x8xh100-sxm, or a preset alone"
        return Problem("cluster-bad-on", "is not a cluster", path="on", value=on, fix=fix, is_argument=True)
    nodes, devices, preset = match.groups()
    if devices is None:
        nodes, devices = _spread(preset, nodes)
    tree["cluster"] = {"preset": preset}
    if nodes is not None:
        tree["cluster"]["nodes"] = int(nodes)
    if devices is not None:
        tree["cluster"]["devices_per_node"] = int(devices)
    return None


def _spread(preset: str, count: str | None) -> tuple[str | None, str | None]:
    """Nodes and devices per node for a device count; counts above one node must fill whole nodes."""
    fields = read_preset("clusters", preset)
    if count is None or isinstance(fields, Problem) or preset == "local":
        return None, count
    nodes, rest = divmod(int(count), fields["devices_per_node"])
    return (None, count) if nodes <= 1 or rest else (str(nodes), None)


def _fill_presets(tree: Tree, settled: bool) -> list[Problem]:
    """Fill in model and cluster from presets or a Hugging Face config."""
    problems: list[Problem] = []
    model = tree.get("model")
    if isinstance(model, dict) and isinstance(model.get("hf"), str) and model["hf"] and not settled:
        filled, problems = merge_hf_config(model, _table(tree, "data").get("seq_len"))
        tree["model"] = model = {**(DECODER_PLACEHOLDERS if problems else {}), **filled}
    if isinstance(model, dict) and isinstance(model.get("preset"), str):
        fields = read_preset("models", model["preset"])
        if isinstance(fields, Problem):
            problems.append(fields)
            fields = DECODER_PLACEHOLDERS
        tree["model"] = model = _merge_preset(fields, model)
    data = tree.get("data")
    if isinstance(data, dict) and data.get("sources"):
        data.setdefault("path", "")
    if isinstance(model, dict) and model.get("architecture") == "resnet" and isinstance(data, dict):
        data.setdefault("seq_len", 1)  # a sample is one image with one target
    cluster = tree.setdefault("cluster", {})
    if not isinstance(cluster, dict) or PLACEHOLDERS["cluster"].keys() - {"preset"} <= cluster.keys():
        return problems  # complete, as in a plan
    if "file" in cluster:
        base = _read_cluster_file(str(cluster["file"]))
    else:
        base = read_preset("clusters", str(cluster.setdefault("preset", "local")))
        if cluster["preset"] == "local" and isinstance(base, dict):
            base = {**base, **_this_machine(str(cluster.get("device", "auto")))}
    if isinstance(base, Problem):
        problems.append(base)
        base = PLACEHOLDERS["cluster"]
    tree["cluster"] = {**base, **cluster}
    return problems


def _merge_preset(preset: Tree, model: Tree) -> Tree:
    """The model's keys over its preset, without preset keys that have no effect with them."""
    unread = {key for key, (other, needed) in READ_WITH.items() if model.get(other, needed) != needed}
    own = {key: value for key, value in model.items() if key not in unread or value != preset.get(key)}
    return {key: value for key, value in preset.items() if key not in unread} | own


def _table(tree: Tree, name: str) -> Tree:
    found = tree.get(name)
    return found if isinstance(found, dict) else {}


def _read_cluster_file(name: str) -> Tree | Problem:
    """The fields of a cluster file, over those of the preset that it names, if any."""
    try:
        fields = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Problem("cluster-file-unreadable", f"cannot be read: {error}", path="cluster.file", value=name)
    if not isinstance(fields.get("preset"), str):
        return fields
    preset = read_preset("clusters", fields["preset"])
    return preset if isinstance(preset, Problem) else {**preset, **fields}


def _this_machine(device: str) -> Tree:
    """Devices and memory of this machine, and the rates of a known GPU."""
    gpus = find_gpus() if device != "cpu" else []
    if gpus:
        name, memory_bytes = gpus[0]
        return {
            **_figures_of(name, memory_bytes),
            "device": "cuda",
            "device_name": name,
            "devices_per_node": len(gpus),
            "memory_bytes": memory_bytes,
            "host_memory_bytes": machine_memory_bytes() // len(gpus),
        }
    cores = count_cores()
    return {"devices_per_node": cores, "memory_bytes": machine_memory_bytes() // cores}


_VARIANT = re.compile(r"\b(ti|super|laptop|max-q|mig|ada)\b", re.IGNORECASE)
"""Names of GPUs that have less or more than the preset of their chip: `RTX 3090 Ti`, `A100 MIG 1g.5gb`."""


def _figures_of(gpu: str, memory_bytes: int) -> Tree:
    """The preset with this GPU's chip: of the same form factor, then of the nearest memory size, SXM first.

    Empty if no preset has the chip, and for variants of a chip and parts of a GPU.
    """
    if _VARIANT.search(gpu):
        return {}
    presets = [read_preset("clusters", name) for name in preset_names("clusters")]
    known = [p for p in presets if isinstance(p, dict) and chip_of(str(p["device_name"])) == chip_of(gpu)]

    def distance(preset: Tree) -> tuple[bool, float, bool]:
        name = str(preset["device_name"])
        nearest = abs(preset["memory_bytes"] - memory_bytes)
        return _card_form(name) != _card_form(gpu), nearest, "SXM" not in name

    return min(known, key=distance, default={})


def _card_form(device_name: str) -> str:
    """The form factor of a PCIe card: `PCI` or `NVL` (with NVLink bridges); empty for other devices."""
    return next((form for form in ("PCI", "NVL") if form in device_name.upper()), "")


def _settle_layout(tree: Tree) -> list[Problem]:
    """Any degree makes the layout given; dp_shard without zero means ZeRO-3; V schedules have two stages."""
    layout = tree.get("layout")
    if not isinstance(layout, dict):
        return []
    named = [key for key in DEGREES if key in layout]
    if named and layout.get("mode") == "auto":
        rule = f"leaves the degrees to the planner, but layout.{named[0]} is given"
        fix = f"Leave out layout.mode, or {', '.join('layout.' + n for n in named)}"
        return [Problem("layout-auto-with-degrees", rule, path="layout.mode", value="auto", fix=fix)]
    if named:
        layout["mode"] = "given"
    if isinstance(layout.get("dp_shard"), int) and layout["dp_shard"] > 1:
        layout.setdefault("zero", 3)
    if layout.get("schedule") in V_SCHEDULES and layout.get("pp", 1) != 1:
        layout.setdefault("virtual_stages", 2)
    return []


def _validate(tree: Tree) -> tuple[Job | None, list[Problem]]:
    try:
        return JOB.validate_python(tree), []
    except ValidationError as error:
        return None, translate_errors(error)


def _without(tree: Tree, paths: Collection[str]) -> Tree:
    """The tables without some keys; required ones get placeholders, so that the rest can be validated."""
    pruned = copy.deepcopy(tree)
    for path in paths:
        *parents, leaf = path.split(".")
        table: Any = pruned
        placeholder: Any = PLACEHOLDERS
        for parent in parents:
            table = table.get(parent, {}) if isinstance(table, dict) else {}
            placeholder = placeholder.get(parent, {})
        if isinstance(table, dict):
            table.pop(leaf, None)
            if leaf in placeholder:
                table[leaf] = placeholder[leaf]
    return {key: value for key, value in pruned.items() if value != {} or key in PLACEHOLDERS}


def job_tree(job: Job) -> Tree:
    """A job as plain tables without None values, for TOML."""
    return drop_none(dataclasses.asdict(job))


def drop_none(tree: Tree) -> Tree:
    """The tables without keys that are None, at any depth: TOML has no null."""
    return {k: _plain(v) for k, v in tree.items() if v is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return drop_none(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
