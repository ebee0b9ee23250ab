"""Past bugs: each seed shows its bug where the fix is taken out, and none where it is in."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import structlog

from baton.runtime import logs
from baton.simulation import fault_report, lab, mutations
from baton.simulation.mutations import MUTATIONS
from baton.simulation.regressions import PAST_BUGS
from baton.simulation.scenario import draw

WITHIN = 500


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    logs.setup("lab", "critical")
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("name", PAST_BUGS)
def test_a_past_bug_is_seen_without_its_fix_and_gone_with_it(name: str) -> None:
    bug = PAST_BUGS[name]
    owner, attribute = bug.undo.owner, bug.undo.name
    fixed = owner.__dict__[attribute]
    broken = partial(mutations.applied, bug.undo)
    # any change of the product makes other runs of the same seeds: then others are tried
    seeds = (bug.seed, *range(WITHIN))
    seen = next((seed for seed in seeds if lab.run(draw(seed), broken).breaches), None)
    assert seen is not None, f"{name} is not seen within {WITHIN} seeds"
    assert owner.__dict__[attribute] is fixed
    assert lab.run(draw(seen)).breaches == []


def test_a_past_bug_is_asked_for_by_name_and_has_a_name_of_its_own() -> None:
    assert not set(PAST_BUGS) & set(MUTATIONS)
    name, bug = next(iter(PAST_BUGS.items()))
    report = fault_report.run(bug.seed, 1, mutation=name, past=False, stop_at_first=True)
    assert report.failing_seeds == [bug.seed]
    assert any(f"--mutation {name}" in line for line in report.violations)
