"""The granter's end of a handoff: offers a prompt's blocks while they are being computed.

    listener   open, renew, closed      ─▶ lease
    offerer    prompt.next() ─▶ Offer   at once; first tokens; failure
    checksums  offered blocks           in parts, while the reader already reads

The prompt's blocks stay pinned until the reader sends `closed` or the lease ends, even if the
stream breaks or this handler is cancelled earlier. Then `prompt.end()` unpins them, once. After a
failure renewals are ignored, so a reader that does not learn of it loses its lease. The worker owns
the prompt and its blocks; this module owns the lease and the stream. What a worker holds of a
prompt, and does not compute, is granted in the same way (peers/cached_prefix.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.checksum import block_seed, partial_tag
from baton.kv_transfer.checksum_cache import ChecksumCache
from baton.kv_transfer.lease import GranterLease
from baton.kv_transfer.mover import Mover
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime import waits
from baton.runtime.config import HandoffConfig
from baton.runtime.errors import BatonError, EngineError, HandoffError, LeaseLost, Unavailable
from baton.runtime.links import Link, LinkClosed

GranterLink = Link[handoff_pb2.GranterMessage, handoff_pb2.ReaderMessage]

MAX_DEADLINE_MS = 86_400_000  # the longest that a request may live
OFFER_QUEUE = 64  # computed chunks without checksums, per handoff
FAILURE_SEND_S = 0.2  # to send a reader the reason for the end


@dataclass(frozen=True, slots=True)
class Computed:
    """Blocks that no longer change. `first` is the index of the first one; a partial last block
    comes alone, without identity, with its number of tokens.

    For a reader with another KV dtype `targets` are the blocks that converted ones go into; of
    converted ones `each` lie one after another in `blocks` for an index, and `checksums`, [indices,
    slabs], are known."""

    first: int
    blocks: tuple[int, ...]
    identities: tuple[bytes, ...]
    partial_tokens: int = 0
    targets: tuple[int, ...] = ()
    each: int = 1
    checksums: NDArray[np.uint64] | None = field(default=None, compare=False)

    def parts(self, max_blocks: int) -> Iterator[Computed]:
        """Divide the blocks into parts of at most `max_blocks`, between which the checksums of
        other handoffs can be computed. Those of converted blocks are known: they stay together."""
        if self.checksums is not None:
            yield self
            return
        each = len(self.targets) // max(1, len(self.blocks))
        for start in range(0, len(self.blocks), max_blocks):
            end = start + max_blocks
            yield replace(
                self,
                first=self.first + start,
                blocks=self.blocks[start:end],
                identities=self.identities[start:end],
                targets=self.targets[start * each : end * each],
            )


Granted = Computed | handoff_pb2.FirstTokens | handoff_pb2.Held


class GrantedPrompt(Protocol):
    """The interface of an admitted prompt: one that a prefill worker computes, or the cached blocks
    that a worker holds."""

    async def next(self) -> Granted | None:
        """Return the next event; None after the last. Raises BatonError. The caller cancels it if
        the handoff ends earlier."""
        ...

    def end(self) -> None:
        """Unpin and cancel the prompt, since the handoff has ended. Called exactly once."""
        ...


Admit = Callable[[handoff_pb2.OpenHandoff], GrantedPrompt]
Send = Callable[[handoff_pb2.GranterMessage], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class GrantReport:
    """The result of a handoff. `refused`: not admitted, nothing was pinned. `failure`: the reason
    of a refusal, or the granter's own failure. `request_id` is empty if no opening came."""

    end: Literal["closed", "expired", "refused"]
    offered_blocks: int = 0
    seconds: float = 0.0
    failure: Exception | None = None
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class GrantingWorker:
    """The worker that grants, as its handoffs need it. `checksum_cache` has the checksums of
    blocks that are offered again and again, such as those of shared prefixes."""

    mover: Mover
    boot_id: bytes
    config: HandoffConfig
    checksum_cache: ChecksumCache | None = None


async def grant(
    link: GranterLink,
    admit: Admit,
    worker: GrantingWorker,
    on_offer: Callable[[], None] = lambda: None,
) -> GrantReport:
    """Serve one handoff to its end. Returns when none of its blocks is pinned.

    `admit` may raise (Overloaded, InvalidRequest); the error is sent to the reader. Cancellation
    counts as a broken stream: the blocks stay pinned until the lease ends, then CancelledError is
    raised. `on_offer` is called with each offer.
    """
    handoff = asyncio.create_task(_serve(link, admit, worker, on_offer))
    cancelled = False
    while not handoff.done():
        try:
            await waits.done_within(handoff)  # bounded by the lease
        except asyncio.CancelledError:
            cancelled = True
    report = handoff.result()
    if cancelled:
        raise asyncio.CancelledError
    return report


