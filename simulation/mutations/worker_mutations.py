"""Deliberate breaks of how a worker ends, of what it owes its reader, and of what it tells.

A part of mutations.py, which says what they are for.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

from baton.decode_worker.requests import Requests
from baton.decode_worker.worker import DecodeWorker
from baton.engine.scheduling.step_health import StepHealth
from baton.engine.scheduling.step_pipeline import StepPipeline
from baton.kv_transfer import granter
from baton.kv_transfer.mover import ChecksumMonitor
from baton.kv_transfer.peers.registered_peers import RegisteredPeers
from baton.kv_transfer.reader import HandoffReader
from baton.prefill_worker.worker import PrefillWorker
from baton.runtime.errors import DeviceLost, Draining, EngineError
from baton.runtime.worker import drain
from baton.runtime.worker.block_feed import BlockFeed
from baton.simulation.mutations.block_mutations import OF_CACHED_BLOCKS, OF_CONVERTED_BLOCKS
from baton.simulation.mutations.control_mutations import OF_CONTROL
from baton.simulation.mutations.grammar_mutations import OF_GRAMMARS
from baton.simulation.mutations.membership_mutations import OF_MEMBERSHIP
from baton.simulation.mutations.patches import Break, always
from baton.simulation.mutations.placement_mutations import OF_PLACEMENT
from baton.simulation.mutations.speculation_mutations import OF_SPECULATION
from baton.simulation.mutations.unlike_mutations import OF_UNLIKE_WORKERS


def _its_step_alone(before: Any) -> Any:
    async def following(self: StepPipeline[Any]) -> Any:
        try:
            return await before(self)
        except DeviceLost as error:
            return self._take(EngineError(str(error)))

    return following


async def _no_wait(self: Any, within_s: float) -> None:
    self.draining.set()


def _stopped_before_it_has_finished(before: Any) -> Any:
    async def serve_until(*given: Any) -> None:
        *others, ends = given
        await before(*others, replace(ends, finish=ends.stop, stop=ends.finish))

    return serve_until


def _handed_back_in_silence(before: Any) -> Any:
    def fail(self: Requests, sequence: Any, error: Any) -> None:
        if isinstance(error, Draining):
            self._end(sequence, served=False)
        else:
            before(self, sequence, error)

    return fail


def _an_empty_cache(before: Any) -> Any:
    def snapshot_parts(self: BlockFeed) -> Any:
        parts = before(self)
        for part in parts:
            part.ClearField("stored")
        return parts

    return snapshot_parts


def _no_removals(before: Any) -> Any:
    return lambda self, stored, removed: before(self, stored, [])


def _failure_forgotten(before: Any) -> Any:
    async def fail(self: Any, error: Exception) -> None:
        await before(self, error)
        self._failure = None

    return fail


def _waited_for(_: Any) -> Any:
    async def check_registered(self: Any, candidate: Any) -> None:
        with suppress(OSError):
            self._records = await self._registry.workers()

    return check_registered


OF_WITHHELD_ANSWERS: dict[str, Break] = {
    "wait-for-checksums-for-ever": Break(
        "nothing that a granter owes is ever overdue",
        HandoffReader,
        "_answers_due",
        always(math.inf),
    ),
    "renew-after-a-failure": Break(
        "a granter that has failed keeps its reader's lease",
        granter._Handoff,
        "_fail",
        _failure_forgotten,
    ),
    "wait-for-the-registry": Break(
        "a reader waits for a registry that hangs, however long",
        RegisteredPeers,
        "_check_registered",
        _waited_for,
    ),
    "checksums-never-stuck": Break(
        "a worker never says that its checksum thread is stuck",
        ChecksumMonitor,
        "failure_reason",
        always(None),
    ),
}

OF_A_WORKERS_END: dict[str, Break] = {
    "readers-left-at-the-end": Break(
        "a prefill worker that drains waits for no reader",
        PrefillWorker,
        "drain",
        lambda before: _no_wait,
    ),
    "requests-left-at-the-end": Break(
        "a decode worker that drains finishes nothing",
        DecodeWorker,
        "drain",
        lambda before: _no_wait,
    ),
    "handed-back-in-silence": Break(
        "its router learns of no request that it left", Requests, "fail", _handed_back_in_silence
    ),
    "stop-before-the-readers": Break(
        "a server stops first, its readers' leases end afterwards",
        drain,
        "serve_until",
        _stopped_before_it_has_finished,
    ),
    "go-on-without-a-rank": Break(
        "a worker that has lost a rank fails the step alone", StepPipeline, "next", _its_step_alone
    ),
}

OF_WHAT_A_WORKER_TELLS: dict[str, Break] = {
    "cached-blocks-untold": Break(
        "no delta of a worker's cache is published", BlockFeed, "publish", always(None)
    ),
    "evicted-blocks-untold": Break(
        "a router never hears of what is evicted", BlockFeed, "publish", _no_removals
    ),
    "snapshot-of-nothing": Break(
        "a router that links again hears of no cache",
        BlockFeed,
        "_snapshot_parts",
        _an_empty_cache,
    ),
    "always-ready": Break(
        "a worker never says that no step ends", StepHealth, "not_ready_reason", always(None)
    ),
    "never-probed": Break(
        "an idle worker computes nothing", StepHealth, "request_probe", always(None)
    ),
}

OF_WORKERS = (
    OF_WITHHELD_ANSWERS
    | OF_A_WORKERS_END
    | OF_WHAT_A_WORKER_TELLS
    | OF_SPECULATION
    | OF_GRAMMARS
    | OF_MEMBERSHIP
    | OF_CACHED_BLOCKS
    | OF_PLACEMENT
    | OF_CONVERTED_BLOCKS
    | OF_UNLIKE_WORKERS
    | OF_CONTROL
)
