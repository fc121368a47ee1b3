"""Which errors count as out of memory, and the requested bytes in their messages."""

from __future__ import annotations

import pickle

import pytest
import torch

from meshwright.core.errors import Problem
from meshwright.train.out_of_memory import OutOfMemoryRunError, is_out_of_memory, requested_bytes

CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 8388608 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1 GiB"
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(CPU), True),
        (torch.OutOfMemoryError(CUDA), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), True),
        (MemoryError(), True),
        (RuntimeError("the cat sat on the keyboard"), False),
        (ValueError("memory"), False),
    ],
    ids=str,
)
def test_out_of_memory_errors_are_recognized(error, expected):
    assert is_out_of_memory(error) is expected


def test_cause_of_an_error_is_examined():
    error = RuntimeError("autograd gave up")
    error.__cause__ = MemoryError()
    assert is_out_of_memory(error)


def test_message_of_torchs_allocator_is_recognized():
    """The test allocates more memory than any machine has."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert requested_bytes(str(caught.value)) == 2**60


def test_requested_bytes_are_parsed():
    assert requested_bytes(CPU) == 8388608
    assert requested_bytes(CUDA) == int(2.5 * 2**30)
    assert requested_bytes("nothing was said") is None


def test_out_of_memory_error_pickles():
    error = OutOfMemoryRunError(Problem("run-out-of-memory", "a rule"), {"step": 3})
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.memory, again.exit_status) == (str(error), {"step": 3}, 4)