async def _serve(
    link: GranterLink, admit: Admit, worker: GrantingWorker, on_offer: Callable[[], None]
) -> GrantReport:
    started, request_id = _now(), ""
    try:
        opening = await _opening(link, worker.config)
        request_id, received = opening.request_id, _now()
        _check(opening, worker.boot_id)
        prompt = admit(opening)
    except LinkClosed as error:
        return GrantReport("refused", failure=error)
    except Exception as error:  # ends this handoff; sent to the reader
        await _send_failure(link.send, error)
        await link.close()
        return GrantReport("refused", 0, _now() - started, error, request_id)
    worker.mover.hold_progress()
    try:
        return await _Handoff(link, opening, received, prompt, worker, on_offer).run()
    finally:
        worker.mover.drop_progress()
        prompt.end()


async def _opening(link: GranterLink, config: HandoffConfig) -> handoff_pb2.OpenHandoff:
    """Return the opening. Raises HandoffError if it does not come in time or another message
    comes first."""
    try:
        async with asyncio.timeout(config.lease_s):
            message = await link.receive()
    except TimeoutError:
        raise HandoffError(f"no opening came within {config.lease_s:g} s") from None
    if message.WhichOneof("kind") != "open":
        raise HandoffError("the first message of the handoff is not its opening")
    return message.open


def _check(opening: handoff_pb2.OpenHandoff, boot_id: bytes) -> None:
    """Check an opening. Raises Unavailable if it is for another boot id of this worker,
    HandoffError if it is malformed."""
    if opening.granter_boot_id != boot_id:
        raise Unavailable(
            f"the handoff is for boot id {opening.granter_boot_id.hex()}; this worker has "
            f"restarted with {boot_id.hex()}"
        )
    if opening.lease_ms == 0 or not opening.tokens or len(opening.handoff_id) != 16:
        raise HandoffError("the opening lacks a lease, tokens or a handoff id of 16 bytes")


