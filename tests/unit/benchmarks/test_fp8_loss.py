"""The benchmark of FP8 losses: its text has an id for every piece, and its verdict follows its rule."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
ASKED = argparse.Namespace(steps=200, window=50, skip=1, last=100, within=0.5)


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_pieces_cover_a_text_and_rare_ones_share_the_unknown_id():
    from python_text import PIECES, UNKNOWN, number_pieces

    text = "def f(x_1):\n\treturn  x_1 + 0x1F  # é\u2028\n\n"
    pieces = PIECES.findall(text)
    assert "".join(pieces) == text
    assert {"def", "x_1", "  ", "\n", "(", "é"} <= set(pieces)
    frequent, rare = ["a"] * 5 + ["b"] * 4 + ["c"] * 3, ["d", "e"]
    (numbers,) = number_pieces([[*frequent, *rare]], vocab_size=5)
    assert numbers.tolist() == [2] * 5 + [3] * 4 + [4] * 3 + [UNKNOWN] * 2


def test_prepared_token_ids_are_below_the_vocabulary_size(tmp_path):
    from python_text import END, UNKNOWN, write_text

    from meshwright.data.dataset import TokenDataset

    about = write_text(tmp_path, vocab_size=300, wanted=20_000)
    assert about["tokens"] >= 20_000
    assert about["passes"] <= 1
    assert 0 < about["unknown_share"] < 0.5
    dataset = TokenDataset.open(tmp_path, "train", 64)
    numbers = set(dataset.read(np.arange(len(dataset))).tokens.flat)
    assert {END, UNKNOWN} < numbers
    assert max(numbers) < 300


@pytest.mark.parametrize(
    ("change", "passed"),
    [
        pytest.param(lambda step, loss: loss, True, id="equal"),
        pytest.param(lambda step, loss: loss * 1.01, False, id="1% above"),
        pytest.param(lambda step, loss: loss * 0.99, False, id="1% below"),
        pytest.param(lambda step, loss: loss * (1.01 if 100 < step <= 150 else 1), False, id="one window"),
        pytest.param(lambda step, loss: loss * (1.01 if step <= 50 else 1), True, id="the skipped window"),
        pytest.param(lambda step, loss: loss * (1.02 if step % 2 else 0.98), True, id="noise"),
        pytest.param(lambda step, loss: float("nan") if step == 199 else loss, False, id="not a number"),
    ],
)
def test_a_difference_in_any_compared_window_fails(change, passed):
    from fp8_loss import compare, describe

    base = [4.0] * ASKED.steps
    curve = [change(step, loss) for step, loss in enumerate(base, start=1)]
    found = compare({"bf16": base, "fp8": curve}, ASKED)
    assert found["passed"] is passed
    assert ("NOT within 0.5%" in describe(found, ASKED)[-2]) is not passed


def test_two_bf16_runs_that_differ_leave_no_verdict_on_fp8():
    """The control compares two bf16 runs over the steps that both have. Without it FP8 may still pass."""
    from fp8_loss import compare, describe

    base = [4.0] * 200
    close = compare({"bf16": base, "fp8": base, "again": base[:120]}, ASKED)
    assert (close["control_within"], close["passed"]) == (True, True)
    far = compare({"bf16": base, "fp8": base, "again": [4.04] * 120}, ASKED)
    assert (far["control_within"], far["passed"]) == (False, False)
    assert "control failed" in describe(far, ASKED)[-1]
    assert not compare({"bf16": base, "again": base}, ASKED)["passed"]
    for losses in ({"bf16": base, "fp8": base}, {"bf16": base, "fp8": base, "again": base[:40]}):
        found = compare(losses, ASKED)
        assert (found["control_within"], found["passed"]) == (None, True)
        assert "no control" in describe(found, ASKED)[-1]


def test_a_run_with_missing_steps_does_not_pass():
    from fp8_loss import compare, describe

    found = compare({"bf16": [4.0] * 200, "fp8": [4.0] * 120}, ASKED)
    assert (found["kinds"]["fp8"]["within"], found["passed"]) == (True, False)
    assert "INCOMPLETE: 120 of 200 steps" in describe(found, ASKED)[-2]


@pytest.mark.slow
def test_two_equal_configurations_have_equal_losses(tmp_path):
    """A complete run on a small shape.

    Both curves are equal, and the written file gives the same comparison.
    """
    from fp8_loss import compare, read_losses

    out, svg = tmp_path / "losses.jsonl", tmp_path / "losses.svg"
    command = [sys.executable, str(BENCHMARKS / "fp8_loss.py"), "--small", "--shape", "a", "--json"]
    command += ["--steps", "6", "--window", "2", "--last", "2", "--out", str(out), "--svg", str(svg)]
    command += ["--only", "bf16", "--only", "twin", "--kind", "twin:train.precision=bf16"]
    for eager in (
        "block_backend=eager",
        "compile_backend=inductor",
        "residual_dtype=fp32",
    ):  # compiling takes seconds
        command += ["--set", f"train.{eager}"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=200)
    result = json.loads(done.stdout)
    assert len(result["losses"]["bf16"]) == 6
    assert len(set(result["losses"]["bf16"])) == 6
    assert result["losses"]["bf16"] == result["losses"]["twin"]
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    again = compare(read_losses([out]), argparse.Namespace(steps=6, window=2, skip=1, last=2, within=0.5))
    assert again["kinds"] == result["kinds"]
