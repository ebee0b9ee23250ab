"""The tokenizer's queue: how many prompts wait, and what becomes of those that nobody wants."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import tokenizers

from baton.router.tokenizer import ENCODE_THREADS, HfTokenizer
from baton.runtime.errors import InvalidRequest, Overloaded


class Held:
    """A tokenizer for `queue` prompts whose threads go on when the test says so."""

    def __init__(self, folder: Path, queue: int) -> None:
        self.tokenizer = HfTokenizer(folder / "tokenizer.json", queue)
        self.go = threading.Event()
        self.begun: list[str] = []
        encode = self.tokenizer._encode

        def wait(text: str, add_special_tokens: bool) -> list[int]:
            self.begun.append(text)
            assert self.go.wait(20)
            return encode(text, add_special_tokens)

        self.tokenizer._encode = wait  # type: ignore[method-assign]

    async def ask(self, text: str) -> asyncio.Task[list[int]]:
        """It has its place, or has been refused."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        task = asyncio.create_task(encoding)
        await asyncio.sleep(0)
        return task

    async def begin(self, text: str) -> asyncio.Task[list[int]]:
        """A thread is at it."""
        task = await self.ask(text)
        async with asyncio.timeout(20):
            while text not in self.begun:
                await asyncio.sleep(0.001)
        return task


@pytest.fixture
async def held(model_folder: Path) -> AsyncIterator[Held]:
    made = Held(model_folder, ENCODE_THREADS + 1)
    yield made
    made.go.set()
    await made.tokenizer.close()


async def test_waiting_prompts_are_bounded(model_folder: Path) -> None:
    tokenizer = HfTokenizer(model_folder / "tokenizer.json", 2)
    replies = await asyncio.gather(
        *(tokenizer.encode("a" * 10_000, add_special_tokens=True) for _ in range(4)),
        return_exceptions=True,
    )
    assert sum(isinstance(reply, Overloaded) for reply in replies) == 2
    assert await tokenizer.encode("a", add_special_tokens=True)
    await tokenizer.close()


async def test_a_prompt_that_a_thread_is_at_counts_though_its_request_has_ended(
    held: Held,
) -> None:
    """Deadlines would else let in as many as come: a thread cannot be stopped."""
    for task in (await held.begin("a"), await held.begin("b")):
        task.cancel()
    waiting, refused = await held.ask("c"), await held.ask("d")
    assert isinstance(refused.exception(), Overloaded) and not waiting.done()
    assert held.begun == ["a", "b"]
    held.go.set()
    assert held.tokenizer.decode(await waiting) == "c"
    assert held.tokenizer.decode(await (await held.ask("e"))) == "e"


async def test_a_prompt_whose_request_has_ended_leaves_the_queue_at_once(held: Held) -> None:
    running = [await held.begin("a"), await held.begin("b")]
    left = await held.ask("c")
    left.cancel()
    await asyncio.wait({left})
    next_one = await held.ask("d")
    assert not next_one.done()
    held.go.set()
    texts = [held.tokenizer.decode(await task) for task in (*running, next_one)]
    assert texts == ["a", "b", "d"]
    assert sorted(held.begun) == ["a", "b", "d"]  # no thread looked at the other


async def test_a_text_that_is_not_unicode_frees_its_thread(model_folder: Path) -> None:
    tokenizer = HfTokenizer(model_folder / "tokenizer.json", 1)
    for _ in range(2 * ENCODE_THREADS):
        with pytest.raises(InvalidRequest):
            await tokenizer.encode("\ud800", add_special_tokens=False)
    assert await tokenizer.encode("a", add_special_tokens=False)
    await tokenizer.close()


async def test_closing_does_not_wait_for_a_thread(held: Held) -> None:
    running = await held.begin("a")
    await held.tokenizer.close()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await running


@pytest.mark.timed
async def test_a_long_text_does_not_stop_the_other_requests(model_folder: Path) -> None:
    """The loop is away for a small part of the encoding at a time, on a busy machine too."""
    drawn = random.Random(1)
    words = ["".join(drawn.choices("abcdefgh", k=drawn.randint(2, 9))) for _ in range(3000)]
    text = " ".join(drawn.choices(words, k=60_000))
    tokenizer = HfTokenizer(model_folder / "tokenizer.json")
    shares = []
    for _ in range(3):  # another process may take the core once, for as long as it likes
        began_s = last_s = time.perf_counter()
        encoding = asyncio.create_task(tokenizer.encode(text, add_special_tokens=False))
        longest_s = 0.0
        while not encoding.done():
            await asyncio.sleep(0.001)
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        shares.append(longest_s / (last_s - began_s))
    assert min(shares) < 0.5, shares
    plain = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    assert encoding.result() == plain.encode(text, add_special_tokens=False).ids
    await tokenizer.close()
