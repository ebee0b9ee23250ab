"""A break is caught by a promise that it breaks, not by an exception of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import NoReturn

import pytest

from baton.decode_worker.kv_reservations import KvReservations
from baton.decode_worker.worker import DecodeWorker
from baton.kv_transfer.reader import HandoffReader
from baton.router.dispatch.dispatcher import Dispatcher
from baton.runtime.errors import Overloaded
from baton.simulation import lab
from baton.simulation.fleet.draw_scenario import draw
from baton.simulation.mutations import patches
from baton.simulation.mutations.patches import Break, Misfit, broken_promises

pytestmark = pytest.mark.usefixtures("quiet_logs")

LEAK = "after 12 s of quiet, r0: 1 tickets taken"
SEED = 0


@pytest.mark.parametrize(
    "ended",
    [
        "the lab raised KeyError('d7') at breaking:12",
        "d0: its loop has ended: RuntimeError('no')",
        "r0: its fleet has ended: RuntimeError('no')",
        "req-3 raised ValueError('no')",
        "partial raised RuntimeError('block 12 has no hold LEASED to release')",
        "nothing can happen any more; waiting: main",
        "200 s have passed; waiting: main",
    ],
)
def test_what_only_raised_or_stood_still_proves_nothing(ended: str) -> None:
    assert broken_promises([ended]) == []
    assert broken_promises([ended, LEAK]) == [LEAK]


def _no_arguments(_: object) -> Callable[..., None]:
    return lambda self: None


def _one_too_many(before: Callable[..., object]) -> Callable[..., object]:
    return lambda self, *more, **named: before(self, *more, **named, gone=True)


def _of_another_name(_: object) -> Callable[..., Awaitable[None]]:
    async def work(self: object, *_: object, **__: object) -> None:
        self.gone.since.long()  # type: ignore[attr-defined] # of another product

    return work


def _by_itself(error: Exception) -> Callable[[object], Callable[..., NoReturn]]:
    def made(_: object) -> Callable[..., NoReturn]:
        def fails(*_: object, **__: object) -> NoReturn:
            raise error

        return fails

    return made


@pytest.mark.parametrize(
    ("owner", "name", "make"),
    [
        (Dispatcher, "take", _no_arguments),
        (Dispatcher, "take", _one_too_many),
        (KvReservations, "reserve", _one_too_many),
        (DecodeWorker, "run", _of_another_name),
        (HandoffReader, "_await_landing", _of_another_name),
        (DecodeWorker, "run", _by_itself(KeyError("gone"))),
        (Dispatcher, "take", _by_itself(ValueError("gone"))),
        (KvReservations, "reserve", _by_itself(IndexError("gone"))),
    ],
)
def test_a_mutation_of_another_product_is_not_counted_as_caught(
    owner: type, name: str, make: Callable[[object], Callable[..., object]]
) -> None:
    """The product takes most of these for failed requests, and breaks its promises then."""
    before = owner.__dict__[name]
    with pytest.raises(Misfit, match="the break 'stale' does not fit the product: "):
        lab.run(draw(SEED), partial(patches.applied, Break("stale", owner, name, make)))
    assert owner.__dict__[name] is before


def test_what_the_product_makes_of_a_break_is_no_misfit() -> None:
    def handing_none(before: Callable[..., bool]) -> Callable[..., bool]:
        return lambda self, link, outputs: before(self, link, None)

    broken = Break("outputs that are none", Dispatcher, "take", handing_none)
    assert lab.run(draw(SEED), partial(patches.applied, broken)).breaches


def test_an_error_of_the_products_own_tree_is_raised_on_purpose() -> None:
    refusing = Break("full", Dispatcher, "take", _by_itself(Overloaded("full")))
    assert lab.run(draw(SEED), partial(patches.applied, refusing)).breaches
