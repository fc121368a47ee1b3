"""Messages that outlive their connection, and agents that fall silent."""

from __future__ import annotations

import random

from meshwright.launch.session import MOST_KEPT, Session
from meshwright.launch.silence import LONGEST_POLL_S, SilenceWatch


def test_nothing_is_lost_or_repeated_when_the_connection_breaks_anywhere():
    """A connection that loses what is in flight, at random times, with acknowledgements that may be late."""
    rng = random.Random(1)
    for _ in range(200):
        sender, receiver, arrived, flight = Session(), Session(), [], []
        for number in range(50):
            message = {"is": "event", "number": number}
            sender.keep(message)
            flight.append(message)
            while flight and rng.random() < 0.5:
                arrived.append(flight.pop(0))
                receiver.count(arrived[-1:])
            if rng.random() < 0.3:
                sender.acknowledge(rng.randint(0, receiver.received))
            if rng.random() < 0.1:
                flight = sender.missed(receiver.received)
                assert flight is not None
        arrived += sender.missed(receiver.received)
        assert [message["number"] for message in arrived] == list(range(50))


def test_reports_and_the_handshake_are_not_counted():
    session = Session("name")
    for message in ({"is": "watch"}, {"do": "prepare"}, {"do": "ack"}, {"is": "join"}):
        session.keep(message)
        session.count([message])
    assert (session.received, session.missed(0)) == (0, [])


def test_messages_that_are_no_longer_kept_are_noticed():
    session = Session()
    for number in range(MOST_KEPT + 1):
        session.keep({"do": "command", "number": number})
    assert session.missed(0) is None
    assert session.missed(MOST_KEPT + 2) is None, "more than was sent"
    assert [message["number"] for message in session.missed(MOST_KEPT)] == [MOST_KEPT]


class Clock:
    """Set by the test."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_node_that_sends_nothing_is_found_after_the_limit():
    clock = Clock()
    watch = SilenceWatch(6.0, clock)
    watch.note_message(1)
    watch.note_message(2)
    for second in range(1, 8):
        clock.now = float(second)
        watch.note_message(2)
        assert watch.poll() == ([1] if second > 6 else [])
    watch.forget(1)
    assert watch.poll() == []


def test_a_pause_of_the_watcher_itself_loses_nobody():
    """The supervisor was stopped for a minute: both nodes have sent messages, which it reads now."""
    clock = Clock()
    watch = SilenceWatch(6.0, clock)
    watch.note_message(1)
    clock.now = 60.0
    assert watch.poll() == []
    clock.now += LONGEST_POLL_S
    watch.note_message(1)
    assert watch.poll() == []


def test_a_node_that_was_never_heard_is_not_watched():
    """It may still start its processes."""
    clock = Clock()
    watch = SilenceWatch(6.0, clock)
    clock.now = 100.0
    assert watch.poll() == []
