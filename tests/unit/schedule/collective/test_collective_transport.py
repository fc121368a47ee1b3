"""The teaching example: the same schedules over queues and over sockets give the sum."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from collective_reference import make_inputs, wrong_chunks
from meshwright.schedule.collective.build import build_collective, list_algorithms
from meshwright.schedule.collective.ops import Op

EXAMPLE = Path(__file__).parents[4] / "examples" / "collective_transport.py"


def load_example():
    spec = importlib.util.spec_from_file_location("collective_transport", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TRANSPORT = load_example()


@pytest.mark.parametrize("kind", ["Queues", "Sockets"])
@pytest.mark.parametrize("ranks", [1, 4, 5])
def test_all_reduce_is_the_sum(kind, ranks):
    for algorithm in list_algorithms("all_reduce"):
        nodes = {"ranks_per_node": min(2, ranks)} if algorithm == "hierarchical" else {}
        schedule = build_collective("all_reduce", algorithm, ranks, **nodes)
        tensors = [np.random.default_rng(rank).normal(size=1003) for rank in range(ranks)]
        expected = sum(tensors)
        TRANSPORT.run_collective(schedule, tensors, getattr(TRANSPORT, kind)(ranks))
        for tensor in tensors:
            np.testing.assert_allclose(tensor, expected, rtol=1e-12, atol=1e-12)
            np.testing.assert_array_equal(tensor, tensors[0])  # the same bits on every rank


@pytest.mark.parametrize("kind", ["Queues", "Sockets"])
@pytest.mark.parametrize("op", list(Op))
def test_every_operation_runs(kind, op):
    for elements in (0, 2, 100):
        schedule = build_collective(op, "ring", 3)
        inputs = make_inputs(schedule, elements)
        outputs = [buffer.copy() for buffer in inputs]
        TRANSPORT.run_collective(schedule, outputs, getattr(TRANSPORT, kind)(3))
        assert wrong_chunks(schedule, elements, inputs, outputs) == []


def test_messages_larger_than_the_socket_buffers_do_not_deadlock():
    schedule = build_collective("all_reduce", "recursive_doubling", 2)
    tensors = [np.ones(2_000_000), np.ones(2_000_000)]
    TRANSPORT.run_collective(schedule, tensors, TRANSPORT.Sockets(2))
    assert all((tensor == 2).all() for tensor in tensors)


def test_example_runs_as_a_program_without_torch():
    code = "import runpy, sys; sys.modules['torch'] = None; sys.argv[1:] = ['all_reduce', 'ring', '4']; "
    code += f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "all_reduce by ring on 4 ranks: 6 steps" in ran.stdout
    assert ran.stdout.count("[   0 1111 2222 3333") == 2
