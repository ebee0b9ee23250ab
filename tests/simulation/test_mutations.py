"""What the lab is worth: each deliberate break of the product is caught, and leaves no trace.

The seeds below each caught one; they are tried first, since 300 seeds take some eight seconds.
`baton faults --mutation NAME` finds them again after a change of the scenarios.
"""

from __future__ import annotations

import pytest

from baton.simulation import lab
from baton.simulation.fleet.draw_scenario import CONTROLLED_EVERY, CONTROLLED_SEED, draw
from baton.simulation.mutations import mutations
from baton.simulation.mutations.control_mutations import OF_CONTROL
from baton.simulation.mutations.mutations import MUTATIONS
from baton.simulation.mutations.patches import Mutation, broken_promises
from tests.support.controller_breaks import CONTROLLER_BREAKS

pytestmark = pytest.mark.usefixtures("quiet_logs")

WITHIN = 500
CONTROLLED_WITHIN = 120  # of the seeds with controllers
CAUGHT_BY = {
    "skip-checksums": 7,
    "never-pin": 0,
    "unpin-with-the-stream": 302,
    "trust-for-two-leases": 18,
    "lease-from-the-wrong-end": 49,
    "half-a-lease": 1,
    "lease-without-end": 62,
    "no-quarantine": 1,
    "ignore-closed": 4,
    "closed-too-early": 3,
    "wait-for-checksums-for-ever": 155,
    "renew-after-a-failure": 15,
    "drop-the-last-offer": 0,
    "accept-late-tokens": 56,
    "draw-first-tokens-again": 1,
    "forget-first-logprobs": 9,
    "miscount-usage": 17,
    "another-seed": 38,
    "use-unverified-history": 23,
    "keep-pins-of-history": 6,
    "keep-converted-blocks": 60,
    "free-under-a-conversion": 60,
    "publish-imprecise-history": 60,
    "publish-imprecise-prompts": 100,
    "keep-the-granters-order": 160,
    "read-into-the-wrong-half": 160,
    "check-half-a-block": 160,
    "free-while-put-in-order": 360,
    "reuse-destinations-of-history": 116,
    "forget-where-output-begins": 4,
    "publish-unread-blocks": 3,
    "identities-without-parents": 0,
    "free-under-a-step": 0,
    "decode-before-the-blocks": 0,
    "shared-last-block": 0,
    "lose-tickets": 0,
    "refuse-at-random": 2,
    "refuse-with-room": 4,
    "no-budget-of-moves": 13,
    "moves-beside-the-budget": 13,
    "roster-without-changes": 0,
    "no-cap-of-ejection": 13,
    "forget-a-cancel": 8,
    "forget-a-stop-string": 182,
    "ignore-a-cancel": 8,
    "forget-deadlines": 142,
    "losses-untold": 22,
    "hello-without-requests": 22,
    "reuse-a-boot-id": 10,
    "forget-what-is-owed": 171,
    "keep-parked-requests": 29,
    "readers-left-at-the-end": 30,
    "requests-left-at-the-end": 17,
    "handed-back-in-silence": 64,
    "stop-before-the-readers": 272,
    "cached-blocks-untold": 0,
    "evicted-blocks-untold": 4,
    "snapshot-of-nothing": 8,
    "wait-for-the-registry": 94,
    "checksums-never-stuck": 185,
    "always-ready": 136,
    "never-probed": 306,
    "accept-one-too-many": 1,
    "publish-rejected-tokens": 6,
    "keep-rejected-blocks": 1,
    "publish-without-the-draft": 59,
    "matcher-not-rebuilt": 99,
    "rejected-proposals-in-the-matcher": 59,
    "mask-of-the-first-row": 19,
    "go-on-without-a-rank": 12,
    "forget-in-an-outage": 37,
    "take-unsigned-entries": 104,
    "count-replayed-entries": 197,
    "announce-once": 37,
    "ready-without-workers": 24,
    "no-slow-start": 20,
    "take-unsigned-reports": 104,
    "count-replayed-reports": 304,
    "count-waits-for-ever": 23,
    **{name: seed for name, (seed, _) in CONTROLLER_BREAKS.items()},
}
# Those of `make test`, one of each promise; `make nightly` has them all.
REPRESENTATIVES = {
    "skip-checksums",
    "never-pin",
    "no-quarantine",
    "accept-late-tokens",
    "draw-first-tokens-again",
    "free-under-a-step",
    "check-half-a-block",
    "lose-tickets",
    "moves-beside-the-budget",
    "forget-deadlines",
    "snapshot-of-nothing",
    "publish-rejected-tokens",
}


def test_there_are_enough_of_them_and_each_has_its_seed() -> None:
    assert len(MUTATIONS) >= 25
    assert REPRESENTATIVES < set(CAUGHT_BY) == set(MUTATIONS)
    assert all(seed in _seeds(name) for name, seed in CAUGHT_BY.items())


@pytest.mark.parametrize(
    "name",
    [
        name if name in REPRESENTATIVES else pytest.param(name, marks=pytest.mark.nightly)
        for name in MUTATIONS
    ],
)
def test_a_break_is_caught_and_without_it_all_is_well(name: str) -> None:
    owner, attribute = MUTATIONS[name].owner, MUTATIONS[name].name
    before = owner.__dict__[attribute]
    broken = mutations.named(name)
    # any change of the product makes other runs of the same seeds: then others are tried
    seeds = (CAUGHT_BY[name], *_seeds(name))
    caught = next((seed for seed in seeds if _breaks_a_promise(seed, broken)), None)
    assert caught is not None, f"{name} is not caught within {len(seeds)} seeds"
    assert owner.__dict__[attribute] is before
    assert lab.run(draw(caught)).breaches == []


def _seeds(name: str) -> range:
    """Return the seeds of which one catches a break: those of controllers are rare."""
    if name in OF_CONTROL:
        return range(CONTROLLED_SEED, CONTROLLED_EVERY * CONTROLLED_WITHIN, CONTROLLED_EVERY)
    return range(WITHIN)


def _breaks_a_promise(seed: int, broken: Mutation) -> bool:
    return bool(broken_promises(lab.run(draw(seed), broken).breaches))
