"""ResNets in the plan: published counts, FLOPs by hand, traffic of batch norm, micro-batches and reasons."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.core.errors import UserError
from meshwright.layout.flops import flops_per_token
from meshwright.layout.parameters import count_parameters, count_statistics, list_parameters
from meshwright.layout.resnet_shapes import list_convs
from meshwright.plan.build import build_plan
from meshwright.plan.contract import read_plan, write_plan
from meshwright.plan.memory.ledger import predict_ledger
from meshwright.plan.predict import samples_per_rank
from meshwright.plan.search.planner import search_job
from meshwright.plan.search.reasons import explain_choice
from meshwright.plan.traffic.predict import predict_traffic
from meshwright.spec.job import Job
from meshwright.spec.load import build_job, load_job
from meshwright.spec.model import ResNetModel


def make(model: dict[str, Any] | None = None, **tables: dict[str, Any]) -> Job:
    tree: dict[str, Any] = {
        "model": {"preset": "resnet-tiny", **(model or {})},
        "cluster": {"preset": "h100-sxm"},
        "data": {"path": "builtin:synthetic-images"},
        "train": {"steps": 4, "global_batch": 24},
    }
    for name, keys in tables.items():
        tree[name] = {**tree.get(name, {}), **keys}
    return build_job(tree)


def codes(**arguments: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        make(**arguments)
    return [p.code for p in caught.value.problems]


@pytest.mark.parametrize(("name", "count"), [("resnet18", 11_689_512), ("resnet50", 25_557_032)])
def test_parameters_are_as_many_as_torchvision_has(name, count):
    assert count_parameters(load_job(name, on="h100-sxm").model) == count


@pytest.mark.parametrize(("name", "multiplications"), [("resnet18", 1.814e9), ("resnet50", 4.089e9)])
def test_flops_agree_with_the_published_multiplications(name, multiplications):
    """Each multiplication is 2 FLOPs, in forward and twice in backward.

    The first layer has no input gradient (118 million multiplications).
    """
    model = load_job(name, on="h100-sxm").model
    first = 112 * 112 * 64 * 3 * 49
    assert flops_per_token(model, 1) == pytest.approx(6 * multiplications - 2 * first, rel=1e-3)


def test_flops_of_a_small_net_equal_the_hand_computed_value():
    """Stem 2 x 4 x 1 x 9 x 64 (twice), block 2 convolutions 2 x 4 x 4 x 9 x 64, head 2 x 4 x 3 (3 times)."""
    model = ResNetModel(
        architecture="resnet", blocks=(1,), num_classes=3, image_size=8, channels=1, width=4, stem="small"
    )
    assert flops_per_token(model, 1) == 2 * 4608 + 3 * (2 * 18432 + 24)


def test_image_sizes_round_up():
    model = ResNetModel(architecture="resnet", blocks=(1, 1, 1, 1), num_classes=2, image_size=45, width=32)
    sides = [block.parts[-1].out_size for block in list_convs(model).blocks]
    assert sides == [12, 6, 3, 2]
    assert model.last_side == 2


def test_plan_of_a_resnet_round_trips(tmp_path):
    """Tuples of blocks and predictions are unchanged."""
    plan, _ = build_plan(make())
    write_plan(plan, tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml") == plan
    assert plan.job.unit == "images"
    assert plan.tokens_per_step == 24


def test_activation_checkpointing_saves_less_and_batch_norm_has_statistics():
    plain, again = (predict_ledger(make(layout={"recompute": mode}), 8, 1) for mode in ("none", "full"))
    assert again.activation_bytes < 0.5 * plain.activation_bytes
    assert again.touched_bytes == plain.touched_bytes == plain.activation_bytes
    mixed = predict_ledger(make({"norm": "batch"}), 8, 1)
    statistics = next(line.bytes for line in mixed.lines if line.name == "running statistics")
    norms = [p for p in list_parameters(make().model) if ".norm." in p.name]
    assert statistics == 4 * sum(p.count for p in norms)


def test_batch_norm_is_one_more_reduction_per_step():
    """One call reduces all running statistics. One process and GroupNorm have none."""
    two = {"dp_replicate": 2}
    group, batch = (predict_traffic(make({"norm": norm}, layout=two)) for norm in ("group", "batch"))
    [(less, more)] = [(one, other) for one, other in zip(group, batch, strict=True) if one != other]
    assert (more.axis, more.op, more.phase) == ("dp_replicate", "all_reduce", "step")
    assert more.calls == less.calls + 1
    assert more.bytes == less.bytes + 4 * count_statistics(make({"norm": "batch"}).model)
    assert predict_traffic(make({"norm": "batch"}, layout={"dp_replicate": 1})) == []


def test_batch_norm_splits_the_batch_evenly_with_a_reason():
    """Of 1 to 8 ranks only divisors of 24 are considered. Every micro-batch divides the local batch."""
    job = make({"norm": "batch"})
    search = search_job(job)
    assert {c.layout.dp_replicate for c in search.best} == {1, 2, 3, 4, 6, 8}
    assert search.illegal == 2
    for found in search.best:
        assert samples_per_rank(job, found.layout) % found.layout.micro_batch == 0
    reasons = "\n".join(explain_choice(job, search))
    assert "equal-loss contract does not hold" in reasons
    assert "padding" not in reasons
    assert "promise" not in "\n".join(explain_choice(make(), search_job(make())))


@pytest.mark.parametrize(
    ("tables", "value"),
    [
        ({"layout": {"dp_replicate": 5}}, "layout.dp_replicate=5"),
        ({"layout": {"dp_replicate": 2, "micro_batch": 5}}, "layout.micro_batch=5"),
        ({"layout": {"micro_batch": 7}}, "layout.micro_batch=7"),
        ({"model": {"norm": "batch", "image_size": 4}, "train": {"global_batch": 1}}, "train.global_batch=1"),
        (
            {"model": {"norm": "batch", "image_size": 4}, "layout": {"dp_replicate": 2, "micro_batch": 1}},
            "layout.micro_batch=1",
        ),
    ],
)
def test_batch_norm_refuses_a_batch_that_needs_padding(tables, value):
    """The error names the key, the batch and the fix."""
    model = tables.get("model", {"norm": "batch"})
    rest = {k: v for k, v in tables.items() if k != "model"}
    with pytest.raises(UserError) as caught:
        make(model, **rest)
    problem = caught.value.problems[0]
    assert problem.code == "layout-batch-norm"
    assert str(problem).startswith(value)
    assert make({"norm": "group"}, layout={"dp_replicate": 5}).layout.dp_replicate == 5


def test_planner_avoids_batch_norm_over_one_value():
    """A local batch of two would become two micro-batches of one sample. One value has no variance."""
    job = make({"norm": "batch", "image_size": 4}, train={"global_batch": 2}, layout={"dp_replicate": 1})
    assert search_job(job).best[0].layout.micro_batch == 2


def test_chosen_micro_batch_is_checked_by_the_legality_table():
    """One pixel and a prime local batch leave one micro-batch, so there is no gradient noise scale."""
    model, train = {"norm": "batch", "image_size": 4}, {"global_batch": 5, "noise_scale_every": 1}
    with pytest.raises(UserError) as caught:
        search_job(make(model, train=train, layout={"dp_replicate": 1}))
    assert [p.code for p in caught.value.problems] == ["train-noise-scale-parts"]
    search = search_job(make(model, train={**train, "global_batch": 6}))
    assert {c.layout.dp_replicate: c.layout.micro_batch for c in search.best} == {1: 3, 2: 3, 3: 2}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"layout": {"recompute": "selective"}}, ["layout-recompute-images"]),
        ({"model": {"norm": "batch"}, "layout": {"recompute": "full"}}, ["layout-recompute-images"]),
        ({"data": {"path": "builtin:python-stdlib"}}, ["data-not-for-images"]),
        ({"data": {"tokenizer": "byte"}}, ["data-not-for-images"]),
        ({"data": {"seq_len": 8}}, ["data-not-for-images"]),
        ({"data": {"eval_fraction": 0.1}}, ["data-already-split"]),
        ({"layout": {"tp": 2}}, ["layout-image-axes"]),
        ({"train": {"block_backend": "triton"}}, ["train-not-for-images"]),
        ({"train": {"optimizer": "muon"}}, ["train-not-for-images"]),
        ({"train": {"decay_embeddings": False}}, ["train-not-for-images"]),
        ({"model": {"norm_groups": 5}}, ["model-norm-groups"]),
    ],
)
def test_unsupported_options_of_a_resnet_are_refused(arguments, expected):
    assert codes(**arguments) == expected


def test_an_invalid_global_batch_is_not_factored():
    """The placeholder for an invalid global batch is huge. Its divisors must not be enumerated."""
    wrong = {"model": {"norm": "batch"}, "train": {"global_batch": "x"}, "layout": {"dp_replicate": 3}}
    assert codes(**wrong) == ["job-wrong-type"]


def test_decoder_with_image_data_is_refused(make_job):
    with pytest.raises(UserError) as caught:
        make_job(data={"path": "builtin:synthetic-images"})
    assert caught.value.problems[0].code == "data-not-for-text"


def test_a_bucket_is_compressed_while_its_last_gradient_is_live():
    """Most parameters are in the stem.

    The peak has the state, one image, the stem's gradient and the whole bucket in 16 bits.
    """
    shape = {
        "blocks": [1],
        "num_classes": 2,
        "image_size": 2,
        "stem": "imagenet",
        "width": 2,
        "norm_groups": 1,
    }
    local = {"preset": "local", "device": "cpu", "devices_per_node": 2}
    layout = {"dp_replicate": 2, "micro_batch": 1}
    job = make(shape, cluster=local, train={"global_batch": 2}, layout=layout, compression={"kind": "fp16"})
    ledger, count = predict_ledger(job, 1, 1), count_parameters(job.model)
    stem, image = 2 * 3 * 49, 3 * 2 * 2 * 4 + 8
    assert ledger.peak_bytes == sum(ledger.state_bytes.values()) + image + stem * 4 + count * 2
