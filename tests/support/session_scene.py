"""A decode worker that only records what its routers' sessions ask of it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from baton.decode_worker.sessions import Attachment, RouterSessions
from baton.proto import worker_pb2

Emit = Callable[[worker_pb2.Output | worker_pb2.PrefillSwitch], None]


class Work:
    """A decode worker that only records the calls of its sessions."""

    def __init__(self) -> None:
        self.emit: dict[tuple[str, int], Emit] = {}
        self.cancelled: list[tuple[str | int | list[int], ...]] = []
        self.fails: Exception | None = None
        self.sessions = RouterSessions(self.submit, self.cancel, grace_s=0.05)

    def submit(self, submit: worker_pb2.Submit, emit: Emit) -> None:
        self.emit[submit.request_id, submit.attempt] = emit
        if self.fails is not None:
            raise self.fails

    def cancel(self, request_id: str, attempt: int, choices: Collection[int]) -> None:
        self.cancelled.append((request_id, attempt, *([sorted(choices)] if choices else [])))

    def token(
        self,
        request_id: str,
        index: int,
        end: worker_pb2.EndReason = worker_pb2.NOT_ENDED,
        **more: int,
    ) -> None:
        attempt, choice = more.get("attempt", 1), more.get("choice", 0)
        output = worker_pb2.Output(
            request_id=request_id, attempt=attempt, choice=choice, index=index, token=100 + index
        )
        output.end = end
        self.emit[request_id, attempt](output)

    def kept(self, request_id: str) -> list[int]:
        (session,) = self.sessions._sessions.values()
        return [output.index for output in session._logs[request_id].outputs]

    def asked(self, request_id: str, prefill: bytes) -> None:
        word = worker_pb2.PrefillSwitch(request_id=request_id, attempt=1, prefill_boot_id=prefill)
        self.emit[request_id, 1](word)


def submit(request_id: str, attempt: int = 1, choices: int = 1) -> worker_pb2.RouterMessage:
    named = [worker_pb2.Choice(choice=choice) for choice in range(choices)]
    made = worker_pb2.Submit(request_id=request_id, attempt=attempt, choices=named)
    return worker_pb2.RouterMessage(submit=made)


def hello(*resume: worker_pb2.Resume, boot: bytes = b"r" * 16) -> worker_pb2.RouterHello:
    return worker_pb2.RouterHello(router_id="router", boot_id=boot, resume=resume)


def resume(request_id: str, index: int, attempt: int = 1) -> worker_pb2.Resume:
    waits = [worker_pb2.ChoiceIndex(choice=0, index=index)]
    return worker_pb2.Resume(request_id=request_id, attempt=attempt, next=waits)


async def indices(session: Attachment) -> list[int]:
    outputs = await session.outputs()
    return [output.index for output in outputs.outputs]


async def asked(session: Attachment) -> list[tuple[str, bytes, bool]]:
    outputs = await session.outputs()
    return [
        (word.request_id, word.prefill_boot_id, word.output_received)
        for word in outputs.prefill_switches
    ]
