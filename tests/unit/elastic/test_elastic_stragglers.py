"""Stragglers: a slow rank is named with its phase within 20 steps; noise and uneven stages name nobody."""

from __future__ import annotations

import random

import pytest

from meshwright.elastic.straggler_policy import (
    MAX_REPLACEMENTS,
    STEPS_BETWEEN,
    StragglerHandling,
    build_straggler_handling,
)
from meshwright.elastic.stragglers import BASELINE_STEPS, Recovered, Straggler, StragglerWatch
from meshwright.spec.load import load_job

ONE_SET = [(0, 1, 2, 3)]


class Cluster:
    """Ranks that work for a while and then wait for the slowest, with the noise of a scheduler."""

    def __init__(self, peers=ONE_SET, noise=0.0, seed=0, work_s=None):
        self.watch, self.random, self.noise = StragglerWatch(peers), random.Random(seed), noise
        self.ranks = [rank for ranks in peers for rank in ranks]
        self.work_s = work_s or dict.fromkeys(self.ranks, 0.06)
        self.step, self.generation = 0, 0

    def run(self, steps, slow=None, **extra):
        """Do some steps.

        Args:
            steps: Their number.
            slow: By rank, what it takes longer: seconds by kind, or a function of the step.
            extra: Seconds by kind of every rank.
        """
        found = []
        for _ in range(steps):
            self.step += 1
            spent = {rank: self.spend(rank, (slow or {}).get(rank, {}), extra) for rank in self.ranks}
            longest = max(sum(own.values()) for own in spent.values())
            for rank, own in spent.items():
                own["waiting"] = longest - sum(own.values()) + 0.03
                found += self.watch.feed(rank, self.generation, self.step, own)
        return found

    def spend(self, rank, longer, extra):
        longer = longer(self.step) if callable(longer) else longer
        kinds = ("compute", "data", "storage", "preempted")
        own = {kind: 0.001 + longer.get(kind, 0.0) + extra.get(kind, 0.0) for kind in kinds}
        own["compute"] += self.work_s[rank]
        delay = self.random.expovariate(1 / self.noise) if self.noise else 0.0
        return own | {"compute": own["compute"] + delay}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("longer", "phase"),
    [({"compute": 0.03}, "compute"), ({"data": 0.03}, "data"), ({"storage": 0.03}, "storage")],
)
def test_a_rank_that_takes_1_5_times_as_long_is_named_within_20_steps(longer, phase, seed):
    cluster = Cluster(noise=0.005, seed=seed)
    assert cluster.run(60) == []
    (found,) = cluster.run(40, slow={2: longer})
    assert (found.rank, found.phase, found.preempted) == (2, phase, False)
    assert 55 <= found.since_step <= 65
    assert found.step <= 80
    assert found.slowdown == pytest.approx(1.5, abs=0.15)
    assert found.lateness_s == pytest.approx(0.03, abs=0.008)
    assert found.share == pytest.approx(0.03 / 0.12, abs=0.07)


@pytest.mark.parametrize("peers", [ONE_SET, [(0, 1), (2, 3)], [(0,), (1,), (2,), (3,)]])
@pytest.mark.parametrize("noise", [0.005, 0.03, 0.1])
def test_noise_names_nobody(noise, peers):
    """Delays of half a step and more, that hit all ranks alike, in 500 steps."""
    assert Cluster(peers, noise, seed=int(noise * 1000)).run(500) == []


def test_single_long_steps_name_nobody():
    """A rank that is five times slower in a quarter of the steps."""
    assert Cluster(noise=0.003).run(400, slow={1: lambda step: {"compute": 0.3 * (step % 4 == 0)}}) == []


def test_a_straggler_recovers_and_is_named_again():
    cluster = Cluster(noise=0.005)
    assert [type(one) for one in cluster.run(60, slow={1: {"compute": 0.04}})] == [Straggler]
    (recovered,) = cluster.run(40)
    assert (recovered.rank, recovered.since_step) == (1, cluster.watch.found.get(1, recovered).since_step)
    assert isinstance(recovered, Recovered)
    assert 60 < recovered.step <= 76
    assert [type(one) for one in cluster.run(40, slow={1: {"compute": 0.04}})] == [Straggler]


def test_a_straggler_is_named_once_while_it_is_slow():
    cluster = Cluster(noise=0.005)
    assert len(cluster.run(150, slow={3: {"compute": 0.03}})) == 1


def test_two_slow_ranks_of_four_are_both_named():
    found = Cluster().run(40, slow={0: {"compute": 0.03}, 3: {"data": 0.03}})
    assert [(one.rank, one.phase) for one in found] == [(0, "compute"), (3, "data")]


def test_one_of_many_ranks_is_named():
    """64 peers: the cost per step grows with their number, not with its square."""
    (found,) = Cluster([range(64)], noise=0.003).run(30, slow={40: {"compute": 0.03}})
    assert found.rank == 40


def test_stages_with_more_work_are_not_named():
    """Ranks 2 and 3 have the head: twice the work. A slow rank of their stage is."""
    cluster = Cluster([(0, 1), (2, 3)], noise=0.003, work_s={0: 0.06, 1: 0.06, 2: 0.12, 3: 0.12})
    assert cluster.run(200) == []
    assert [one.rank for one in cluster.run(40, slow={0: {"compute": 0.03}})] == [0]


def test_a_rank_without_peers_is_compared_with_its_own_first_steps():
    """A pipeline of four unequal stages. If all become slower alike, none is named."""
    cluster = Cluster([(0,), (1,), (2,), (3,)], noise=0.002, work_s={0: 0.09, 1: 0.05, 2: 0.06, 3: 0.12})
    assert cluster.run(BASELINE_STEPS + 60) == []
    slower = {rank: {"compute": 0.5 * seconds} for rank, seconds in cluster.work_s.items()}
    assert cluster.run(60, slow=slower) == []
    (found,) = cluster.run(30, slow=slower | {1: {"compute": 0.09}})
    assert (found.rank, found.phase) == (1, "compute")


