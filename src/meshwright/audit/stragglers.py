"""The stragglers of a run, from its events."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meshwright.core.events import Event, name_phase
from meshwright.core.units import format_seconds


@dataclass(frozen=True)
class StragglerSpan:
    """A rank that was named as a straggler, until it recovered."""

    rank: int
    host: str
    phase: str
    """``compute``, ``data``, ``storage`` or ``communication``."""
    lateness_s: float
    """How much longer than its peers it worked, in a median step; of storage, in a median save."""
    share: float
    """The same as a share of the step."""
    slowdown: float
    since_step: int
    step: int
    """Step after which it was found."""
    preempted: bool = False
    """Whether other processes used its core when it was late."""
    action: str = "none"
    """``none``, ``replace`` or ``exclude``."""
    recovered_step: int | None = None
    """None if it did not recover."""

    @property
    def phase_text(self) -> str:
        """The phase, and whether the rank had no core."""
        return name_phase(self.phase, self.preempted)

    def sentence(self) -> str:
        """For the notes of a report."""
        until = "the end" if self.recovered_step is None else f"step {self.recovered_step}"
        late = f"{format_seconds(self.lateness_s)} per {'save' if self.phase == 'storage' else 'step'}"
        took = f"{self.slowdown:.2f} times as long as its peers in {self.phase_text}, {late}"
        return (
            f"rank {self.rank} on {self.host} was a straggler from step {self.since_step} to {until}: {took}"
        )


@dataclass
class StragglerLog:
    """All stragglers of a run, in order."""

    spans: list[StragglerSpan] = field(default_factory=list)

    def feed(self, event: Event) -> None:
        """Take an event ``straggler`` or ``straggler_recovered``."""
        if event["event"] == "straggler":
            names = StragglerSpan.__dataclass_fields__
            self.spans.append(StragglerSpan(**{name: event[name] for name in names if name in event}))
            return
        for index, span in enumerate(self.spans):
            if span.rank == event["rank"] and span.recovered_step is None:
                self.spans[index] = replace(span, recovered_step=event["step"])

    def close(self, step: int) -> None:
        """The layout changes, and rank numbers with it."""
        self.spans = [
            replace(span, recovered_step=step) if span.recovered_step is None else span for span in self.spans
        ]

    @property
    def current(self) -> list[StragglerSpan]:
        """The stragglers that have not recovered."""
        return [span for span in self.spans if span.recovered_step is None]

    def as_list(self) -> list[dict[str, Any]]:
        """For ``--json``."""
        return [asdict(span) for span in self.spans]