class _Handoff:
    """One admitted handoff, from `opened` to its end."""

    def __init__(
        self,
        link: GranterLink,
        opening: handoff_pb2.OpenHandoff,
        received: float,
        prompt: GrantedPrompt,
        worker: GrantingWorker,
        on_offer: Callable[[], None],
    ) -> None:
        config = worker.config
        self._link = link
        self._opening = opening
        self._lease_ms = min(opening.lease_ms, int(config.lease_s * 1000))
        self._lease = GranterLease(self._lease_ms / 1000, received)
        # Later than the reader's own deadline, so that a slow clock does not reject a renewal.
        deadline_ms = min(opening.deadline_ms or MAX_DEADLINE_MS, MAX_DEADLINE_MS)
        self._renewable_until = received + (deadline_ms + 2 * self._lease_ms) / 1000
        self._prompt = prompt
        self._mover = worker.mover
        self._boot_id = worker.boot_id
        self._verify = config.verify
        self._cache = worker.checksum_cache
        self._on_offer = on_offer
        self._sum_blocks = max(1, config.read_bytes // worker.mover.describe().block_bytes)
        self._sending = asyncio.Lock()
        self.to_checksum: asyncio.Queue[Computed] = asyncio.Queue(OFFER_QUEUE)
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._offered = 0
        self._failure: Exception | None = None

    async def run(self) -> GrantReport:
        started = _now()
        offerer = asyncio.create_task(self._offer_all())
        listener = asyncio.create_task(self._listen())  # after it: `opened` comes before any answer
        senders = [offerer, asyncio.create_task(self._send_checksums())]
        while not self._lease.expired(_now()):  # renewed in between
            if await waits.done_within(self._closed, self._lease.remaining(_now())):
                break
        await waits.cancel_all(senders)
        await self._hang_up(listener)
        end: Literal["closed", "expired"] = "closed" if self._closed.done() else "expired"
        seconds, name = _now() - started, self._opening.request_id
        return GrantReport(end, self._offered, seconds, self._failure, name)

    async def _hang_up(self, listener: asyncio.Task[None]) -> None:
        if not self._closed.done() and not listener.done():
            await _send_failure(self._send, LeaseLost("the lease has run out"))
        await self._link.close()
        await waits.cancel_all([listener])

    async def _listen(self) -> None:
        try:
            while True:
                message = await self._link.receive()
                kind = message.WhichOneof("kind")
                if kind == "closed":
                    self._closed.set_result(None)
                    return
                if kind != "renew":
                    await self._fail(HandoffError(f"{kind} has no place in an open handoff"))
                elif self._failure is not None:
                    continue
                elif _now() < self._renewable_until and self._lease.renewed(
                    message.renew.n, _now()
                ):
                    n = message.renew.n
                    await self._send(
                        handoff_pb2.GranterMessage(acknowledged=handoff_pb2.Acknowledged(n=n))
                    )
                else:
                    await self._fail(LeaseLost("the lease, or its request's time, was over before"))
        except LinkClosed:
            return  # the lease continues without renewals

    async def _offer_all(self) -> None:
        try:
            opened = handoff_pb2.Opened(lease_ms=self._lease_ms)
            await self._send(handoff_pb2.GranterMessage(opened=opened))
            while (item := await self._prompt.next()) is not None:
                if self._lease.expired(_now()):
                    return
                if isinstance(item, Computed):
                    await self._offer(item)
                elif isinstance(item, handoff_pb2.Held):
                    await self._send(handoff_pb2.GranterMessage(held=item))
                else:
                    await self._send(handoff_pb2.GranterMessage(first_tokens=item))
        except LinkClosed:
            return
        except Exception as error:  # ends this handoff; sent to the reader
            await self._fail(error)

    async def _offer(self, computed: Computed) -> None:
        held = max(0, self._opening.held_blocks - computed.first)  # the reader has these
        wanted = computed
        if held:
            sums = computed.checksums
            wanted = replace(
                computed,
                first=computed.first + held,
                blocks=computed.blocks[held * computed.each :],
                identities=computed.identities[held:],
                checksums=None if sums is None else sums[held:],
            )
        if not wanted.blocks:
            return
        offer = handoff_pb2.Offer(
            first=wanted.first, blocks=wanted.blocks, partial_tokens=wanted.partial_tokens
        )
        await self._send(handoff_pb2.GranterMessage(offer=offer))
        self._offered += len(wanted.blocks) // wanted.each
        self._on_offer()
        if self._verify:
            await self.to_checksum.put(wanted)

    async def _send_checksums(self) -> None:
        try:
            while True:
                computed = await self.to_checksum.get()
                for part in computed.parts(self._sum_blocks):
                    sums = handoff_pb2.Checksums(
                        first=part.first, checksums=await self._checksums(part)
                    )
                    await self._send(handoff_pb2.GranterMessage(checksums=sums))
        except LinkClosed:
            return
        except Exception as error:  # ends this handoff; sent to the reader
            await self._fail(error)

    async def _checksums(self, computed: Computed) -> list[int]:
        """Return the blocks' checksums in order, from the cache where possible."""
        if computed.checksums is not None:
            return [value for row in computed.checksums.tolist() for value in row]
        tags = list(computed.identities)
        if computed.partial_tokens:
            tags = [partial_tag(self._opening.handoff_id, computed.partial_tokens)]
        cache = None if computed.partial_tokens else self._cache
        known = {
            i: row
            for i, (block, tag) in enumerate(zip(computed.blocks, tags, strict=True))
            if cache is not None and (row := cache.get(block, tag)) is not None
        }
        missing = [i for i in range(len(tags)) if i not in known]
        if missing:
            blocks = [computed.blocks[i] for i in missing]
            seeds = [block_seed(self._boot_id, computed.blocks[i], tags[i]) for i in missing]
            for i, row in zip(missing, await self._mover.checksums(blocks, seeds), strict=True):
                known[i] = row
                if cache is not None:
                    cache.put(computed.blocks[i], tags[i], row)
        return [value for i in range(len(tags)) for value in known[i].tolist()]

    async def _fail(self, error: Exception) -> None:
        """Send the error to the reader, which then closes. Blocks stay pinned until then, or until
        the lease ends."""
        self._failure = self._failure or error
        try:
            await self._send(_failed(error))
        except LinkClosed:
            return

    async def _send(self, message: handoff_pb2.GranterMessage) -> None:
        async with self._sending:
            await self._link.send(message)


def _failed(error: Exception) -> handoff_pb2.GranterMessage:
    """Return the failure message. An error outside `BatonError` is sent as an EngineError with
    only its class name."""
    if not isinstance(error, BatonError):
        error = EngineError(f"the granter failed: {type(error).__name__}")
    failure = worker_pb2.Failure(code=error.code, detail=str(error), retryable=error.retryable)
    return handoff_pb2.GranterMessage(failed=failure)


async def _send_failure(send: Send, error: Exception) -> None:
    """Send the reason for the handoff's end, if the stream accepts it in time."""
    sending = asyncio.create_task(send(_failed(error)))
    await waits.done_within(sending, FAILURE_SEND_S)
    await waits.cancel_all([sending])


def _now() -> float:
    return asyncio.get_running_loop().time()
