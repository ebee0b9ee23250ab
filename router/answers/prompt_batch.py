"""One answer to several prompts: each is a request of its own; choices are numbered over all.

    prompts  0  1        n = 2
    choices  0 1  2 3

Each prompt has its own ticket, placement and end; the first that fails fails the answer, and ends
the others. Knows no transport. Owned by the task that answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from baton.router.answers.choice_text import ChoiceDelta
from baton.router.answers.request_handler import RequestHandler, Usage
from baton.runtime.errors import BatonError, Cancelled

_QUEUED = 64  # messages that wait for the client; a prompt's own buffer bounds the rest


class PromptBatch:
    """Same methods as `RequestHandler`. All `members` have the same number of choices."""

    def __init__(self, members: Sequence[RequestHandler]) -> None:
        self._members = members
        self._each = members[0].choices
        self._found: asyncio.Queue[list[ChoiceDelta] | Exception | None] = asyncio.Queue(_QUEUED)
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = 0
        self._failed: RequestHandler | None = None  # the first that failed

    @property
    def choices(self) -> int:
        return self._each * len(self._members)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Same as `RequestHandler.admitted`, for all prompts or none."""
        with ExitStack() as stack:
            for member in self._members:
                stack.enter_context(self._admitted(member))
            yield

    @contextmanager
    def _admitted(self, member: RequestHandler) -> Iterator[None]:
        """Admit one prompt. One that ends because another failed has not failed: it is
        cancelled."""
        failure: BatonError | None = None
        try:
            with member.admitted():
                try:
                    yield
                except BatonError as error:
                    if self._failed in (None, member):
                        raise
                    failure = error
                    raise Cancelled("another prompt of the request failed") from error
        except Cancelled:
            if failure is None:
                raise
            raise failure from None

    async def begin(self) -> None:
        self._tasks = [
            asyncio.create_task(self._follow(index, member))
            for index, member in enumerate(self._members)
        ]

    async def next(self) -> list[ChoiceDelta] | None:
        """Same as `RequestHandler.next`; each call returns deltas of one prompt."""
        while self._ended < len(self._members):
            found = await self._found.get()  # bounded by the requests' deadline
            if isinstance(found, Exception):
                raise found
            if found is not None:
                return found
            self._ended += 1
        return None

    @property
    def trace_response(self) -> str | None:
        """Same as `RequestHandler.trace_response`, of the first prompt."""
        return self._members[0].trace_response

    def record_decoded(self) -> None:
        """Same as `RequestHandler.record_decoded`."""
        for member in self._members:
            member.record_decoded()

    def record_written(self) -> None:
        """Same as `RequestHandler.record_written`."""
        for member in self._members:
            member.record_written()

    def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        for member in self._members:
            member.leave()

    def usage(self) -> Usage:
        found = [member.usage() for member in self._members]
        return Usage(
            sum(usage.prompt for usage in found),
            sum(usage.completion for usage in found),
            sum(usage.cached for usage in found),
            sum(usage.accepted for usage in found),
            sum(usage.rejected for usage in found),
        )

    def unfinished(self) -> list[int]:
        return [
            index * self._each + choice
            for index, member in enumerate(self._members)
            for choice in member.unfinished()
        ]

    def with_prompt(self, piece: ChoiceDelta) -> ChoiceDelta:
        """Same as `RequestHandler.with_prompt`."""
        index, choice = divmod(piece.choice, self._each)
        own = self._members[index].with_prompt(replace(piece, choice=choice))
        return replace(own, choice=piece.choice)

    async def _follow(self, index: int, member: RequestHandler) -> None:
        try:
            await member.begin()
            while (pieces := await member.next()) is not None:
                shift = index * self._each
                await self._found.put([replace(p, choice=p.choice + shift) for p in pieces])
            await self._found.put(None)
        except Exception as error:  # raised where the answer is written
            self._failed = self._failed or member
            await self._found.put(error)
