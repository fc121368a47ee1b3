"""The JSON Schema has every key with a description; sections are frozen dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import tomllib
import typing
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from meshwright.spec.job import (
    Checkpoint,
    Cluster,
    Compression,
    Consistency,
    Data,
    Elastic,
    EvalSet,
    Job,
    Layout,
    Source,
    Train,
)
from meshwright.spec.job_keys import section_type
from meshwright.spec.json_schema import job_schema
from meshwright.spec.load import SpecError, build_job, load_job
from meshwright.spec.model import DecoderModel, ResNetModel
from meshwright.spec.probed import AttentionTime, CollectiveTime, GemmTime, OperationTimes, Probed

EXAMPLES = Path(__file__).parents[3] / "examples"
SECTIONS = (
    DecoderModel,
    ResNetModel,
    Cluster,
    Data,
    Source,
    EvalSet,
    Train,
    Layout,
    Checkpoint,
    Elastic,
    Consistency,
    Compression,
    Probed,
    OperationTimes,
    GemmTime,
    AttentionTime,
    CollectiveTime,
)


@pytest.fixture(scope="module")
def schema():
    """The JSON Schema of a job file."""
    return job_schema()


def test_schema_is_json_and_names_its_dialect(schema):
    assert json.loads(json.dumps(schema)) == schema
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False


def test_loading_a_job_parses_no_source(monkeypatch):
    """Pydantic would parse that of every section for its docstrings: two thirds of its time."""

    def read(section):
        raise AssertionError(f"the source of {section} is read")

    monkeypatch.setattr(inspect, "getsourcelines", read)
    assert TypeAdapter(Job).core_schema


def test_every_reference_in_the_schema_resolves(schema):
    def references(node):
        if isinstance(node, dict):
            if "$ref" in node:
                yield node["$ref"]
            for child in node.values():
                yield from references(child)
        elif isinstance(node, list):
            for child in node:
                yield from references(child)

    found = set(references(schema))
    assert found == {f"#/$defs/{section.__name__}" for section in SECTIONS}
    assert set(schema["$defs"]) == {section.__name__ for section in SECTIONS}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.__name__)
def test_schema_describes_every_key_of_a_section(schema, section):
    keys = schema["$defs"][section.__name__]["properties"]
    assert set(keys) == {field.name for field in dataclasses.fields(section)}
    assert [name for name, key in keys.items() if not key.get("description")] == []
    assert schema["$defs"][section.__name__]["additionalProperties"] is False


def test_schema_has_every_table(schema):
    assert set(schema["properties"]) == {field.name for field in dataclasses.fields(Job)}
    assert schema["required"] == ["model", "data", "train"], "the cluster defaults to local"


def test_schema_does_not_require_keys_of_presets(schema):
    assert "required" not in schema["$defs"]["DecoderModel"]
    assert "required" not in schema["$defs"]["Cluster"]
    assert set(schema["$defs"]["Train"]["required"]) == {"steps", "global_batch"}


@pytest.mark.parametrize("example", sorted(EXAMPLES.rglob("*.toml")), ids=lambda path: path.stem)
def test_examples_have_required_keys_and_no_unknown_ones(schema, example):
    """Editors check job files against the schema, so it must accept the examples."""
    tree = tomllib.loads(example.read_text())
    assert set(schema["required"]) <= set(tree) <= set(schema["properties"])
    for name, table in tree.items():
        if not isinstance(table, dict):
            continue
        key = schema["properties"][name]
        kinds = [r["$ref"].rpartition("/")[2] for r in (key, *key.get("anyOf", ())) if "$ref" in r]
        found = [schema["$defs"][kind] for kind in kinds]
        assert any(set(d.get("required", ())) <= set(table) <= set(d["properties"]) for d in found), name


@pytest.mark.parametrize("example", sorted((EXAMPLES / "plan").glob("*.toml")), ids=lambda path: path.stem)
def test_planning_examples_are_legal_and_use_the_devices_in_their_name(example):
    job = load_job(str(example), to_run=False)
    devices = {"512-gpus-three-axes": 512, "7b-finetune-4x24gb": 4}.get(example.stem)
    if devices is None:
        devices = int(re.search(r"(\d+)x[ah]100", example.stem)[1])
    assert job.cluster.world_size == devices
    assert job.layout.mode == "auto" or job.layout.world_size == devices


def test_schema_has_limits_and_choices(schema):
    layout = schema["$defs"]["Layout"]["properties"]
    assert layout["tp"]["minimum"] == 1
    assert (layout["zero"]["minimum"], layout["zero"]["maximum"]) == (0, 3)
    assert layout["mode"]["enum"] == ["auto", "given"]
    assert layout["schedule"]["enum"] == ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe-v"]


@pytest.mark.parametrize("section", [*SECTIONS, Job], ids=lambda s: s.__name__)
def test_section_is_frozen(section):
    assert section.__dataclass_params__.frozen


def test_job_is_immutable_and_hashable(tree):
    job = build_job(tree())
    with pytest.raises(dataclasses.FrozenInstanceError):
        job.name = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        job.layout.tp = 2
    assert isinstance(hash(job), int), "nested sections are frozen too"


INTERFACES = {
    Data: "path tokenizer seq_len mask prompt_masking",
    Train: "steps global_batch optimizer lr warmup lr_scaling weight_decay clip precision seed block_backend "
    "grad_dtype residual_dtype gemm_autotune eval_every deterministic",
    Checkpoint: "dir every_steps every_minutes keep_last on_best",
    Layout: "mode pp dp_replicate dp_shard cp tp ep etp zero accumulate sequence_parallel schedule "
    "virtual_stages context micro_batch recompute offload prefetch bucket_mb",
    Consistency: "mode",
    Compression: "kind",
}


@pytest.mark.parametrize(("section", "keys"), INTERFACES.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_sections_have_the_documented_keys(section, keys):
    assert set(keys.split()) <= {field.name for field in dataclasses.fields(section)}


def test_section_type_of_a_dotted_path():
    assert section_type([]) is Job
    assert section_type(["train"]) is Train
    assert section_type(["train", "lr"]) is None
    assert section_type(["nowhere"]) is None


def test_every_annotation_of_a_job_resolves():
    """Pydantic and the documentation evaluate them at run time."""
    for section in (*SECTIONS, Job):
        assert typing.get_type_hints(section, include_extras=True)


@pytest.mark.parametrize(
    ("wrong", "meant"), [("lr_rate", "train.lr"), ("grad", "train.grad_noise"), ("stepz", "train.steps")]
)
def test_unknown_key_suggests_the_nearest(tree, wrong, meant):
    with pytest.raises(SpecError) as caught:
        build_job(tree(train={wrong: 1}))
    assert f"Did you mean {meant}?" in str(caught.value)
