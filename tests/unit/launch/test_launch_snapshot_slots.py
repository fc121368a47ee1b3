"""The memory of in-memory snapshots: its header, its copy, and the newest step that all ranks have."""

from __future__ import annotations

import os

import pytest

from meshwright.launch.snapshot_slots import EMPTY, SnapshotSlots, newest_common_step
from meshwright.layout.snapshot_size import HEADER_BYTES, reserved_bytes


@pytest.fixture
def memory():
    created = SnapshotSlots.create(3)
    yield created
    created.close()


def test_a_slot_counts_only_when_it_is_whole(memory):
    assert memory.steps() == [EMPTY, EMPTY]
    memory.reserve(4096)
    memory.set_step(0, 10)
    memory.set_step(1, 20)
    memory.set_step(0, EMPTY)
    assert memory.steps() == [EMPTY, 20]
    assert memory.slot_bytes == 4096
    assert memory.reserved_bytes == reserved_bytes(4096) == 3 * 4096


def test_a_copy_is_independent(memory):
    """A process that was stopped and wakes up cannot write into the memory of its successor."""
    memory.reserve(4096)
    os.pwrite(memory.fd, b"state", HEADER_BYTES)
    memory.set_step(0, 10)
    copied = memory.copy(3)
    os.pwrite(memory.fd, b"other", HEADER_BYTES)
    memory.set_step(0, 30)
    assert os.pread(copied.fd, 5, HEADER_BYTES) == b"state"
    assert copied.steps() == [10, EMPTY]
    copied.close()


def test_memory_that_the_system_does_not_have_is_refused(memory):
    with pytest.raises(OSError, match="available"):
        memory.reserve(2**60)


@pytest.mark.parametrize(
    ("steps", "newest"),
    [
        ({0: [10, 20], 1: [10, 20]}, 20),
        ({0: [30, 20], 1: [EMPTY, 20]}, 20),
        ({0: [30, 20], 1: [EMPTY, EMPTY]}, None),
        ({0: [10, 20]}, None),
    ],
)
def test_newest_common_step(steps, newest):
    """Rank 1 died while it wrote a slot, before its first snapshot, or before it had any memory."""
    assert newest_common_step(steps, world_size=2) == newest
