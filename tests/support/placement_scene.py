"""Workers as placement sees them, and a request placed on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from baton.router.fleet.placement import FleetView, Placement, PlacementInput, open_groups
from baton.router.fleet.placement import place as place_on
from baton.router.fleet.radix_index import Holders
from baton.router.fleet.request_need import Need
from baton.router.fleet.roster import Roster
from baton.router.fleet.worker_view import KvFormat, WorkerView
from baton.runtime.config import PlacementMode

SHAPE = KvFormat("f", "float32", 16)


@dataclass(frozen=True, slots=True)
class Seen(WorkerView):
    """A worker with what placement knows of it beside its view."""

    held_blocks: int = 0
    passed_over: bool = False


def view(name: str, **fields: Any) -> Seen:
    made = Seen(name, name.encode(), name.split("-")[0], "h:1", SHAPE)
    return replace(made, **{"free_blocks": 1000, "total_blocks": 1000, **fields})


def changed(worker: Seen, **fields: Any) -> Seen:
    return replace(worker, **fields)


def place(
    need: Need,
    workers: Sequence[Seen],
    mode: PlacementMode,
    *,
    read_cached: bool = True,
    draws: Random | None = None,
) -> Placement:
    """The placement, with the workers as the test has them."""
    roster = Roster()
    groups: dict[int, int] = {}
    for number, worker in enumerate(workers):
        bit = 1 << number if worker.held_blocks or number % 2 else 0
        roster.put(replace(worker, waiting=worker.waiting + 1, bit=bit))  # then as it is
        roster.put(replace(worker, bit=bit))
        if worker.held_blocks:
            groups[worker.held_blocks] = groups.get(worker.held_blocks, 0) | bit
    passed_over = frozenset(each.boot_id for each in workers if each.passed_over)
    fleet = FleetView(roster, passed_over, draws=draws)
    kinds = open_groups(need, fleet)
    holders = Holders([(groups[blocks], blocks) for blocks in sorted(groups, reverse=True)])
    given = PlacementInput(need, fleet, kinds, lambda shape: holders, mode, read_cached)
    found = place_on(given)
    own = {worker.worker_id: worker for worker in workers}
    candidates = tuple(own[worker.worker_id] for worker in found.candidates)
    source = found.source
    if source is not None:
        source = replace(source, worker=own[source.worker.worker_id])
    decode = own[found.decode.worker_id]
    return Placement(decode, candidates, found.local, found.reason, source)


NEED = Need(tokens=1000, output_tokens=100, most_tokens=1100)
