"""Past bugs by their seeds: re-run before anything else, so that none comes back.

An entry stays when the bug is mended. A scenario is drawn from its seed, so that a change of
scenario.py makes another one of it: then the bug has to be shown anew, by its own test if it has
one, or its entry goes. `SCENARIOS` counts those changes.
"""

from __future__ import annotations

from dataclasses import dataclass

SCENARIOS = 3  # the drawing of scenarios, as of now


@dataclass(frozen=True, slots=True)
class PastBug:
    seed: int
    scenarios: int  # of the drawing that it was found with
    what: str


PAST_BUGS: tuple[PastBug, ...] = ()


def seeds() -> list[int]:
    """Those whose scenario is still the one that was found."""
    return [bug.seed for bug in PAST_BUGS if bug.scenarios == SCENARIOS]
