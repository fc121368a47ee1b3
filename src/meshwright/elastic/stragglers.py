"""Finds stragglers: ranks that take longer than their peers, step after step, so that all others wait.

Every rank reports with each step how long it worked and how long it waited for others (``measure.own_time``).
A synchronous step takes as long on all ranks; the own time is what differs. A rank is compared with its
*peers*, the ranks that have the same work: those of its pipeline stage. A rank without peers is compared with
its own first steps.

Single steps are not enough: the operating system's scheduler delays another rank in every step. So a rank is
named when it is late in most steps of a window, by more than the noise. Time without a CPU counts only where
the peers have CPUs: if all ranks are preempted, the machine is overloaded. Pure: no clock, no connection.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from meshwright.elastic.slow_links import LinkTimes, find_late_link

WINDOW = 16
"""Steps of the window; a straggler is named within 20 steps."""
LATE_STEPS = 13
"""Steps of the window in which a straggler is late."""
LATE_SHARE, LATE_NOISE = 0.06, 0.75
"""A rank is late in a step if it works longer than its peers by this share of the step, and by this multiple
of the noise: the usual deviation of a rank from its own median."""
TYPICAL_SHARE, TYPICAL_NOISE = 0.1, 1.5
"""The same for the median lateness of a straggler."""
TYPICAL_SLOWDOWN = 1.2
"""The median time of a straggler, as a multiple of its peers'."""
OVERLOADED_SHARE = 0.1
"""Share of a step without a CPU above which the peers are preempted, too."""
OVERLOADED_STEP = 4.0
"""Where the peers are preempted, a step counts as this multiple of their work, if it takes longer."""
LINK_SLOWDOWN = 1.4
"""The median time of a slow link, as a multiple of what its bytes take on the others."""
RECOVERED_SHARE = 0.05
"""A straggler has recovered when its median lateness is below this share."""
WARM_UP_STEPS = 3
"""First steps of a generation, which do not count: they compile, allocate and are audited."""
BASELINE_STEPS = 16
"""Steps after these that give the usual time of a rank without peers."""
LATE_SAVES = 4
"""Late saves in a row, at regular intervals, of a straggler by its storage."""
IRREGULAR = 2.0
"""Ratio of the longest and the shortest interval between late saves above which they are no series."""
LATE_SAVE_STEPS = 0.5
"""A rank is late in a save if it takes longer than the others by this multiple of a step."""
LATE_SAVE_FACTOR = 2.0
"""And this many times as long."""
MANY_PEERS, NOISE_RANKS = 8, 32
"""Above these numbers a rank counts among its own peers, and the noise is measured on a part of the ranks."""
KEPT_STEPS = 64
"""Steps for which reports of some ranks are missing."""

WORK = ("compute", "data", "storage")
PREEMPTED = "preempted"
OWN = (*WORK, PREEMPTED)
PHASES = {PREEMPTED: "compute"}
"""The phase that a kind of time belongs to, where it has another name."""

Spent = Mapping[str, float]
"""Seconds of a step by kind: ``OWN``, and ``waiting`` for other ranks."""


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for in every step."""

    rank: int
    phase: str
    """What takes longer: ``compute``, ``data``, ``storage``, or ``communication`` (the link of its host)."""
    lateness_s: float
    """How much longer than its peers it takes, in a median step; of storage, in a median save."""
    share: float
    """The same as a share of the step."""
    slowdown: float
    """Its time as a multiple of its peers' time."""
    preempted: bool
    """Whether it has no CPU when it is late: other processes use it."""
    since_step: int
    """First step in which it was late."""
    step: int
    """Step after which it was found."""


@dataclass(frozen=True)
class Recovered:
    """A rank that is as fast as its peers again, or was replaced."""

    rank: int
    since_step: int
    step: int


Finding = Straggler | Recovered


