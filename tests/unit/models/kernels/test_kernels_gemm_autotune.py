"""GEMM autotuning picks the algorithm with the best sustained speed, caches it and uses it.

CPUs have no cuBLASLt. Candidates here are names with given times, and fake algorithms compute the GEMMs.
``tests/gpu/test_gemm_autotune_on_gpu.py`` uses the library.
"""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch

from meshwright.core.errors import UserError
from meshwright.models.kernels import cublas, gemm, gemm_autotune
from meshwright.models.kernels.cublas import CublasError, GemmShape, library_version
from meshwright.models.kernels.gemm import Gemms
from meshwright.models.kernels.gemm_autotune import (
    SKIPPED_REASON,
    TunedAlgorithm,
    autotune_gemms,
    count_gemm_shapes,
    estimate_gain,
    is_correct,
    pick_fastest,
    read_cache,
    write_cache,
)
from meshwright.spec.load import build_job
from triton_decoders import build, step

LOW = torch.bfloat16
CPU = torch.device("cpu")
FORWARD = GemmShape("forward", LOW, 64, 32, 96)
ALGORITHM = bytes(range(64))


def measure(default: float, others: dict[str, tuple[float, float]]):
    """Autotune over candidates given as name to seconds, in a short burst and sustained."""
    timed = []

    def sustained_s(name, settle_s, measure_s):
        timed.append(name)
        burst, sustained = others.get(name, (default, default))
        return sustained if settle_s else burst

    return *pick_fastest("default", list(others), sustained_s), timed


def test_choice_uses_sustained_speed_instead_of_burst_speed():
    best, gain, _ = measure(1.0, {"burst": (0.8, 1.01), "steady": (1.05, 0.9), "slower": (1.04, 0.97)})
    assert best == "steady"
    assert gain == pytest.approx(0.1)


def test_gain_within_the_noise_is_rejected():
    assert measure(1.0, {"equal": (1.0, 0.9985)})[:2] == ("default", 0.0)
    assert measure(1.0, {})[:2] == ("default", 0.0), "a library may propose nothing"


def test_slow_candidates_are_timed_once():
    _, _, timed = measure(1.0, {"slow": (1.2, 1.2), "fair": (1.0, 0.9)})
    assert timed.count("slow") == 1
    assert timed.count("fair") == 1 + 1 + 2 + 2, (
        "screening, first round, two final rounds, two against the default"
    )


def test_candidate_that_is_best_by_chance_is_rejected():
    """Nine equal candidates have 0.5% noise. The best one rarely passes the second measurement."""
    noise = random.Random(0)
    gains = []
    for _ in range(50):
        others = list(range(8))
        best, gain = pick_fastest("default", others, lambda *_: 1 + noise.uniform(-0.005, 0.005))
        gains.append(gain)
        assert (best == "default") == (gain == 0.0)
    assert sum(gain > 0 for gain in gains) < 15
    assert max(gains) < 0.01


def wrong_half(out, wanted):
    out.copy_(wanted)
    out[::2] *= 1.02


def refuse(out, wanted):
    raise CublasError("cuBLASLt says 15")


@pytest.mark.parametrize(
    ("call", "right"),
    [
        (lambda out, wanted: out.copy_(wanted), True),
        (lambda out, wanted: out.copy_(wanted * (1 + 1e-3)), True),
        (lambda out, wanted: out[1:].copy_(wanted[1:]), False),
        (wrong_half, False),
        (refuse, False),
    ],
    ids=["equal", "rounded", "a row left out", "half of it wrong", "refused"],
)
def test_algorithm_must_compute_the_whole_output(call, right):
    wanted = torch.randn(32, 16)
    out = wanted.clone()
    assert is_correct(lambda: call(out, wanted), out, wanted) is right


@pytest.fixture
def job():
    """A job with compiled blocks on one H200."""
    sizes = {"num_layers": 12, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 8192}
    return build_job(
        {
            "model": {**sizes, "vocab_size": 128256},
            "cluster": {"preset": "h200-sxm", "devices_per_node": 1},
            "data": {"path": "-", "seq_len": 4096},
            "train": {"steps": 1, "global_batch": 4, "precision": "bf16", "block_backend": "triton"},
            "layout": {"dp_replicate": 1, "micro_batch": 4},
        }
    )


