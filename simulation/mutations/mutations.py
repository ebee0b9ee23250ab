"""Deliberate breaks of the protocol, by name: what the lab is worth is that it catches each.

Each replaces one piece of the product for the length of a run. None is ever on outside of the
lab; `baton faults --mutation NAME` runs seeds until one of them breaks a promise.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from baton.decode_worker.credit_queue import CreditQueue
from baton.decode_worker.handoffs import Handoffs
from baton.decode_worker.kv_reservations import KvReservations
from baton.decode_worker.requests import Requests
from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequences import Group, Sequence
from baton.decode_worker.sessions import RouterSessions, _OutputLog
from baton.kv_transfer import granter
from baton.kv_transfer.fetch_ledger import FetchLedger
from baton.kv_transfer.lease import GranterLease, ReaderLease
from baton.kv_transfer.reader import HandoffReader
from baton.kv_transfer.session import ReaderSession
from baton.prefill_worker.prompts import Prompt
from baton.prefill_worker.scheduler import PrefillScheduler
from baton.proto import handoff_pb2
from baton.router.answers.choice_text import ChoiceText
from baton.router.dispatch import submitter
from baton.router.dispatch.attempt import Attempt
from baton.router.dispatch.dispatcher import Dispatcher
from baton.router.dispatch.retry_budget import HOLD_S, RetryBudget, RetryPermit
from baton.router.dispatch.retry_policy import Retry, RetryPolicy
from baton.router.fleet.circuits import Circuits
from baton.router.fleet.fleet import Fleet
from baton.router.requests.admission import Admission
from baton.runtime import identity
from baton.runtime.errors import ConfigError, Overloaded
from baton.runtime.links import LinkClosed
from baton.simulation.fleet.world import World
from baton.simulation.mutations.patches import Break, Mutation, always, applied
from baton.simulation.mutations.worker_mutations import OF_WORKERS


def named(name: str) -> Mutation:
    """Return the mutation of that name. Raises ConfigError if there is none."""
    if name not in MUTATIONS:
        raise ConfigError(f"--mutation {name}: give one of {', '.join(MUTATIONS)}")
    return partial(applied, MUTATIONS[name])


def _trusted_twice(before: Any) -> Any:
    def acknowledged(self: ReaderLease, n: int) -> bool:
        if n in self._sent:
            self._sent[n] += self._trusted_s
        return bool(before(self, n))

    return acknowledged


def _from_the_acknowledgement(before: Any) -> Any:
    def acknowledged(self: ReaderLease, n: int) -> bool:
        if n in self._sent:
            self._sent[n] = asyncio.get_running_loop().time()
        return bool(before(self, n))

    return acknowledged


def _half_a_lease(before: Any) -> Any:
    def begin(self: GranterLease, lease_s: float, now: float) -> None:
        before(self, lease_s / 2, now)

    return begin


def _no_end(before: Any) -> Any:
    def begin(self: GranterLease, lease_s: float, now: float) -> None:
        before(self, 1000 * lease_s, now)

    return begin


def _released_at_once(_: Any) -> Any:
    return lambda self, group, granter, blocks, settled: None


def _unpinned_with_the_stream(before: Any) -> Any:
    async def listen(self: Any) -> None:
        await before(self)
        if not self._closed.done():
            self._closed.set_result(None)

    return listen


def _deaf_to_closed(_: Any) -> Any:
    async def listen(self: Any) -> None:
        with suppress(LinkClosed):
            while True:
                message = await self._link.receive()
                if message.WhichOneof("kind") == "renew" and self._lease.renewed(
                    message.renew.n, asyncio.get_running_loop().time()
                ):
                    heard = handoff_pb2.Acknowledged(n=message.renew.n)
                    await self._send(handoff_pb2.GranterMessage(acknowledged=heard))

    return listen


def _no_partial_block(before: Any) -> Any:
    async def offer(self: Any, computed: granter.Computed) -> None:
        if not computed.partial_tokens:
            await before(self, computed)

    return offer


def _any_attempt(before: Any) -> Any:
    def take(self: Dispatcher, link: Any, outputs: Any) -> None:
        for output in outputs.outputs:
            attempt = self.attempts.get(output.request_id)
            if attempt is not None and output.choice in attempt.choices:
                output.attempt = attempt.attempt
                self.attempts.assign(attempt, link)
        before(self, link, outputs)

    return take


def _drawn_again(_: Any) -> Any:
    return lambda self: [s for s in self.sequences if not s.ended]


def _all_is_prompt(before: Any) -> Any:
    return lambda self: replace(before(self), prompt_tokens=self.length)


def _owed_nothing(_: Any) -> Any:
    return lambda self, resume: self.outputs.clear()


def _another_seed(before: Any) -> Any:
    def build(attempt: Attempt, *more: Any) -> Any:
        message = before(attempt, *more)
        message.sampling.seed = (message.sampling.seed + attempt.attempt - 1) % (1 << 64)
        return message

    return build


def _published_at_once(before: Any) -> Any:
    def reserve(self: KvReservations, group: Any) -> bool:
        reserved: bool = before(self, group)
        if reserved:
            self.publish(group, group.held, len(group.tokens))
        return reserved

    return reserve


def _without_parents(before: Any) -> Any:
    def chain(key: bytes, parent: bytes, tokens: list[int], size: int) -> list[bytes]:
        starts = range(0, len(tokens) - size + 1, size)
        return [before(key, parent, tokens[at : at + size], size)[0] for at in starts]

    return chain


def _whole_requests_alone(before: Any) -> Any:
    def send_cancel(self: Attempt, *choices: int) -> None:
        if not choices:
            before(self)

    return send_cancel


def _freed_under_a_step(_: Any) -> Any:
    def end(self: DecodeScheduler, sequence: Any) -> None:
        if not sequence.ended:
            sequence.ended = True
            self.release(sequence)

    return end


def _without_the_blocks(_: Any) -> Any:
    def conclude(self: HandoffReader) -> None:
        if self._first_received and not self._outcome.done():
            self._outcome.set_result(None)

    return conclude


def _without_logprobs(before: Any) -> Any:
    def first_tokens(self: Prompt, *more: Any) -> Any:
        message = before(self, *more)
        for token in message.tokens:
            token.ClearField("logprob")
        return message

    return first_tokens


def _ticket_lost(_: Any) -> Any:
    @contextmanager
    def ticket(self: Admission) -> Iterator[None]:
        self.taken += 1
        yield

    return ticket


def _refused_at_random(before: Any) -> Any:
    @contextmanager
    def ticket(self: Admission) -> Iterator[None]:
        if random.random() < 0.1:
            raise self._refusal()
        with before(self):
            yield

    return ticket


def _first_uncounted(before: Any) -> Any:
    def take(self: ChoiceText, output: Any, piece: Any) -> None:
        counted = self.tokens
        before(self, output, piece)
        if not counted and not self._characters:
            self.tokens = 0

    return take


def _half_a_line(before: Any) -> Any:
    def check_room(self: CreditQueue) -> None:
        if len(self) >= self._config.max_queue // 2:
            raise Overloaded(f"{len(self)} requests wait for KV room on this worker")
        before(self)

    return check_room


def _always_a_move(_: Any) -> Any:
    return lambda self, active, now_s, *, short: RetryPermit(now_s + HOLD_S)


def _not_asked(_: Any) -> Any:
    async def acquire(self: RetryPolicy, attempt: Attempt, retry: Retry) -> None:
        return

    return acquire


def _all_of_them(_: Any) -> Any:
    return lambda self, opened, workers: [boot_id for _, boot_id in opened]


def _first_boot_again(before: Any) -> Any:
    def started(self: World, name: str, *more: Any) -> Any:
        old = self.workers.get(name)
        if old is None:
            return before(self, name, *more)
        dice = self.dice
        self.dice = _Repeating(old.boot_id, dice)
        try:
            return before(self, name, *more)
        finally:
            self.dice = dice

    return started


class _Repeating(random.Random):
    """Gives an old boot id where a new one is drawn."""

    def __init__(self, boot_id: bytes, dice: random.Random) -> None:
        super().__init__(dice.random())
        self._boot_id = boot_id

    def randbytes(self, n: int) -> bytes:
        return self._boot_id


def _closed_too_early(before: Any) -> Any:
    return lambda self, unsettled: before(self, [])


def _heard_while_away(before: Any) -> Any:
    def note(self: Fleet, worker_id: str) -> None:
        if self._roster.get(worker_id) is None:
            before(self, worker_id)

    return note


MUTATIONS: dict[str, Break] = {
    "skip-checksums": Break("what lands is never compared", FetchLedger, "mismatched", always([])),
    "never-pin": Break("offered blocks may be given away", PrefillScheduler, "_pin", always(None)),
    "unpin-with-the-stream": Break(
        "a broken stream unpins at once", granter._Handoff, "_listen", _unpinned_with_the_stream
    ),
    "trust-for-two-leases": Break(
        "a reader trusts twice as long", ReaderLease, "acknowledged", _trusted_twice
    ),
    "lease-from-the-wrong-end": Break(
        "a reader's trust counts from when the acknowledgement came, not from when it asked",
        ReaderLease,
        "acknowledged",
        _from_the_acknowledgement,
    ),
    "half-a-lease": Break("a granter pins for L / 2", GranterLease, "__init__", _half_a_lease),
    "lease-without-end": Break("a granter pins for ever", GranterLease, "__init__", _no_end),
    "no-quarantine": Break(
        "blocks of an unfinished READ are free", Handoffs, "_quarantine", _released_at_once
    ),
    "ignore-closed": Break(
        "a granter waits for the lease's end", granter._Handoff, "_listen", _deaf_to_closed
    ),
    "closed-too-early": Break(
        "`closed` is said while READs are in flight", ReaderSession, "leave", _closed_too_early
    ),
    "drop-the-last-offer": Break(
        "the partial last block is not offered", granter._Handoff, "_offer", _no_partial_block
    ),
    "accept-late-tokens": Break("any attempt's tokens", Dispatcher, "take", _any_attempt),
    "draw-first-tokens-again": Break(
        "a worker draws the first tokens of a failed handoff again", Group, "undrawn", _drawn_again
    ),
    "forget-first-logprobs": Break(
        "the first token comes without its logprob", Prompt, "first_tokens", _without_logprobs
    ),
    "miscount-usage": Break(
        "a first token that shows nothing is not counted", ChoiceText, "_take", _first_uncounted
    ),
    "another-seed": Break("a retry draws otherwise", submitter, "build_submit", _another_seed),
    "forget-where-output-begins": Break(
        "penalties take the output for the prompt", Sequence, "draw", _all_is_prompt
    ),
    "publish-unread-blocks": Break(
        "blocks are cached before they are read", KvReservations, "reserve", _published_at_once
    ),
    "identities-without-parents": Break(
        "a block's identity is its own tokens'", identity, "chain", _without_parents
    ),
    "free-under-a-step": Break(
        "a step's blocks are freed while it runs", DecodeScheduler, "end", _freed_under_a_step
    ),
    "decode-before-the-blocks": Break(
        "a fetch is over with the first tokens", HandoffReader, "_conclude", _without_the_blocks
    ),
    "shared-last-block": Break(
        "choices write into one block", KvReservations, "take_copies", always([])
    ),
    "lose-tickets": Break("an admission is never returned", Admission, "ticket", _ticket_lost),
    "refuse-at-random": Break(
        "a router refuses though it has tickets", Admission, "ticket", _refused_at_random
    ),
    "refuse-with-room": Break(
        "a worker refuses with half a line", CreditQueue, "check_room", _half_a_line
    ),
    "no-budget-of-moves": Break(
        "all that fails is moved at once", RetryBudget, "take", _always_a_move
    ),
    "moves-beside-the-budget": Break("the budget is not asked", RetryPolicy, "acquire", _not_asked),
    "roster-without-changes": Break(
        "a linked worker's changes are not heard of", Fleet, "_note_change", _heard_while_away
    ),
    "no-cap-of-ejection": Break(
        "all workers that fail are passed over", Circuits, "_longest", _all_of_them
    ),
    "forget-a-cancel": Break("workers hear of no cancel", Attempt, "send_cancel", always(None)),
    "forget-a-stop-string": Break(
        "workers hear of no choice's end", Attempt, "send_cancel", _whole_requests_alone
    ),
    "ignore-a-cancel": Break("a worker goes on", Requests, "cancel", always(None)),
    "forget-deadlines": Break(
        "nothing ends at its deadline", Dispatcher, "_deadline_passed", always(None)
    ),
    "losses-untold": Break("a lost worker's requests wait", Dispatcher, "lost", always(None)),
    "hello-without-requests": Break(
        "a router that comes back asks for nothing", Dispatcher, "pending", always([])
    ),
    "reuse-a-boot-id": Break(
        "a worker restarts under its old boot id", World, "start_worker", _first_boot_again
    ),
    "forget-what-is-owed": Break(
        "a worker forgets what its router waits for", _OutputLog, "forget_accepted", _owed_nothing
    ),
    "keep-parked-requests": Break(
        "a dead router's requests stay", RouterSessions, "_expire", always(None)
    ),
    **OF_WORKERS,
}
