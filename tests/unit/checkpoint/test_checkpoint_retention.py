"""Which checkpoints are kept: by a table, and for any folder never the newest good one is removed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.checkpoint.retention import Retention

EIGHT = [(step, 0) for step in range(1, 9)]
REVISIONS = st.tuples(st.integers(0, 40), st.integers(0, 2))


@pytest.mark.parametrize(
    ("retention", "best", "kept"),
    [
        (Retention(1), None, [8]),
        (Retention(2), None, [7, 8]),
        (Retention(9), None, [1, 2, 3, 4, 5, 6, 7, 8]),
        (Retention(2), (3, 0), [3, 7, 8]),
        (Retention(1, keep_every=3), None, [3, 6, 8]),
        (Retention(1, keep_every=1), None, [1, 2, 3, 4, 5, 6, 7, 8]),
        (Retention(2, keep_every=100), (1, 0), [1, 7, 8]),
    ],
)
def test_the_newest_the_best_and_the_multiples_are_kept(retention, best, kept):
    removed = retention.choose_removed(EIGHT, (8, 0), best)
    assert [step for step, _ in sorted(set(EIGHT) - removed)] == kept


@pytest.mark.parametrize(
    ("best", "kept"),
    [(None, [(4, 1), (6, 1)]), ((4, 0), [(4, 0), (4, 1), (6, 1)]), ((6, 0), [(4, 1), (6, 1)])],
)
def test_a_step_counts_once_and_its_last_revision_is_kept(best, kept):
    found = [(4, 0), (4, 1), (6, 0), (6, 1)]
    assert sorted(set(found) - Retention(2, keep_every=2).choose_removed(found, (6, 1), best)) == kept


def test_checkpoints_of_a_skipped_attempt_are_neither_counted_nor_removed():
    assert Retention(2).choose_removed(EIGHT, (5, 0)) == {(1, 0), (2, 0), (3, 0)}


@given(
    found=st.sets(REVISIONS, min_size=1),
    which=st.integers(0, 100),
    best=st.none() | REVISIONS,
    keep_last=st.integers(1, 5),
    keep_every=st.integers(0, 10),
)
def test_the_newest_is_never_removed_and_the_last_steps_stay(found, which, best, keep_last, keep_every):
    newest = sorted(found)[which % len(found)]
    removed = Retention(keep_last, keep_every).choose_removed(found, newest, best)
    left = found - removed
    assert newest in left
    assert removed <= {revision for revision in found if revision < newest}
    steps = sorted({step for step, _ in found if step <= newest[0]})
    assert {step for step, _ in left} >= set(steps[-keep_last:])
    if keep_every:
        assert {step for step, _ in left} >= {step for step in steps if step % keep_every == 0}
    if best in found and best[0] != newest[0]:
        assert best in left
    assert Retention(keep_last, keep_every).choose_removed(left, newest, best) == set(), "a second pass"