@dataclass
class _Lateness:
    """The lateness of a rank in the last steps, by some kinds of time."""

    kinds: Sequence[str]
    shares: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Shares of the step."""
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    slowdowns: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, spent: Spent, expected: Spent, step_s: float) -> None:
        own_s, expected_s = (sum(one.get(kind, 0.0) for kind in self.kinds) for one in (spent, expected))
        self.note(own_s - expected_s, own_s / max(1e-9, expected_s), step_s)

    def note(self, late_s: float, slowdown: float, step_s: float) -> None:
        self.seconds.append(late_s)
        self.shares.append(late_s / step_s)
        self.slowdowns.append(slowdown)

    @property
    def share(self) -> float:
        return statistics.median(self.shares) if self.shares else 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of the share, estimated from the median absolute deviation."""
        return 1.4826 * statistics.median(abs(share - self.share) for share in self.shares)


class _Rank:
    """The history of a rank: its lateness in the last steps, and its first steps."""

    def __init__(self) -> None:
        self.work, self.own = _Lateness(WORK), _Lateness(OWN)
        self.link = _Lateness(())
        """Lateness of its network link."""
        self.by_kind_s: deque[dict[str, float]] = deque(maxlen=WINDOW)
        """Lateness by kind."""
        self.peers_preempted: deque[float] = deque(maxlen=WINDOW)
        """Share of the step in which the peers had no CPU."""
        self.first: list[Spent] = []
        """The first steps: the baseline of a rank without peers."""

    def add(self, spent: Spent, expected: Spent, step_s: float) -> None:
        overloaded = expected.get(PREEMPTED, 0.0) > OVERLOADED_SHARE * step_s
        reference_s = min(step_s, OVERLOADED_STEP * _work_s(expected)) if overloaded else step_s
        self.work.add(spent, expected, max(1e-9, reference_s))
        self.own.add(spent, expected, step_s)
        self.by_kind_s.append({kind: spent.get(kind, 0.0) - expected.get(kind, 0.0) for kind in OWN})
        self.peers_preempted.append(expected.get(PREEMPTED, 0.0) / step_s)

    @property
    def on_busy_machine(self) -> bool:
        return statistics.median(self.peers_preempted) > OVERLOADED_SHARE


@dataclass(frozen=True)
class _LateSave:
    """A step in which storage took longer on some ranks than on the others."""

    step: int
    step_s: float
    late_s: Mapping[int, float]
    """By rank that is the cause."""
    usual_s: float
    """Usual time of the other ranks."""


