"""The state that the console shows, collected once a second for all pages: whole, or its changes.

    observe ─▶ points, events (always, so that a page that opens later shows the minutes before)
    collect ─▶ the sections of the state (only while a page is open)

Holds counts, names, durations and hashes: no text of a request. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson

from baton.router.client_access.router import Router
from baton.router.console.advice_board import AdviceBoard
from baton.router.console.fault_log import Event, FaultLog, read_counts
from baton.router.console.latency_history import FIELDS, LatencyHistory, Point, read_totals
from baton.router.console.metric_values import by_label, cumulative_counts
from baton.router.console.prefix_tree import prefix_tree
from baton.router.console.request_rows import active_requests
from baton.router.console.worker_rows import Row, worker_rows
from baton.runtime import metrics

TREE_TICKS = 5  # between two drawings of the prefix tree, which costs most
TRACES_AT_OPENING = 30
TRACES_A_TICK = 20  # the newest; `GET /traces` has the others

Body = dict[str, Any]


class ConsoleState:
    """`whole` is the message for a page that opens, `change` that for pages that had the one
    before. `board` has the advice that is posted to it."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.board = AdviceBoard(_now)
        bounds = [cumulative_counts(each)[0] for each in (metrics.TTFT, metrics.ITL)]
        self._history = LatencyHistory(*bounds)
        self._faults = FaultLog()
        self._ticks = 0
        self._rows: dict[str, Row] = {}
        self._point: Point = []
        self._events: list[Event] = []
        self._sections: Body = {}
        self._shown_rows: dict[str, Row] = {}
        self._last_trace: str | None = None

    def observe(self) -> None:
        """Record the second that has passed."""
        self._ticks += 1
        wall_s = time.time()
        self._rows = worker_rows(self._router.fleet)
        self._point = self._history.add(_now(), wall_s, read_totals())
        self._events = self._faults.observe(wall_s, self._rows, read_counts())

    def restart(self) -> None:
        """Collect everything: the first page opens."""
        self._rows = worker_rows(self._router.fleet)
        self._sections, self._shown_rows = self._collect(tree=True), self._rows
        self._last_trace = self._router.serving.traces.newest_id

    def change(self) -> bytes:
        """Return what is new since the last call, or since `restart`."""
        sections = self._collect(tree=self._ticks % TREE_TICKS == 0)
        changed = {name: body for name, body in sections.items() if body != self._sections[name]}
        workers: dict[str, Row | None] = {
            name: row for name, row in self._rows.items() if row != self._shown_rows.get(name)
        }
        workers.update(dict.fromkeys(self._shown_rows.keys() - self._rows.keys()))
        traces = self._router.serving.traces
        new = traces.latest(TRACES_A_TICK, None, self._last_trace)
        self._sections, self._shown_rows = sections, self._rows
        self._last_trace = traces.newest_id
        return _message(
            {
                "workers": workers,
                "state": changed,
                "points": [self._point],
                "events": self._events,
                "traces": [orjson.Fragment(each) for each in new],
            }
        )

    def whole(self) -> bytes:
        """Return the state as of the last `change` or `restart`."""
        latest = self._router.serving.traces.latest(TRACES_AT_OPENING, None)
        return _message(
            {
                "whole": True,
                "model": self._router.model,
                "objectives": self._objectives(),
                "fields": FIELDS,
                "workers": self._shown_rows,
                "state": self._sections,
                "points": list(self._history.points),
                "events": list(self._faults.events),
                "traces": [orjson.Fragment(each) for each in latest],
            }
        )

    def _objectives(self) -> dict[str, float]:
        slo = self._router.serving.scorekeeper.slo
        return {"ttft_s": slo.ttft_s, "itl_s": slo.itl_s}

    def _collect(self, *, tree: bool) -> Body:
        fleet = self._router.fleet
        attempts = self._router.serving.dispatcher.attempts.values()
        prefixes = self._sections.get("prefixes")
        if tree or prefixes is None:
            prefixes = prefix_tree(fleet.recent_prompts, fleet.index.workers_with)
        return {
            "active": active_requests(attempts, fleet, _now()),
            "prefills": fleet.recent_prefills.counts(_now()),
            "placements": {k: v for k, v in by_label(metrics.DECISIONS_MADE).items() if v},
            "prefixes": prefixes,
            "advice": self.board.shown(),
        }


def _message(body: Body) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _now() -> float:
    return asyncio.get_running_loop().time()
