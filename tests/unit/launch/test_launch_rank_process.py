"""A rank that cannot leave its generation ends: soon while it joins, and later in a collective."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshwright.launch.exits import EXIT_PEER_LOST

RANK = """
import contextlib, sys, time
from meshwright.launch.channel import Channel, connected_pair
from meshwright.launch.rank_process import JOIN_STUCK_S, RankCommand, RankLink

channel, there = connected_pair()
link = RankLink(channel)
link.start()
joining = link.joining() if sys.argv[1] == "join" else contextlib.nullcontext()
with link.aborting(0, lambda: None), joining:
    Channel(there).send(RankCommand("halt", 0).as_dict())
    until = time.monotonic() + (30 if sys.argv[1] == "join" else 2 * JOIN_STUCK_S)
    while time.monotonic() < until:  # as a rank that polls the rendezvous store
        sum(range(10000))
        time.sleep(0.001)
print("left")
"""


@pytest.mark.parametrize(("where", "status"), [("join", EXIT_PEER_LOST), ("collective", 0)])
def test_a_busy_rank_ends_if_it_is_halted_while_it_joins(where, status):
    """It holds no state. In a collective, one that uses CPU time is still given time to leave."""
    done = subprocess.run(
        [sys.executable, "-c", RANK, where], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == status, done.stderr
    assert ("left" in done.stdout) is (status == 0)