def test_every_gemm_shape_of_a_step_is_autotuned_once(job):
    tokens, chunk = 4 * 4096, 8192
    linears = {
        (tokens, 2048, 2048 + 2 * 512): 12,
        (tokens, 2048, 2048): 12,
        (tokens, 2048, 2 * 8192): 12,
        (tokens, 8192, 2048): 12,
        (chunk, 2048, 128256): 2,
    }
    kinds = ("forward", "input", "weight")
    assert count_gemm_shapes(job) == {
        GemmShape(kind, LOW, *sizes): times for sizes, times in linears.items() for kind in kinds
    }


def test_bf16_weight_gradients_are_autotuned_in_bf16_except_the_head(job):
    narrow = dataclasses.replace(job, train=dataclasses.replace(job.train, grad_dtype="bf16"))
    shapes = count_gemm_shapes(narrow)
    assert {s.outputs for s in shapes if s.kind == "weight" and not s.same_dtype_out} == {128256}
    assert {s.kind for s in shapes if s.same_dtype_out} == {"weight"}
    assert {s.out_dtype for s in shapes if s.same_dtype_out} == {LOW}
    assert {s._replace(same_dtype_out=False) for s in shapes} == set(count_gemm_shapes(job))


def test_fp8_gemms_are_not_autotuned(job):
    fp8 = dataclasses.replace(job, train=dataclasses.replace(job.train, precision="fp8"))
    shapes = count_gemm_shapes(fp8)
    assert {shape.kind for shape in shapes if shape.outputs != 128256} == {"weight"}
    whole = dataclasses.replace(fp8, train=dataclasses.replace(fp8.train, fp8_weight_grads=True))
    assert {shape.outputs for shape in count_gemm_shapes(whole)} == {128256}, "the head stays in 16 bits"


def test_gain_is_weighted_by_flops():
    small, large = FORWARD, GemmShape("weight", LOW, 64, 32, 192)
    results = {small: TunedAlgorithm(ALGORITHM, 0.1), large: TunedAlgorithm(None, 0.0)}
    assert estimate_gain(results, {small: 2, large: 1}) == pytest.approx(0.05)


def test_results_are_cached_and_read_again(tmp_path):
    file = tmp_path / "new" / "gemms.json"
    results = {
        FORWARD: TunedAlgorithm(ALGORITHM, 0.0712),
        GemmShape("input", torch.float16, 1, 2, 3): TunedAlgorithm(None, 0.0),
    }
    results |= {
        GemmShape("weight", LOW, 1, 2, 3, narrow): TunedAlgorithm(None, narrow / 8)
        for narrow in (False, True)
    }
    write_cache(file, results)
    assert read_cache(file) == results
    assert [path.name for path in file.parent.iterdir()] == [file.name], "nothing is left beside it"


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"v": 3}', '{"v": 3, "gemms": 3}', '{"v": 2, "gemms": []}']
)
def test_damaged_cache_file_is_ignored(tmp_path, text):
    file = tmp_path / "gemms.json"
    assert read_cache(file) == {}
    file.write_text(text)
    assert read_cache(file) == {}


def test_damaged_cache_row_is_skipped(tmp_path):
    file = tmp_path / "gemms.json"
    other = GemmShape("input", LOW, 64, 32, 96)
    write_cache(file, {FORWARD: TunedAlgorithm(ALGORITHM, 0.1), other: TunedAlgorithm(None, 0.0)})
    kept = json.loads(file.read_text())
    kept["gemms"][0]["algorithm"] = ALGORITHM[:8].hex()
    kept["gemms"].append({"kind": "forward"})
    file.write_text(json.dumps(kept))
    assert read_cache(file) == {other: TunedAlgorithm(None, 0.0)}


def test_results_of_another_run_stay_in_the_cache(tmp_path):
    file, other = tmp_path / "gemms.json", GemmShape("input", LOW, 64, 32, 96)
    write_cache(file, {FORWARD: TunedAlgorithm(ALGORITHM, 0.1)})
    write_cache(file, {other: TunedAlgorithm(None, 0.0)})
    assert read_cache(file) == {FORWARD: TunedAlgorithm(ALGORITHM, 0.1), other: TunedAlgorithm(None, 0.0)}


def test_unwritable_cache_is_not_an_error(tmp_path):
    (tmp_path / "taken").write_text("")
    write_cache(tmp_path / "taken" / "gemms.json", {FORWARD: TunedAlgorithm(None, 0.0)})
    write_cache(None, {FORWARD: TunedAlgorithm(None, 0.0)})
    assert read_cache(None) == {}