def test_time_without_a_cpu_counts_where_the_peers_have_theirs():
    """A process beside one rank is named; a machine with too many processes is not."""
    (found,) = Cluster(noise=0.003).run(40, slow={1: {"preempted": 0.05}})
    assert (found.rank, found.phase, found.preempted) == (1, "compute", True)
    assert Cluster(noise=0.003).run(200, slow={1: {"preempted": 0.05}}, preempted=0.05) == []


def late_saves(*steps, seconds=0.2):
    return lambda step: {"storage": seconds * (step in steps)}


@pytest.mark.parametrize("ranks", [3, 4])
def test_late_saves_name_the_rank_with_slow_storage(ranks):
    """Every 25 steps. Rank 0 waits for the files of all ranks, and is not the cause."""
    cluster = Cluster([tuple(range(ranks))], noise=0.005)
    saves = late_saves(25, 50, 75, 100, 125)
    (found,) = cluster.run(125, slow={2: saves, 0: saves})
    assert (found.rank, found.phase, found.since_step, found.step) == (2, "storage", 25, 100)
    assert found.lateness_s == pytest.approx(0.2, abs=0.02)
    (recovered,) = cluster.run(100)
    assert recovered.rank == 2


@pytest.mark.parametrize(
    "slow",
    [
        {2: late_saves(25, 50, 75)},
        {2: late_saves(25, 50, 60, 300)},
        {2: late_saves(25, 50, 100), 1: late_saves(75)},
        {2: late_saves(25, 50, 75, 100, seconds=0.03)},
    ],
    ids=["three", "irregular", "another rank", "short"],
)
def test_other_late_saves_name_nobody(slow):
    assert Cluster(noise=0.003).run(320, slow=slow) == []


def test_a_new_generation_begins_without_history_and_keeps_the_named():
    cluster = Cluster()
    assert len(cluster.run(40, slow={2: {"compute": 0.03}})) == 1
    cluster.generation = 1
    assert cluster.run(60, slow={2: {"compute": 0.03}}) == []
    assert cluster.watch.found[2].rank == 2
    assert cluster.watch.feed(0, 0, 100, {"compute": 9.0}) == []
    assert [type(one) for one in cluster.run(40)] == [Recovered]


def test_reports_that_are_missing_or_unknown_are_survived():
    """A rank that reports nothing, an event without times, a rank that is not there: memory is bounded."""
    watch = StragglerWatch(ONE_SET)
    for step in range(500):
        for rank in (0, 1, 2, 9):
            assert watch.feed(rank, 0, step, {"compute": 1.0}) == []
        assert watch.feed(3, 0, step, None) == []
    assert len(watch._reports) <= 65


def steps(handling, count, slow_rank, first=1, generation=0):
    found = []
    for step in range(first, first + count):
        for rank in range(4):
            compute = 0.1 if rank == slow_rank else 0.06
            spent = {"compute": compute, "data": 0.0, "storage": 0.0, "waiting": 0.12 - compute}
            event = {"rank": rank, "generation": generation, "step": step, "spent_s": spent}
            found += handling.feed(event)
    return found


def test_the_policy_warns_only():
    (found,) = steps(StragglerHandling(ONE_SET), 40, slow_rank=1)
    assert (found.name, found.action, found.fields["rank"], found.fields["action"]) == (
        "straggler",
        "none",
        1,
        "none",
    )
    assert found.fields["phase"] == "compute"


def test_the_policy_replaces_a_rank_not_twice_in_a_row_and_at_most_three():
    handling = StragglerHandling(ONE_SET, "replace")
    (found,) = steps(handling, 40, slow_rank=1)
    assert found.action == "replace"
    (gone,) = handling.note_replaced(1, 40)
    assert (gone.name, gone.fields["replaced"]) == ("straggler_recovered", True)
    assert handling.note_replaced(1, 40) == []
    (again,) = steps(handling, 40, slow_rank=1, first=41, generation=1)
    assert again.action == "none", "too soon"
    actions = []
    for number in range(1, 5):
        handling.note_replaced(1, 0)
        generation, first = 1 + number, number * (STEPS_BETWEEN + 50)
        actions += [one.action for one in steps(handling, 40, 1, first, generation)]
    assert actions == ["replace"] * (MAX_REPLACEMENTS - 1) + ["none"] * 2


def test_an_event_without_times_is_no_error():
    assert StragglerHandling(ONE_SET).feed({"rank": 0, "generation": 0, "step": 1}) == []


@pytest.mark.parametrize(
    ("layout", "peers"),
    [
        ("layout.dp_replicate=4", [(0, 1, 2, 3)]),
        ("layout.pp=2 layout.tp=2", [(0, 1), (2, 3)]),
        ("layout.pp=4 model.num_layers=4", [(0,), (1,), (2,), (3,)]),
        ("layout.dp_replicate=1", []),
        ("layout.dp_replicate=4 layout.backup_replicas=1", [(0, 1, 2)]),
    ],
)
def test_peers_are_the_ranks_of_a_stage(layout, peers, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\npreset = "tiny"\n[cluster]\ndevice = "cpu"\ndevices_per_node = 4\n'
        '[data]\npath = "text"\nseq_len = 32\n[train]\nsteps = 8\nglobal_batch = 8\n'
    )
    handling = build_straggler_handling(load_job(str(job), layout.split()))
    assert handling._watch._peers == peers
