"""Each deliberate break of the lab replaces something that exists, found without a fleet: a rename
of the product that leaves a mutation behind fails `make check`."""

from __future__ import annotations

import pytest

from baton.simulation.mutations.mutations import MUTATIONS
from baton.simulation.mutations.patches import Break
from baton.simulation.mutations.regressions import PAST_BUGS

BREAKS = {**MUTATIONS, **{name: bug.undo for name, bug in PAST_BUGS.items()}}


@pytest.mark.parametrize("broken", BREAKS.values(), ids=BREAKS)
def test_the_target_of_a_mutation_exists(broken: Break) -> None:
    target = broken.owner.__dict__.get(broken.name)
    assert target is not None, f"{broken.owner.__name__} has no {broken.name}"
    assert broken.make(target) is not target
