"""How the prompts of one answer end: the one that fails, and those that end because of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest

from baton.router.answers.choice_text import ChoiceDelta
from baton.router.answers.prompt_batch import PromptBatch
from baton.router.answers.request_handler import ClientGone, RequestHandler
from baton.runtime.errors import BatonError, Cancelled, Overloaded


class Prompt:
    """A handler of one prompt that raises `error` at once, or answers on; `ended` is what ended
    it."""

    choices = 1

    def __init__(self, error: BatonError | None = None) -> None:
        self.error = error
        self.ended: Exception | None = None

    @contextmanager
    def admitted(self) -> Iterator[None]:
        try:
            yield
        except (BatonError, ClientGone) as error:
            self.ended = error
            raise

    async def begin(self) -> None:
        if self.error is not None:
            raise self.error

    async def next(self) -> list[ChoiceDelta] | None:
        await asyncio.Event().wait()
        return None

    def leave(self) -> None:
        pass


async def answer(*prompts: Prompt) -> None:
    batch = PromptBatch([cast(RequestHandler, each) for each in prompts])
    with batch.admitted():
        await batch.begin()
        try:
            await batch.next()
        finally:
            batch.leave()


@pytest.mark.parametrize("index", [0, 1, 2])
async def test_a_refused_prompt_cancels_the_others(index: int) -> None:
    """They had begun, and would count as failed."""
    prompts = [Prompt(), Prompt(), Prompt()]
    prompts[index].error = Overloaded("no room")
    with pytest.raises(Overloaded, match="no room"):
        await answer(*prompts)
    assert type(prompts.pop(index).ended) is Overloaded
    assert [type(each.ended) for each in prompts] == [Cancelled, Cancelled]


async def test_a_client_that_leaves_ends_all_prompts_alike() -> None:
    prompts = [Prompt(), Prompt()]
    batch = PromptBatch([cast(RequestHandler, each) for each in prompts])
    with pytest.raises(ClientGone), batch.admitted():
        raise ClientGone
    assert [type(each.ended) for each in prompts] == [ClientGone, ClientGone]


async def test_an_error_of_the_answer_fails_all_prompts() -> None:
    prompts = [Prompt(), Prompt()]
    batch = PromptBatch([cast(RequestHandler, each) for each in prompts])
    with pytest.raises(Overloaded), batch.admitted():
        raise Overloaded("not of a prompt")
    assert [type(each.ended) for each in prompts] == [Overloaded, Overloaded]
