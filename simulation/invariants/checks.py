"""The invariants of every seed; each breach is a line of text.

`Watch` looks while a run goes on: which handoffs fail or are closed, which blocks are given away,
and, in its parts, at leases, refusals, bounds and hangs. `of_history` and `of_world` look
afterwards. Nothing here changes what happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from baton.decode_worker.handoffs import PEER_FAULTS
from baton.decode_worker.sequences import Group
from baton.decode_worker.worker import DecodeWorker
from baton.engine.scheduling.blocks import Hold
from baton.kv_transfer.granter import GrantingWorker
from baton.kv_transfer.memory_mover import Attempt, Fate
from baton.kv_transfer.peers import grants
from baton.kv_transfer.peers.cached_prefix import CachedPrefix
from baton.prefill_worker.prompts import Prompt
from baton.prefill_worker.worker import PrefillWorker
from baton.proto import handoff_pb2, worker_pb2
from baton.router.dispatch.active_request import ActiveRequest
from baton.router.fleet.worker_link import WorkerLink
from baton.runtime.errors import BatonError, ReadFailed
from baton.runtime.registry import Role
from baton.simulation.fleet.client_view import TOKENIZER
from baton.simulation.fleet.engine_kind import HASHES, VOCAB, EngineKind
from baton.simulation.fleet.history import FINISHED, LEFT, ROUTER_LOST, Ask, History
from baton.simulation.fleet.scenario import Fault
from baton.simulation.fleet.world import DRIFT, RouterProcess, WorkerProcess, World
from baton.simulation.invariants.bounds import Bounds
from baton.simulation.invariants.drains import Drains
from baton.simulation.invariants.grammars import outside_grammar, watch_masks
from baton.simulation.invariants.hangs import Hangs
from baton.simulation.invariants.leases import Leases
from baton.simulation.invariants.membership import Membership
from baton.simulation.invariants.precision import Precision
from baton.simulation.invariants.proposals import watch_blocks
from baton.simulation.invariants.ranks import RankEnds
from baton.simulation.invariants.readiness import Readiness
from baton.simulation.invariants.refusals import Refusals
from baton.simulation.invariants.router_facts import RouterFacts
from baton.simulation.invariants.shares import Shares

PATIENT_S = 15.0  # no fault lasts so long: a request with so much time gets an answer
LATE_S = 0.01  # after its deadline, by its router's clock
SLOW_READS = 2  # of a client: the one it is at, and all that waits for it
ROUNDED_S = 0.002  # deadlines travel in milliseconds


class Watch:
    """`breaches` grows. `struck`: a fault has struck; before, no handoff fails."""

    def __init__(self, world: World, *, loaded: bool = True) -> None:
        """`loaded`: its workers have enough to do for their shares to be compared."""
        self.breaches: list[str] = []
        self.struck = False
        self.refusals = Refusals(world, self.breaches)
        self._bounds = Bounds(world, self.breaches)
        self._shares = Shares(self.breaches) if loaded else None
        self._router_facts = RouterFacts(self.breaches)
        self._hangs = Hangs(world, self.breaches)
        self.leases = Leases(world, self.breaches)
        self._precision = Precision(world, self.breaches)
        self._drains = Drains(world, self.breaches)
        self._readiness = Readiness(world, self.breaches)
        self._ranks = RankEnds(world, self.breaches)
        self.membership = Membership(world, self.breaches)
        self._world = world
        self._flying: dict[int, tuple[Attempt, bytes]] = {}  # READs that will land, from whose pool
        self._spoiled: set[tuple[bytes, bytes]] = set()  # readers and granters of READs that fail
        self._prompts: dict[
            bytes, list[Prompt | CachedPrefix]
        ] = {}  # all admitted, by granter's boot
        world.exchange.landing = self._landing

    def strikes(self, fault: Fault) -> None:
        """Record that a fault strikes now."""
        self.struck = True
        self._drains.struck(fault)
        self._readiness.struck(fault)
        self._ranks.struck(fault)
        self.membership.struck(fault)

    def over(self, process: WorkerProcess) -> None:
        """Watch a worker that has just been started."""
        if self._world.of_boot(process.boot_id) is not process:
            self.breaches.append(f"{process.machine.name}: it has an earlier process's boot id")
        self.refusals.over(process)
        if self._world.vocabulary is not None:
            watch_masks(process, self.breaches)
        self._hangs.over(process)
        pool, allocate = process.pool, process.pool.allocate
        engine, name = process.engine, process.machine.name

        def watched(count: int, hold: Hold) -> list[int]:
            blocks = allocate(count, hold)
            given = set(blocks)
            for batch in engine.under_way:
                for piece in batch.slices:
                    if not given.isdisjoint(piece.blocks):
                        taken = sorted(given.intersection(piece.blocks))
                        self.breaches.append(f"{name}: blocks {taken} of a step under way given")
            return blocks

        pool.allocate = watched  # type: ignore[method-assign]  # wraps this instance alone
        self.leases.over(process)
        self._precision.over(process)
        if isinstance(process.worker, DecodeWorker):
            watch_blocks(process, process.worker, self.breaches)
            self._watch_given_up(process, process.worker)
        else:
            self._watch_cached_reads(process, process.worker)

    def over_router(self, process: RouterProcess) -> None:
        """I4: of one attempt, on one link, and the next index, or it is not taken."""
        self.refusals.over_router(process)
        self._bounds.over_router(process)
        if self._shares is not None:
            self._shares.over_router(process)
        self._hangs.over_router(process)
        self._router_facts.over_router(process)
        self.membership.over_router(process)
        dispatcher, take = process.dispatcher, process.dispatcher.take

        def watched(link: WorkerLink, outputs: worker_pb2.StepOutputs) -> bool:
            named: dict[str, tuple[ActiveRequest, int]] = {}
            fitting: dict[str, int] = {}
            for output in outputs.outputs:
                attempt = dispatcher.attempts.get(output.request_id)
                if attempt is not None:
                    active_request = attempt.active_request
                    named[active_request.request_id] = (active_request, _accepted(active_request))
                    right = attempt.link is link and attempt.attempt == output.attempt
                    if right and output.HasField("token"):
                        before = fitting.get(active_request.request_id, 0)
                        fitting[active_request.request_id] = before + 1
            crowded = take(link, outputs)
            for name, (active_request, before) in named.items():
                if _accepted(active_request) - before > fitting.get(name, 0):
                    self.breaches.append(f"{process.machine.name}: {name} took an old token")
            return crowded

        dispatcher.take = watched  # type: ignore[method-assign]  # wraps this instance alone

    def posted(self, attempt: Attempt, fate: Fate) -> Fate:
        """Record a READ as it starts."""
        self.leases.posted(attempt, fate)
        if fate.failed or fate.stuck or fate.stale:  # its source may go
            self._spoiled.add((attempt.reader, attempt.granter))
        if attempt.checksummed and not fate.failed:
            self._flying[attempt.number] = (attempt, fate.stale or attempt.granter)
        return fate

    @contextmanager
    def watching_grants(self) -> Iterator[None]:
        """I2: a handoff that ended by `closed` has no READ in flight."""
        module: Any = grants
        grant = module.grant

        async def watched(link: Any, admit: Any, worker: GrantingWorker, *more: Any) -> Any:
            boot_id, pinned = worker.boot_id, list[int]()
            reader = b""

            def admitting(opening: handoff_pb2.OpenHandoff) -> Prompt | CachedPrefix:
                nonlocal reader
                prompt: Any = admit(opening)
                reader = opening.reader_boot_id
                ended = prompt.on_end
                self._prompts.setdefault(boot_id, []).append(prompt)

                def on_end(over: Prompt | CachedPrefix) -> None:
                    pinned.extend(over.pinned)
                    ended(over)

                prompt.on_end = on_end
                admitted: Prompt | CachedPrefix = prompt
                return admitted

            report = await grant(link, admitting, worker, *more)
            if report.end == "closed":
                self._check_closed(boot_id, reader, pinned)
            else:  # its READs may land late, and a later handoff of the same blocks close before
                for number in self._reading(boot_id, reader, pinned):
                    del self._flying[number]
            return report

        module.grant = watched
        try:
            with self.leases.watching():
                yield
        finally:
            module.grant = grant

    def still_working(self, history: History, role: Role, after_s: float) -> Iterable[str]:
        """Workers of a role that know a request which has ended so long ago: a decode worker
        as living, a prefill worker by a prompt that waits, is computed, or is pinned."""
        for process in self._world.workers.values():
            if process.role != role or not process.machine.alive:
                continue
            if any(name.split(".")[0] == history.request_id for name in self._known(process)):
                yield (
                    f"{process.machine.name} works for {history.request_id}, which was "
                    f"{history.ends[0]} {after_s:.3f} s ago"
                )

    def _known(self, process: WorkerProcess) -> Iterable[str]:
        """The requests that a worker works for, or keeps blocks for."""
        worker = process.worker
        if isinstance(worker, DecodeWorker):
            return [request.request_id for request in worker._requests.living()]
        scheduler = worker._scheduler
        open_ = (*scheduler._waiting, *scheduler._reading, *scheduler._computing)
        queued = [prompt.request_id for prompt in open_]
        admitted = self._prompts.get(process.boot_id, ())
        return queued + [prompt.request_id for prompt in admitted if prompt.pinned]

    def _check_closed(self, boot_id: bytes, reader: bytes, blocks: list[int]) -> None:
        granter = self._world.of_boot(boot_id)
        free = [block for block in blocks if not granter.pool.is_held(block, Hold.PINNED)]
        if self._reading(boot_id, reader, free):
            self.breaches.append(
                f"{granter.machine.name}: a handoff is closed and "
                f"{self._world.of_boot(reader).machine.name} reads its blocks still"
            )

    def _reading(self, boot_id: bytes, reader: bytes, blocks: list[int]) -> list[int]:
        """The READs of these blocks that will land: their reader lives, and their source."""
        if not blocks or not self._world.of_boot(reader).machine.alive:
            return []
        return [
            number
            for number, (attempt, source) in self._flying.items()
            if (attempt.granter, attempt.reader) == (boot_id, reader)
            and self._world.exchange.pool(source) is not None
            and not set(blocks).isdisjoint(attempt.remote)
        ]

    def _watch_given_up(self, process: WorkerProcess, worker: DecodeWorker) -> None:
        """No handoff fails before the first fault, nor ever by a READ that only waits for others
        on a slow link, unless one of its workers has ended."""
        handoffs: Any = worker._handoffs
        give_up = handoffs._give_up

        def watched(group: Group, candidate: worker_pb2.Candidate, error: BatonError) -> None:
            befallen, pair = self.struck, (process.boot_id, candidate.boot_id)
            if isinstance(error, ReadFailed):
                granter = self._world.of_boot(candidate.boot_id)
                gone = process.task.done() or not granter.machine.alive  # with its mover
                befallen = pair in self._spoiled or gone
            elif befallen:  # it may take the connection for READs with it, which others need
                self._spoiled.add(pair)
            if isinstance(error, PEER_FAULTS) and not befallen:
                self.breaches.append(
                    f"{process.machine.name}: a handoff from {candidate.worker_id}, which nothing "
                    f"has befallen, failed: {error.code}: {error}"
                )
            give_up(group, candidate, error)

        handoffs._give_up = watched

    def _watch_cached_reads(self, process: WorkerProcess, worker: PrefillWorker) -> None:
        """Check that no read of cached blocks fails before the first fault."""
        reads: Any = worker._reads
        note = reads._note_failure

        def watched(worker_id: str, boot_id: bytes, error: BatonError) -> None:
            if isinstance(error, PEER_FAULTS) and not self.struck:
                self.breaches.append(
                    f"{process.machine.name}: a read of what {worker_id} holds, which nothing has "
                    f"befallen, failed: {error.code}: {error}"
                )
            note(worker_id, boot_id, error)

        reads._note_failure = watched

    def _landing(self, attempt: Attempt) -> None:
        self._flying.pop(attempt.number, None)
        self.leases.landing(attempt)
        self._precision.landing(attempt)


def _accepted(active_request: ActiveRequest) -> int:
    return sum([len(choice.accepted) for choice in active_request.choices])


@dataclass(frozen=True, slots=True)
class Excuse:
    """The faults that one request met: its router's process stood still for `paused_s` at most,
    and its clock runs at `rate`; `full`: the refusing worker was full; `alone`: a fault left no
    decode worker."""

    paused_s: float = 0.0
    rate: float = 1.0
    full: bool = False
    alone: bool = False


def of_history(history: History, excuse: Excuse, kind: EngineKind = HASHES) -> Iterable[str]:
    """I4: one end, in time; the right tokens, all of them if it is said to be finished."""
    for breach in _of_history(history, excuse, kind):
        yield f"{history.request_id} {breach}; {history.ask}"


def _of_history(history: History, excuse: Excuse, kind: EngineKind) -> Iterable[str]:
    ends = history.ends
    if len(ends) != 1:
        yield f"ended {len(ends)} times: {ends}"
        return
    took_s, allowed_s = history.ended_s - history.asked_s, history.ask.deadline_s
    slow_s = SLOW_READS * history.ask.reads_s  # what came in time may be taken late
    if took_s > (allowed_s + slow_s + LATE_S) / excuse.rate + excuse.paused_s:
        yield f"took {took_s:.2f} s of {allowed_s:g} s"
    if ends[0] == "DeadlineExceeded" and took_s < allowed_s / (1 + DRIFT) - ROUNDED_S:
        yield f"was ended after {took_s:.2f} s of {allowed_s:g} s: {history.detail}"
    if not _allowed(ends[0], history.ask, excuse):
        yield f"ended with {ends[0]}: {history.detail}"
    for choice, tokens in enumerate(history.tokens):
        yield from _of_choice(history, choice, tokens, kind)
    if history.ask.grammar:
        yield from outside_grammar(history, VOCAB)
    if ends[0] == FINISHED and history.ask.enough is None:  # usage counts what stop strings cut
        yield from _of_usage(history)


def _of_usage(history: History) -> Iterable[str]:
    """The usage reported to the client, beside what it was shown: all tokens, but for
    the one that stops a choice."""
    received = 0
    for choice, text in enumerate(history.text):
        tokens, stopped = history.tokens[choice], history.finishes[choice] == ["stop"]
        shown = TOKENIZER.decode(tokens[:-1] if stopped else tokens)
        if text != shown:
            yield f"choice {choice}: {len(text)} tokens shown of {len(shown)}, or others"
        received += len(text) + stopped
    usage = history.usage
    if usage is None or (usage.prompt, usage.completion) != (len(history.ask.prompt), received):
        yield f"usage was {usage} after {received} tokens"


def _allowed(end: str, ask: Ask, excuse: Excuse) -> bool:
    """Whether a client may get this end: only its own request or a full fleet may explain an error.
    The fleet must recover from its own failures."""
    if end == "Overloaded":
        return excuse.full
    if end == "Unavailable":
        return excuse.alone
    if end == "DeadlineExceeded":
        return excuse.alone or ask.deadline_s < PATIENT_S
    return end in (FINISHED, LEFT, ROUTER_LOST) or (
        end == "Cancelled" and ask.reads_s > 0  # too slow for what it is sent
    )


def _of_choice(history: History, choice: int, tokens: list[int], kind: EngineKind) -> Iterable[str]:
    ask, finishes = history.ask, history.finishes[choice]
    finished = history.ends[0] == FINISHED
    drawn = ask.drawn(choice, None if finished else len(tokens), kind)
    expected = [one.token for one in drawn]
    whole = expected if ask.enough is None else expected[: ask.enough]
    if tokens != expected[: len(tokens)]:
        yield f"choice {choice}: tokens {tokens}, expected {expected}"
        return
    beside = [(one.logprob, one.top) for one in drawn[: len(tokens)]]
    if history.logprobs[choice] != beside:
        yield f"choice {choice}: logprobs {history.logprobs[choice]}, expected {beside}"
    if finished:
        if tokens != whole:
            yield f"choice {choice}: {len(tokens)} tokens of {len(whole)}"
        stopped = bool(whole) and whole[-1] in ask.stops
        if len(finishes) != 1 or (finishes[0] == "stop") > stopped:
            yield f"choice {choice} finished with {finishes}"


def of_world(world: World) -> Iterable[str]:
    """Afterwards: every loop lives, and nothing failed unseen."""
    for process in world.workers.values():
        if process.task.done():
            yield f"{process.machine.name}: its loop has ended: {process.task.exception()!r}"
    for router in world.routers.values():
        if router.task.done():
            yield f"{router.machine.name}: its fleet has ended: {router.task.exception()!r}"
    yield from world.loop.failures
