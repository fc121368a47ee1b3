"""Training under torchrun: settings that only our own launcher obeys are refused."""

from __future__ import annotations

import pytest

from meshwright.core.errors import UserError
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.reporter import Reporter
from meshwright.runs.torchrun import REFUSED, _plan_for_all


def test_spares_are_refused_on_all_ranks(job_file, monkeypatch):
    """Rank 0 raises the error, and the other ranks read from the store that the run is refused."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    store = {}
    store_like = type("Store", (), {"set": lambda _, key, value: store.update({key: value})})()
    job = LoadedJob.load(str(job_file), ("elastic.spares=1",))
    with pytest.raises(UserError) as refused:
        _plan_for_all(store_like, job, "no", Reporter())
    assert refused.value.problems[0].code == "elastic-spares-torchrun"
    assert store == {"run_dir": REFUSED}