class Events(list):
    """Collects events."""

    def write(self, event, **fields):
        self.append({"event": event, **fields})


@pytest.fixture
def autotuned(monkeypatch, tmp_path):
    """A GPU that reports a gain of 10% for every GEMM of the job."""
    tuned = []

    def win(shape):
        tuned.append(shape)
        if shape.kind == "weight" and "breaks" in tuned:
            raise KeyboardInterrupt
        if "full" in tuned:
            raise torch.OutOfMemoryError
        return TunedAlgorithm(ALGORITHM, 0.1)

    def by(shape, algorithm):
        return FakeAlgorithm(shape)

    monkeypatch.setattr(gemm_autotune, "find_cache_file", lambda: tmp_path / "gemms.json")
    monkeypatch.setattr(gemm_autotune, "_warm_up", lambda shape: None)
    monkeypatch.setattr(gemm_autotune, "_autotune_shape", win)
    monkeypatch.setattr(gemm_autotune, "_bind", by)
    monkeypatch.setattr(gemm_autotune, "_is_still_correct", lambda shape, tuned: shape.outputs != 2 * 8192)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return tuned


def test_autotuning_runs_once_resumes_and_checks_the_cache(job, autotuned, tmp_path):
    job = dataclasses.replace(job, train=dataclasses.replace(job.train, gemm_autotune=True))
    events = Events()
    autotuned.append("breaks")
    with pytest.raises(KeyboardInterrupt):
        autotune_gemms(job, CPU, events)
    assert [event["event"] for event in events] == ["gemm_autotune_started"]
    autotuned.clear()
    autotune_gemms(job, CPU, events)
    assert events[-1] | {"seconds": 0} == {
        "event": "gemm_autotune",
        "tuned": 13,
        "cached": 2,
        "changed": 15,
        "gain": pytest.approx(0.1),
        "seconds": 0,
        "file": str(tmp_path / "gemms.json"),
    }
    assert len(autotuned) == 13
    autotuned.clear()
    gemms = autotune_gemms(job, CPU, events)
    assert {shape.outputs for shape in autotuned} == {2 * 8192}, "a wrong cached result is autotuned again"
    assert gemms._algorithms.keys() == count_gemm_shapes(job).keys()


def test_out_of_memory_keeps_torchs_default_for_this_run(job, autotuned, tmp_path):
    job = dataclasses.replace(job, train=dataclasses.replace(job.train, gemm_autotune=True))
    autotuned.append("full")
    gemms = autotune_gemms(job, CPU, events := Events())
    assert (events[-1]["changed"], events[-1]["gain"], gemms._algorithms) == (0, 0.0, {})
    assert read_cache(tmp_path / "gemms.json") == {}, "there may be room the next time"


@pytest.mark.parametrize("kind", ["forward", "input"])
def test_cached_algorithm_is_checked_against_torch(monkeypatch, kind):
    """The check is that of autotuning, with operands on a CPU."""
    shape = GemmShape(kind, LOW, 64, 32, 96)
    sizes = (shape.left, shape.right)
    drawn = (*(torch.randn(size).to(LOW) for size in sizes), torch.empty(shape.out, dtype=LOW))
    monkeypatch.setattr(gemm_autotune, "_random_operands", lambda shape: drawn)
    monkeypatch.setattr(gemm_autotune, "_bind", lambda shape, algorithm: FakeAlgorithm(shape))
    assert gemm_autotune._is_still_correct(shape, TunedAlgorithm(ALGORITHM, 0.1))
    assert gemm_autotune._is_still_correct(shape, TunedAlgorithm(None, 0.0)), "torch's own"
    monkeypatch.setattr(gemm_autotune, "_bind", lambda shape, algorithm: lambda left, right, out, add: None)
    assert not gemm_autotune._is_still_correct(shape, TunedAlgorithm(ALGORITHM, 0.1))


def test_job_without_autotuning_uses_torch_with_a_reason(job):
    events = Events()
    assert (autotune_gemms(job, CPU, events), events) == (gemm.TORCH_GEMMS, [])
    eager = dataclasses.replace(job.train, gemm_autotune=True, block_backend="eager")
    autotune_gemms(dataclasses.replace(job, train=eager), CPU, events)
    assert events == [{"event": "gemm_autotune_skipped", "reason": SKIPPED_REASON}]


