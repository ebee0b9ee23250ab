"""Where the time of a request went in one process: phases that follow each other without a gap.

    begun ─ mark("credit wait") ─ mark("chunk") ─ mark("chunk") ...
            └ each phase lasts from the mark before it to its own mark

So the durations of all phases add up to the time from `begun_s` to the last mark, whatever was
marked. Times are seconds of any one clock, which is given with each mark; only durations cross
processes, so that no two clocks have to agree. Pure. One task or loop owns a timeline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.proto import worker_pb2

MAX_PHASES = 64  # of one timeline; beyond it, phases of one name and worker are joined
MAX_OFFERS = 32  # of one fetch; later ones are added to the last
_MAX_MICROS = (1 << 32) - 1

NAMES = {
    number: name.lower().replace("_", " ") for name, number in worker_pb2.PhaseName.items()
}  # as people read them
_NUMBERS = {name: number for number, name in NAMES.items()}


@dataclass(slots=True)
class Phase:
    """`count` are the tokens of a chunk, or the blocks of a fetch that were not hidden; 0: neither.
    `where` is a worker's id; empty, as protobuf has it: the process that has the timeline."""

    name: str
    seconds: float
    count: int = 0
    where: str = ""


@dataclass(slots=True)
class Timeline:
    """`begun_s` is when the first phase begins, `at_s` when the last one ended."""

    begun_s: float
    at_s: float = field(init=False)
    phases: list[Phase] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.at_s = self.begun_s

    @property
    def seconds(self) -> float:
        return self.at_s - self.begun_s

    def mark(self, name: str, now_s: float, count: int = 0, where: str = "") -> None:
        """End a phase now. A time before the last mark counts as that mark: a phase that was over
        before, hidden behind others, lasts no time."""
        seconds = max(0.0, now_s - self.at_s)
        self.at_s += seconds
        self._add(Phase(name, seconds, count, where))

    def insert(self, inner: list[Phase], now_s: float, before: str, after: str) -> float:
        """Take the phases of another process, which worked for this one since the last mark. The
        time that they leave over went to messages: one half is `before` them, the other `after`.
        If they claim more time than there was, they are shortened alike. Returns that half."""
        elapsed_s = max(0.0, now_s - self.at_s)
        inner_s = sum(phase.seconds for phase in inner)
        scale = 1.0 if inner_s <= elapsed_s else elapsed_s / inner_s
        half_s = (elapsed_s - scale * inner_s) / 2
        self.at_s += elapsed_s
        self._add(Phase(before, half_s))
        for phase in inner:
            phase.seconds *= scale
            self._add(phase)
        self._add(Phase(after, half_s))
        return half_s

    def _add(self, phase: Phase) -> None:
        last = self.phases[-1] if self.phases else None
        if last is not None and not phase.count and _alike(last, phase):
            last.seconds += phase.seconds
        elif len(self.phases) < MAX_PHASES:
            self.phases.append(phase)
        else:
            self._add_to_full(phase)

    def _add_to_full(self, phase: Phase) -> None:
        """Add to the last phase that is alike. If there is none, two others that are alike become
        one; if there are none, the new phase counts with the last."""
        phases = self.phases
        if _join(phase, phases):
            return
        for index in range(len(phases) - 1, 0, -1):
            if _join(phases[index], phases[:index]):
                del phases[index]
                phases.append(phase)
                return
        phases[-1].seconds += phase.seconds
        phases[-1].count += phase.count


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time in which at least one span (begin, end) runs."""
    total = until = 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _join(phase: Phase, others: list[Phase]) -> bool:
    """Add a phase to the last of the others that is alike, and return whether there is one."""
    for other in reversed(others):
        if _alike(other, phase):
            other.seconds += phase.seconds
            other.count += phase.count
            return True
    return False


def _alike(one: Phase, other: Phase) -> bool:
    return one.name == other.name and one.where == other.where


def write(timeline: Timeline, message: worker_pb2.Timeline) -> None:
    """Put the phases into an empty message; all that have a `where` are one peer's."""
    phases = timeline.phases
    # The generated types name an enum, the library takes numbers.
    message.names.extend([_NUMBERS[phase.name] for phase in phases])  # type: ignore[misc]
    message.micros.extend([micros(phase.seconds) for phase in phases])
    message.counts.extend([phase.count for phase in phases])
    theirs = [index for index, phase in enumerate(phases) if phase.where]
    if theirs:
        message.peer_first, message.peer_end = theirs[0], theirs[-1] + 1
        message.peer = phases[theirs[0]].where


def read(message: worker_pb2.Timeline, where: str) -> list[Phase]:
    """Return the phases of a message from the worker `where`; a malformed message has none."""
    count = len(message.names)
    if count > MAX_PHASES or not count == len(message.micros) == len(message.counts):
        return []
    theirs = range(message.peer_first, min(message.peer_end, count))
    peer = message.peer[:128]
    rows = zip(message.names, message.micros, message.counts, strict=True)
    return [
        Phase(NAMES.get(name, NAMES[0]), us / 1e6, tokens, peer if index in theirs else where)
        for index, (name, us, tokens) in enumerate(rows)
    ]


def micros(seconds: float) -> int:
    """Return whole microseconds, as the wire has them: from 0 to 71 minutes."""
    return min(max(0, round(seconds * 1e6)), _MAX_MICROS)