class StragglerWatch:
    """Takes the reports of all ranks, and names stragglers."""

    def __init__(self, peers: Sequence[Sequence[int]]) -> None:
        """Start without history.

        Args:
            peers: All ranks, in sets of equal work. A set of one rank is compared with its own first steps.
        """
        self._peers = [tuple(ranks) for ranks in peers]
        self._ranks = {rank: _Rank() for ranks in peers for rank in ranks}
        self._reports: dict[int, dict[int, Spent]] = {}
        self._links: dict[int, dict[int, LinkTimes]] = {}
        self._generation, self._seen = -1, 0
        self._steps: deque[int] = deque(maxlen=WINDOW)
        self._late_saves: deque[_LateSave] = deque(maxlen=LATE_SAVES)
        self.found: dict[int, Straggler] = {}
        """The stragglers of now."""

    def feed(
        self, rank: int, generation: int, step: int, spent: Spent | None, links: LinkTimes | None = None
    ) -> list[Finding]:
        """Take the report of a rank on a step; returns what changed, when all ranks have reported.

        Args:
            rank: That reports.
            generation: That it is in. A new one begins without history; stragglers stay named.
            step: That is done.
            spent: Its time.
            links: Times of its connections to other hosts, if there are some.
        """
        if generation < self._generation or spent is None or rank not in self._ranks:
            return []
        if generation > self._generation:
            self._begin(generation)
        reports = self._reports.setdefault(step, {})
        reports[rank] = spent
        self._links.setdefault(step, {})[rank] = links or {}
        if len(reports) < len(self._ranks):
            while len(self._reports) > KEPT_STEPS:
                oldest = min(self._reports)
                del self._reports[oldest], self._links[oldest]
            return []
        del self._reports[step]
        link_reports = self._links.pop(step)
        self._seen += 1
        if self._seen <= WARM_UP_STEPS:
            return []
        return self._take_step(step, reports, link_reports)

    def forget(self, rank: int, step: int) -> list[Finding]:
        """A rank has a new process."""
        before = self.found.pop(rank, None)
        return [] if before is None else [Recovered(rank, before.since_step, step)]

    def _begin(self, generation: int) -> None:
        self._generation, self._seen, self._reports, self._links = generation, 0, {}, {}
        self._ranks = {rank: _Rank() for rank in self._ranks}
        self._steps.clear()
        self._late_saves.clear()

    def _take_step(
        self, step: int, reports: Mapping[int, Spent], links: Mapping[int, LinkTimes]
    ) -> list[Finding]:
        step_s = statistics.median(sum(spent.values()) for spent in reports.values())
        if step_s <= 0:
            return []
        self._steps.append(step)
        for rank, expected in self._expect(reports).items():
            self._ranks[rank].add(reports[rank], expected, step_s)
        self._note_late_save(step, step_s, reports)
        self._note_late_link(step_s, reports, links)
        noise = {name: self._measure_noise(name) for name in ("work", "own")}
        found: list[Finding] = []
        for rank in self._ranks:
            found += self._judge(rank, step, noise)
        return found

    def _expect(self, reports: Mapping[int, Spent]) -> dict[int, dict[str, float]]:
        """The expected time of each rank, by kind; without ranks for which it is not known yet."""
        found: dict[int, dict[str, float]] = {}
        for peers in (peers for peers in self._peers if len(peers) > 1):
            if len(peers) > MANY_PEERS:
                found |= dict.fromkeys(peers, _typical([reports[rank] for rank in peers]))
                continue
            for rank in peers:
                found[rank] = _typical([reports[other] for other in peers if other != rank])
        alone = [peers[0] for peers in self._peers if len(peers) == 1]
        return found | self._expect_as_before(alone, reports)

    def _expect_as_before(
        self, alone: Sequence[int], reports: Mapping[int, Spent]
    ) -> dict[int, dict[str, float]]:
        """For ranks without peers: the time of their first steps, scaled by the slowdown of the others."""
        usual = {}
        for rank in alone:
            first = self._ranks[rank].first
            if len(first) < BASELINE_STEPS:
                first.append(reports[rank])
            else:
                usual[rank] = _typical(first)
        ratios = {rank: _work_s(reports[rank]) / max(1e-9, _work_s(times)) for rank, times in usual.items()}
        if len(ratios) < 2:
            return {}
        found, order = {}, sorted(ratios, key=lambda rank: ratios[rank])
        middle = (len(order) - 2) // 2
        for place, rank in enumerate(order):  # the lower median of all others
            now = ratios[order[middle + (place <= middle)]]
            found[rank] = {kind: seconds * now for kind, seconds in usual[rank].items()}
        return found

    def _measure_noise(self, name: str) -> float:
        """How much the lateness of a rank varies between steps, as a share of the step."""
        ranks = list(self._ranks.values())
        kept: list[_Lateness] = [getattr(rank, name) for rank in ranks[:: -(-len(ranks) // NOISE_RANKS)]]
        return statistics.median([one.deviation for one in kept if one.shares] or [0.0])

    def _note_late_save(self, step: int, step_s: float, reports: Mapping[int, Spent]) -> None:
        """Note who was late in a save, if a rank was."""
        storage = {rank: spent.get("storage", 0.0) for rank, spent in reports.items()}
        # Rank 0 commits: it waits for the files of all ranks, so another late rank is the cause.
        usual_s = statistics.median_low([s for rank, s in storage.items() if rank != 0] or storage.values())
        limit_s = max(usual_s + LATE_SAVE_STEPS * step_s, LATE_SAVE_FACTOR * usual_s)
        late = [rank for rank, seconds in storage.items() if seconds >= limit_s]
        if not late:
            return
        causes = [rank for rank in late if rank != 0] or late
        late_s = {rank: storage[rank] - usual_s for rank in causes}
        self._late_saves.append(_LateSave(step, step_s, late_s, usual_s))

    def _note_late_link(
        self, step_s: float, reports: Mapping[int, Spent], links: Mapping[int, LinkTimes]
    ) -> None:
        """Note whose network link was late, if one was."""
        if not any(links.values()):
            return
        waited_s = statistics.median(spent.get("waiting", 0.0) for spent in reports.values())
        late = find_late_link(links, waited_s)
        for rank, kept in self._ranks.items():
            if late is not None and late.rank == rank:
                kept.link.note(late.late_s, late.slowdown, step_s)
            else:
                kept.link.note(0.0, 1.0, step_s)

    def _judge(self, rank: int, step: int, noise: Mapping[str, float]) -> list[Finding]:
        before, kept = self.found.get(rank), self._ranks[rank]
        now = self._find_late_steps(rank, kept.work, noise["work"])
        if now is None and kept.peers_preempted and not kept.on_busy_machine:
            now = self._find_late_steps(rank, kept.own, noise["own"])
        now = now or self._find_late_saves(rank, step)
        now = now or self._find_late_steps(rank, kept.link, 0.0, LINK_SLOWDOWN)
        if before is None and now is not None:
            self.found[rank] = now
            return [now]
        if before is not None and now is None and self._has_recovered(rank, before, step):
            del self.found[rank]
            return [Recovered(rank, before.since_step, step)]
        return []

    def _find_late_steps(
        self, rank: int, lateness: _Lateness, noise: float, least_slowdown: float = TYPICAL_SLOWDOWN
    ) -> Straggler | None:
        if len(lateness.shares) < WINDOW or lateness.shares[-1] < LATE_SHARE:
            return None
        late = [share >= max(LATE_SHARE, LATE_NOISE * noise) for share in lateness.shares]
        slowdown, typical = statistics.median(lateness.slowdowns), max(TYPICAL_SHARE, TYPICAL_NOISE * noise)
        if sum(late) < LATE_STEPS or lateness.share < typical or slowdown < least_slowdown:
            return None
        by_kind = {
            kind: statistics.median(one[kind] for one in self._ranks[rank].by_kind_s)
            for kind in lateness.kinds
        }
        kind = max(by_kind, key=lambda name: by_kind[name], default="communication")
        seconds, since = statistics.median(lateness.seconds), self._steps[late.index(True)]
        phase, preempted, step = PHASES.get(kind, kind), kind == PREEMPTED, self._steps[-1]
        return Straggler(rank, phase, seconds, lateness.share, slowdown, preempted, since, step)

    def _find_late_saves(self, rank: int, step: int) -> Straggler | None:
        saves = list(self._late_saves)
        if (
            len(saves) < LATE_SAVES
            or saves[-1].step != step
            or any(rank not in save.late_s for save in saves)
        ):
            return None
        gaps = [later.step - earlier.step for earlier, later in pairwise(saves)]
        if max(gaps) > IRREGULAR * min(gaps):
            return None
        late_s = statistics.median(save.late_s[rank] for save in saves)
        slowdown = statistics.median(1 + save.late_s[rank] / max(1e-9, save.usual_s) for save in saves)
        share = statistics.median(save.late_s[rank] / save.step_s for save in saves)
        return Straggler(rank, "storage", late_s, share, slowdown, False, saves[0].step, step)

    def _has_recovered(self, rank: int, before: Straggler, step: int) -> bool:
        kept = self._ranks[rank]
        lateness = kept.own if before.preempted else kept.work
        lateness = kept.link if before.phase == "communication" else lateness
        if len(lateness.shares) < WINDOW or lateness.share >= RECOVERED_SHARE:
            return False
        saves = [save.step for save in self._late_saves if rank in save.late_s]
        if before.phase != "storage" or len(saves) < 2:
            return True
        return step - saves[-1] > IRREGULAR * max(later - earlier for earlier, later in pairwise(saves))


def _typical(times: Sequence[Spent]) -> dict[str, float]:
    """The median of each kind."""
    return {kind: statistics.median(spent.get(kind, 0.0) for spent in times) for kind in OWN}


def _work_s(spent: Spent) -> float:
    return sum(spent.get(kind, 0.0) for kind in WORK)