def test_torch_without_cublaslt_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    cublas._library.cache_clear()
    with pytest.raises(UserError, match="needs cuBLASLt") as caught:
        library_version()
    assert caught.value.problems[0].code == "train-gemm-autotune"


class FakeAlgorithm:
    """Computes a GEMM like torch and counts its calls."""

    def __init__(self, shape):
        self.shape, self.calls = shape, 0

    def __call__(self, left, right, out, add):
        self.calls += 1
        assert (left.shape, right.shape, out.shape) == (self.shape.left, self.shape.right, self.shape.out)
        assert out.dtype == self.shape.out_dtype
        if self.shape.kind == "weight":
            output = (left.T @ right).float()
        else:
            output = left @ (right.T if self.shape.kind == "forward" else right)
        out.copy_(out + output if add else output)


def tune_all(monkeypatch, *, narrow: bool = False) -> tuple[Gemms, dict[GemmShape, FakeAlgorithm]]:
    """Fake algorithms for every GEMM of the small model. Its loss has chunks of 24, 24 and 16 tokens."""
    monkeypatch.setattr(gemm, "ALIGNED_BYTES", 1)
    linears = [(64, 32, 64), (64, 32, 32), (64, 32, 192), (64, 96, 32), (24, 32, 128), (16, 32, 128)]
    shapes = [
        GemmShape(kind, LOW, *sizes, narrow and kind == "weight" and sizes[0] == 64)
        for kind in ("forward", "input", "weight")
        for sizes in linears
    ]
    stands = {shape: FakeAlgorithm(shape) for shape in shapes}
    return Gemms(stands, CPU), stands


@pytest.mark.parametrize("kept", [torch.float32, LOW], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_every_gemm_of_a_block_uses_its_algorithm(monkeypatch, recompute, kept):
    """With the same arithmetic the step is bit-identical, for either gradient dtype."""
    expected = step(build(recompute=recompute, grad_dtype=kept))
    gemms, stands = tune_all(monkeypatch, narrow=kept == LOW)
    loss, gradients = step(build(recompute=recompute, grad_dtype=kept, gemms=gemms))
    assert loss == expected[0]
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=0, atol=0, msg=name)
    of_blocks = [stand for stand in stands.values() if stand.shape.tokens == 64]
    assert [stand.calls for stand in of_blocks] == [3] * len(of_blocks), "three layers"
    of_head = [stand for stand in stands.values() if stand.shape.tokens < 64 and stand.shape.kind != "weight"]
    assert {stand.shape.tokens: stand.calls for stand in of_head} == {24: 2, 16: 1}


def test_head_weight_gradient_accumulates(monkeypatch):
    """The CPU loss accumulates by itself, so the test calls the function that a GPU calls."""
    gemms, stands = tune_all(monkeypatch)
    grad, x, total = torch.ones(24, 128, dtype=LOW), torch.ones(24, 32, dtype=LOW), torch.full((128, 32), 7.0)
    for expected, first in ((24.0, True), (48.0, False)):
        gemms.accumulate_weight_grad(total, grad, x, first)
        assert total.unique().tolist() == [expected]
    assert stands[GemmShape("weight", LOW, 24, 32, 128)].calls == 2


def test_non_contiguous_operands_use_torch(monkeypatch):
    gemms, stands = tune_all(monkeypatch)
    x, weight = torch.randn(32, 24).to(LOW).T, torch.randn(128, 32).to(LOW)
    torch.testing.assert_close(gemms.forward(x, weight), x @ weight.T)
    assert not any(stand.calls for stand in stands.values())
    gemms.forward(x.contiguous(), weight)
    assert stands[GemmShape("forward", LOW, 24, 32, 128)].calls == 1
    gemms.forward(x.contiguous().half(), weight.half())
    assert stands[GemmShape("forward", LOW, 24, 32, 128)].calls == 1, "of another precision"


def test_mismatched_operands_raise(monkeypatch):
    """An algorithm would read out of bounds."""
    gemms, stands = tune_all(monkeypatch)
    x, weight = torch.ones(24, 32, dtype=LOW), torch.ones(128, 32, dtype=LOW)
    with pytest.raises(RuntimeError):
        gemms.forward(x, weight.float())
    with pytest.raises(RuntimeError):
        gemms.forward(x, weight[:, :16].contiguous())
    with pytest.raises(RuntimeError):
        gemms.input_grad(torch.ones(24, 128, dtype=LOW), weight, out=torch.empty(24, 32))
    assert not any(stand.calls for stand in stands.values())
