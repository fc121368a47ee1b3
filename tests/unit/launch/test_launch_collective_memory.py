"""The memory for collectives: one per generation, found by its name, gone when it is closed."""

from __future__ import annotations

from meshwright.launch.collective_memory import CollectiveMemory, MappedMemory


def test_ranks_of_a_generation_map_the_same_memory():
    agent = CollectiveMemory()
    first, second = (MappedMemory.open(agent.path(0), 0) for _ in range(2))
    assert first.identity == second.identity
    written, read = first.map(4096), second.map(4096)
    written[7] = 42
    assert read[7] == 42
    for memory in (first, second, agent):
        memory.close()
    assert read[7] == 42  # the mapping stays


def test_a_new_generation_has_new_memory():
    agent = CollectiveMemory()
    path = agent.path(3)
    assert agent.path(3) == agent.path(2) == path
    old = MappedMemory.open(path, 3)
    new = MappedMemory.open(agent.path(4), 4)
    assert old.identity != new.identity
    assert MappedMemory.open(agent.path(4), 3) is None, "the descriptor has another generation's memory"
    agent.close()
    assert MappedMemory.open(path, 4) is None
    old.close()
    new.close()
