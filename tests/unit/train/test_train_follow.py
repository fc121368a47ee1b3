"""Ranks that follow growing data: all change at the end of the same step, when all are ready."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from meshwright.data.dataset import TokenDataset
from meshwright.data.growth import identify_corpus
from meshwright.data.prepare import CorpusSpec, prepare_corpus
from meshwright.train.follow import DataFollower, Votes

TEXTS = [f"text {number:03d} " * 25 for number in range(30)]


def prepare(folder: Path, texts: list[str]) -> None:
    source = folder.with_name(f"{folder.name}-text")
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    for number, text in enumerate(texts):
        (source / f"{number:03d}.txt").write_text(text)
    prepare_corpus(CorpusSpec(sources=(str(source),), out=str(folder), eval_fraction=0.2), Path())


def open_train(folder: Path) -> TokenDataset:
    return TokenDataset.open(folder, "train", 16)


class Ranks:
    """Two ranks with a folder each."""

    def __init__(self, tmp_path: Path) -> None:
        self.folders = [tmp_path / "a", tmp_path / "b"]
        for folder in self.folders:
            prepare(folder, TEXTS[:10])
        first = identify_corpus(self.folders[0], open_train(self.folders[0]))
        self.followers = [
            DataFollower(folder, first, rank, 2, lambda folder=folder: open_train(folder))
            for rank, folder in enumerate(self.folders)
        ]

    def step(self) -> list[int | None]:
        """One step of both; the samples of the data that each goes on with, if it changes."""
        votes = [follower.vote() for follower in self.followers]
        sums = Votes(sum(vote.proposed for vote in votes), sum(vote.ready for vote in votes))
        found = [follower.after_step(sums) for follower in self.followers]
        return [None if one is None else one.sources[""].samples for one in found]


@pytest.fixture
def ranks(tmp_path):
    return Ranks(tmp_path)


def test_nothing_happens_while_the_data_are_the_same(ranks):
    assert [ranks.step() for _ in range(4)] == [[None, None]] * 4


def test_all_change_in_the_same_step_when_the_last_folder_has_grown(ranks):
    ranks.step()
    prepare(ranks.folders[0], TEXTS[:20])
    assert [ranks.step() for _ in range(5)] == [[None, None]] * 5, "the other folder is still the old one"
    prepare(ranks.folders[1], TEXTS[:20])
    found = [ranks.step() for _ in range(4)]
    samples = len(open_train(ranks.folders[0]))
    assert [one for one in found if one != [None, None]] == [[samples, samples]]
    assert ranks.step() == [None, None], "once"


def test_data_that_grow_again_before_all_are_ready(ranks):
    for folder, count in ((0, 15), (1, 20), (0, 20)):
        prepare(ranks.folders[folder], TEXTS[:count])
        ranks.step()
    found = [ranks.step() for _ in range(5)]
    samples = len(open_train(ranks.folders[0]))
    assert [one for one in found if one != [None, None]] == [[samples, samples]]
    for folder in ranks.folders:
        prepare(folder, TEXTS)
    assert [len(open_train(ranks.folders[0]))] * 2 in [ranks.step() for _ in range(5)]


def test_a_folder_that_is_missing_for_a_moment_is_looked_at_again(ranks):
    prepare(ranks.folders[0], TEXTS[:20])
    aside = ranks.folders[0].with_name("aside")
    ranks.folders[0].rename(aside)
    assert ranks.step() == [None, None]
    aside.rename(ranks.folders[0])
    prepare(ranks.folders[1], TEXTS[:20])
    assert any(None not in ranks.step() for _ in range(4))


@pytest.mark.parametrize("texts", [TEXTS[::-1], TEXTS[:5]], ids=["other documents", "fewer"])
def test_other_data_are_refused_by_rank_0(ranks, texts):
    prepare(ranks.folders[0], texts)
    assert [ranks.step() for _ in range(3)] == [[None, None]] * 3, "the run goes on until its checkpoint"
    (problem,) = ranks.followers[0].refused.problems
    assert problem.code == "data-follow-changed"
    assert "replaced during the run by other data" in problem.rule
    assert ranks.followers[1].refused is None
