"""Which algorithm computes a product: the one that lasts best, kept for later, and used wherever it fits.

A CPU has no cuBLASLt: races here are between names whose times are known, and products are multiplied by
stand-ins. ``tests/gpu/test_race_on_gpu.py`` has the library's own.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from test_run_fused import build, step

from meshwright.core.errors import UserError
from meshwright.run.models import chosen
from meshwright.run.models.cublas import Shape, library_version
from meshwright.run.race import Winner, count_shapes, pick, read_winners, weigh_gain, write_winners
from meshwright.spec.load import build_job

LOW = torch.bfloat16
FORWARD = Shape("forward", LOW, 64, 32, 96)
ALGORITHM = bytes(range(64))


@pytest.fixture(autouse=True)
def nothing_is_chosen_afterwards():
    yield
    chosen.choose({})


def race(own: float, others: dict[str, tuple[float, float]]):
    """Racers by name: seconds at a glance, and when they last."""
    asked = []

    def lasts_s(name, settle_s, heat_s):
        asked.append(name)
        glance, lasting = others.get(name, (own, own))
        return lasting if settle_s else glance

    return *pick("own", list(others), lasts_s), asked


def test_what_lasts_wins_not_what_is_quick_for_a_moment():
    best, gain, _ = race(1.0, {"sprinter": (0.8, 1.01), "runner": (1.05, 0.9), "walker": (1.04, 0.97)})
    assert best == "runner"
    assert gain == pytest.approx(0.1)


def test_a_gain_within_the_noise_is_none():
    assert race(1.0, {"equal": (1.0, 0.9985)})[:2] == ("own", 0.0)
    assert race(1.0, {})[:2] == ("own", 0.0), "a library may propose nothing"


def test_the_slow_are_sent_home_after_a_glance():
    _, _, asked = race(1.0, {"slow": (1.2, 1.2), "fair": (1.0, 0.9)})
    assert asked.count("slow") == 1
    assert asked.count("fair") == 1 + 1 + 2, "a glance, a heat, two finals"


@pytest.fixture
def job():
    """Compiled, on one H200."""
    sizes = {"num_layers": 12, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 8192}
    return build_job(
        {
            "model": {**sizes, "vocab_size": 128256},
            "cluster": {"preset": "h200-sxm", "devices_per_node": 1},
            "data": {"path": "-", "seq_len": 4096},
            "train": {"steps": 1, "global_batch": 4, "precision": "bf16", "compile": True},
            "layout": {"dp_replicate": 1, "micro_batch": 4},
        }
    )


def test_the_products_of_a_step_race_each_once(job):
    tokens, chunk = 4 * 4096, 8192
    linears = {
        (tokens, 2048, 2048 + 2 * 512): 12,
        (tokens, 2048, 2048): 12,
        (tokens, 2048, 2 * 8192): 12,
        (tokens, 8192, 2048): 12,
        (chunk, 2048, 128256): 2,
    }
    kinds = ("forward", "input", "weight")
    assert count_shapes(job) == {
        Shape(kind, LOW, *sizes): times for sizes, times in linears.items() for kind in kinds
    }


def test_products_in_8_bits_do_not_race(job):
    fp8 = dataclasses.replace(job, train=dataclasses.replace(job.train, precision="fp8"))
    shapes = count_shapes(fp8)
    assert {shape.kind for shape in shapes if shape.outputs != 128256} == {"weight"}
    whole = dataclasses.replace(fp8, train=dataclasses.replace(fp8.train, weight_gradients="fp8"))
    assert {shape.outputs for shape in count_shapes(whole)} == {128256}, "the head stays in 16 bits"


def test_a_gain_is_weighed_by_how_often_and_how_large():
    small, large = FORWARD, Shape("weight", LOW, 64, 32, 192)
    winners = {small: Winner(ALGORITHM, 0.1), large: Winner(None, 0.0)}
    assert weigh_gain(winners, {small: 2, large: 1}) == pytest.approx(0.05)


def test_winners_are_kept_and_read_again(tmp_path):
    file = tmp_path / "new" / "products.json"
    winners = {FORWARD: Winner(ALGORITHM, 0.0712), Shape("input", torch.float16, 1, 2, 3): Winner(None, 0.0)}
    write_winners(file, winners)
    assert read_winners(file) == winners
    assert [path.name for path in file.parent.iterdir()] == [file.name], "nothing is left beside it"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", '[{"kind": "forward"}]', json.dumps([{"kind": "forward", "algorithm": "zz"}])],
)
def test_a_file_that_nobody_wrote_so_is_no_file(tmp_path, text):
    file = tmp_path / "products.json"
    assert read_winners(file) == {}
    file.write_text(text)
    assert read_winners(file) == {}
    write_winners(file, {FORWARD: Winner(ALGORITHM[:8], 0.0)})
    assert read_winners(file) == {}, "an algorithm of another length is none of this library's"


def test_where_nothing_can_be_kept_a_run_goes_on(tmp_path):
    (tmp_path / "taken").write_text("")
    write_winners(tmp_path / "taken" / "products.json", {FORWARD: Winner(None, 0.0)})


def test_a_torch_without_the_library_says_so():
    with pytest.raises(UserError, match="needs cuBLASLt") as caught:
        library_version()
    assert caught.value.problems[0].code == "train-products"


class StandIn:
    """Multiplies as torch does, and notes for whom."""

    def __init__(self, shape):
        self.shape, self.calls = shape, 0

    def __call__(self, left, right, out, add):
        self.calls += 1
        assert (left.shape, right.shape, out.shape) == (self.shape.left, self.shape.right, self.shape.out)
        assert out.dtype == self.shape.out_dtype
        if self.shape.kind == "weight":
            product = (left.T @ right).float()
        else:
            product = left @ (right.T if self.shape.kind == "forward" else right)
        out.copy_(out + product if add else product)


def choose_for_all(monkeypatch) -> dict[Shape, StandIn]:
    """Stand-ins for every product of the small model, whose loss has chunks of 24, 24 and 16 tokens."""
    monkeypatch.setattr(chosen, "ALIGNED_BYTES", 1)
    linears = [(64, 32, 64), (64, 32, 32), (64, 32, 192), (64, 96, 32), (24, 32, 128), (16, 32, 128)]
    shapes = [Shape(kind, LOW, *sizes) for kind in ("forward", "input", "weight") for sizes in linears]
    stands = {shape: StandIn(shape) for shape in shapes}
    chosen.choose(stands)
    return stands


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_every_product_of_a_block_asks_what_was_chosen(monkeypatch, recompute):
    """And with the same arithmetic gives the same step, bit for bit."""
    expected = step(build(recompute=recompute))
    stands = choose_for_all(monkeypatch)
    loss, gradients = step(build(recompute=recompute))
    assert loss == expected[0]
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=0, atol=0, msg=name)
    of_blocks = [stand for stand in stands.values() if stand.shape.tokens == 64]
    assert [stand.calls for stand in of_blocks] == [3] * len(of_blocks), "three layers"
    of_head = [stand for stand in stands.values() if stand.shape.tokens < 64 and stand.shape.kind != "weight"]
    assert {stand.shape.tokens: stand.calls for stand in of_head} == {24: 2, 16: 1}


def test_sums_of_the_head_begin_and_go_on(monkeypatch):
    """On a CPU the loss adds up by itself: what a GPU calls is called here."""
    stands = choose_for_all(monkeypatch)
    grad, x, total = torch.ones(24, 128, dtype=LOW), torch.ones(24, 32, dtype=LOW), torch.full((128, 32), 7.0)
    for expected, first in ((24.0, True), (48.0, False)):
        chosen.add_weight_gradient(total, grad, x, first)
        assert total.unique().tolist() == [expected]
    assert stands[Shape("weight", LOW, 24, 32, 128)].calls == 2


def test_operands_that_do_not_lie_plainly_are_torchs(monkeypatch):
    stands = choose_for_all(monkeypatch)
    x, weight = torch.randn(32, 24).to(LOW).T, torch.randn(128, 32).to(LOW)
    torch.testing.assert_close(chosen.multiply(x, weight), x @ weight.T)
    assert not any(stand.calls for stand in stands.values())
    chosen.multiply(x.contiguous(), weight)
    assert stands[Shape("forward", LOW, 24, 32, 128)].calls == 1
    chosen.multiply(x.contiguous().half(), weight.half())
    assert stands[Shape("forward", LOW, 24, 32, 128)].calls == 1, "of another precision"
