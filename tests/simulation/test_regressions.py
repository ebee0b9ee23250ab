"""Past bugs: each seed shows its bug where the fix is taken out, and none where it is in."""

from __future__ import annotations

from functools import partial

import pytest

from baton.simulation import fault_report, lab
from baton.simulation.fleet.draw_scenario import draw
from baton.simulation.mutations import patches
from baton.simulation.mutations.mutations import MUTATIONS
from baton.simulation.mutations.patches import broken_promises
from baton.simulation.mutations.regressions import PAST_BUGS

pytestmark = pytest.mark.usefixtures("quiet_logs")


@pytest.mark.parametrize("name", PAST_BUGS)
def test_a_past_bug_is_seen_without_its_fix_and_gone_with_it(name: str) -> None:
    bug = PAST_BUGS[name]
    owner, attribute = bug.undo.owner, bug.undo.name
    fixed = owner.__dict__[attribute]
    broken = partial(patches.applied, bug.undo)
    seen = broken_promises(lab.run(draw(bug.seed), broken).breaches)
    assert seen, f"seed {bug.seed} shows {name} no more: `baton faults --mutation {name}` finds one"
    assert owner.__dict__[attribute] is fixed
    assert lab.run(draw(bug.seed)).breaches == []


def test_a_regression_is_run_by_its_unique_name() -> None:
    assert not set(PAST_BUGS) & set(MUTATIONS)
    name, bug = next(iter(PAST_BUGS.items()))
    report = fault_report.run(bug.seed, 1, mutation=name, past=False, stop_at_first=True)
    assert report.failing_seeds == [bug.seed]
    assert any(f"--mutation {name}" in line for line in report.violations)
