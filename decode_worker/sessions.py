"""The sessions of routers: the outputs of their requests, kept until the router confirms them.

A link is the lease for the requests it carries. While a router's stream is broken its requests
are parked and continue; the router that reconnects names the requests it waits for and gets the
missing outputs by index; a request that it does not name, or that no stream claims within the
grace, is cancelled. Pure but for logs, timers of
the grace, and the event that wakes the sender.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from baton.decode_worker.sequences import RequestUpdate
from baton.proto import worker_pb2
from baton.runtime import logs
from baton.runtime.errors import BatonError, EngineError
from baton.runtime.links import LinkClosed

log = logs.get(__name__)

Submit = Callable[[worker_pb2.Submit, Callable[[RequestUpdate], None]], None]
Cancel = Callable[[str, int, Collection[int]], None]  # no choices: all of the request's

MAX_MESSAGE_OUTPUTS = 8192  # a long backlog goes in several messages, far below gRPC's limit
MAX_ENDED_REQUESTS = 4096  # ended requests per router that it has not settled


@dataclass(slots=True)
class _OutputLog:
    """The outputs of one request that its router may not have, in order, and its last prefill
    switch; `open_choices` have not ended."""

    attempt: int
    open_choices: set[int]
    outputs: list[worker_pb2.Output] = field(default_factory=list)
    prefill_switch: worker_pb2.PrefillSwitch | None = None

    def forget_accepted(self, resume: worker_pb2.Resume) -> None:
        """Drop the outputs that the router has: all before the named indices, and all of choices
        that it does not name. An end that it waits for is kept, whatever its index."""
        wanted = {entry.choice: entry.index for entry in resume.next}
        self.outputs = [
            output
            for output in self.outputs
            if output.choice in wanted and (output.end or output.index >= wanted[output.choice])
        ]


class Attachment:
    """One stream of a router: the `Session` that runtime/worker/router_links.py serves."""

    def __init__(self, owner: RouterSession) -> None:
        self._owner = owner
        self._pending: list[worker_pb2.Output] = []
        # by request: only the last one counts
        self._prefill_switches: dict[str, worker_pb2.PrefillSwitch] = {}
        self._wake = asyncio.Event()
        self._wake.set()
        self.replaced = False

    def push(self, update: RequestUpdate) -> None:
        if isinstance(update, worker_pb2.PrefillSwitch):
            self._prefill_switches[update.request_id] = update
        else:
            self._pending.append(update)
        self._wake.set()

    def replace(self) -> None:
        self.replaced = True
        self._wake.set()

    def receive(self, message: worker_pb2.RouterMessage) -> None:
        if not self.replaced:
            self._owner.receive(message)

    async def outputs(self) -> worker_pb2.StepOutputs:
        while not (self._pending or self._prefill_switches or self.replaced):
            self._wake.clear()
            await self._wake.wait()
        if self.replaced:
            raise LinkClosed("another stream of this router has taken over")
        taken, self._pending = (
            self._pending[:MAX_MESSAGE_OUTPUTS],
            self._pending[MAX_MESSAGE_OUTPUTS:],
        )
        switches, self._prefill_switches = self._prefill_switches, {}
        return worker_pb2.StepOutputs(outputs=taken, prefill_switches=switches.values())

    def detach(self) -> None:
        self._owner.detach(self)


class RouterSession:
    """All requests of one router process (one boot id) on this worker."""

    def __init__(self, submit: Submit, cancel: Cancel, park: Callable[[], None]) -> None:
        self._submit = submit
        self._cancel = cancel
        self._park = park
        self._logs: dict[str, _OutputLog] = {}
        self._attachment: Attachment | None = None

    @property
    def attached(self) -> bool:
        return self._attachment is not None

    def attach(self, resumes: Iterable[worker_pb2.Resume]) -> tuple[Attachment, list[str]]:
        """Attach a new stream of the router. Returns it with the outputs that the router lacks,
        and the ids of requests that the router waits for and this worker does not hold."""
        if self._attachment is not None:
            self._attachment.replace()
        wanted = {(resume.request_id, resume.attempt): resume for resume in resumes}
        for request_id, entry in list(self._logs.items()):
            if (request_id, entry.attempt) not in wanted:
                self._drop(request_id)
        attachment = Attachment(self)
        lost = []
        for (request_id, attempt), resume in wanted.items():
            kept = self._logs.get(request_id)
            if kept is None or kept.attempt != attempt:
                lost.append(request_id)
                continue
            if unwanted := kept.open_choices - {entry.choice for entry in resume.next}:
                self._cancel(request_id, attempt, unwanted)
            kept.forget_accepted(resume)
            for output in kept.outputs:
                attachment.push(output)
            if kept.prefill_switch is not None:
                attachment.push(kept.prefill_switch)
        self._attachment = attachment
        return attachment, lost

    def detach(self, attachment: Attachment) -> None:
        if self._attachment is attachment:
            self._attachment = None
            self._park()

    def receive(self, message: worker_pb2.RouterMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "submit":
            self._on_submit(message.submit)
        elif kind == "cancel":
            cancel = message.cancel
            entry = self._logs.get(cancel.request_id)
            if entry is None or not entry.open_choices:
                return  # another router may have it now
            if entry.attempt == cancel.attempt:
                self._cancel(cancel.request_id, cancel.attempt, cancel.choices)
        elif kind == "settled":
            for request_id in message.settled.request_ids:
                self._drop(request_id)
            for resume in message.settled.accepted:
                entry = self._logs.get(resume.request_id)
                if entry is not None and entry.attempt == resume.attempt:
                    entry.forget_accepted(resume)
        else:
            log.warning("router message ignored", kind=kind)

    def drop_all(self) -> None:
        """Cancel and forget every request: the grace is over."""
        for request_id in list(self._logs):
            self._drop(request_id)

    def _on_submit(self, submit: worker_pb2.Submit) -> None:
        request_id, attempt = submit.request_id, submit.attempt
        known = self._logs.get(request_id)
        if known is not None:
            if known.attempt >= attempt:
                return  # sent twice, or late
            self._drop(request_id)
        entry = _OutputLog(attempt, {choice.choice for choice in submit.choices})
        self._logs[request_id] = entry

        def emit(update: RequestUpdate) -> None:
            self._emit(entry, update)

        try:
            self._submit(submit, emit)
        except BatonError as error:
            self._refuse(submit, emit, error)
        except Exception as error:  # should be impossible: one request ends, not all
            log.exception("request failed", request_id=request_id)
            self._drop(request_id)  # it may have been queued
            self._logs[request_id] = entry
            failure = EngineError(f"the worker could not queue it: {type(error).__name__}")
            self._refuse(submit, emit, failure)

    def _refuse(
        self,
        submit: worker_pb2.Submit,
        emit: Callable[[worker_pb2.Output], None],
        error: BatonError,
    ) -> None:
        log.info("request refused", request_id=submit.request_id, code=error.code)
        for choice in submit.choices:
            emit(
                worker_pb2.Output(
                    request_id=submit.request_id,
                    attempt=submit.attempt,
                    choice=choice.choice,
                    index=len(choice.accepted),
                    end=worker_pb2.FAILED,
                    failure=worker_pb2.Failure(
                        code=error.code, detail=str(error), retryable=error.retryable
                    ),
                )
            )

    def _emit(self, entry: _OutputLog, update: RequestUpdate) -> None:
        if self._logs.get(update.request_id) is not entry:
            return  # settled, or replaced by a newer attempt
        if isinstance(update, worker_pb2.PrefillSwitch):
            entry.prefill_switch = update
        else:
            self._append(entry, update)
        if self._attachment is not None:
            self._attachment.push(update)

    def _append(self, entry: _OutputLog, output: worker_pb2.Output) -> None:
        entry.outputs.append(output)
        # Sent or not: a router reads a message's outputs before its switches.
        if entry.prefill_switch is not None:
            entry.prefill_switch.output_received = True
        if output.end:
            entry.open_choices.discard(output.choice)
            if not entry.open_choices:
                self._bound_ended()

    def _drop(self, request_id: str) -> None:
        entry = self._logs.pop(request_id, None)
        if entry is not None and entry.open_choices:
            self._cancel(request_id, entry.attempt, ())

    def _bound_ended(self) -> None:
        if len(self._logs) <= MAX_ENDED_REQUESTS:
            return
        ended = [name for name, entry in self._logs.items() if not entry.open_choices]
        for request_id in ended[: max(0, len(ended) - MAX_ENDED_REQUESTS)]:
            del self._logs[request_id]


class RouterSessions:
    """The sessions of all routers, by boot id; a parked one is dropped after the grace."""

    def __init__(self, submit: Submit, cancel: Cancel, grace_s: float) -> None:
        self._submit = submit
        self._cancel = cancel
        self._grace_s = grace_s
        self._sessions: dict[bytes, RouterSession] = {}
        self._graces: dict[bytes, asyncio.TimerHandle] = {}  # of the parked sessions

    @property
    def count(self) -> int:
        return len(self._sessions)

    def attach(self, hello: worker_pb2.RouterHello) -> tuple[Attachment, list[str]]:
        """Attach a router's stream to its session (see `RouterSession.attach`)."""
        boot_id = hello.boot_id
        if grace := self._graces.pop(boot_id, None):
            grace.cancel()
        if boot_id not in self._sessions:
            self._sessions[boot_id] = RouterSession(
                self._submit, self._cancel, lambda: self._park(boot_id)
            )
        return self._sessions[boot_id].attach(hello.resume)

    def _park(self, boot_id: bytes) -> None:
        log.info("router session parked", grace_s=self._grace_s)
        loop = asyncio.get_running_loop()
        self._graces[boot_id] = loop.call_later(self._grace_s, self._expire, boot_id)

    def _expire(self, boot_id: bytes) -> None:
        del self._graces[boot_id]
        self._sessions.pop(boot_id).drop_all()
