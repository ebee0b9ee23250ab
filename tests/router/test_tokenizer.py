"""The tokenizer's queue: how many prompts wait, and what becomes of those that no client wants."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.text import tokenizer as tokenizer_module
from baton.router.text.encode_queue import LONG_TEXT_CHARS, on_behalf_of
from baton.router.text.tokenizer import ENCODE_THREADS, HfTokenizer
from baton.runtime.errors import InvalidRequest, Overloaded
from tests.support.encoding_threads import before_encoding
from tests.support.waiting import eventually


class Held:
    """A tokenizer for `queue` prompts whose threads go on when the test says so."""

    def __init__(self, folder: Path, queue: int) -> None:
        self.tokenizer = HfTokenizer(folder / "tokenizer.json", queue)
        self.go = threading.Event()
        self.begun: list[str] = []
        before_encoding(self.tokenizer, self._wait)

    def _wait(self, text: str) -> None:
        self.begun.append(text)
        assert self.go.wait(20)

    async def ask(self, text: str) -> asyncio.Task[list[int]]:
        """It has its place, or has been refused."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        task = asyncio.create_task(encoding)
        await asyncio.sleep(0)
        return task

    async def begin(self, text: str) -> asyncio.Task[list[int]]:
        """A thread is at it."""
        task = await self.ask(text)
        await eventually(lambda: text in self.begun, 20)
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


async def test_a_prompt_in_a_thread_counts_after_its_request_ended(
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


async def test_a_prompt_of_an_ended_request_leaves_the_queue_at_once(held: Held) -> None:
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
            # A turn of the loop that comes late shows how long the text held it.
            await asyncio.sleep(0.001)
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        shares.append(longest_s / (last_s - began_s))
    assert min(shares) < 0.5, shares
    plain = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    assert encoding.result() == plain.encode(text, add_special_tokens=False).ids
    await tokenizer.close()


async def test_a_thread_is_kept_from_long_texts(held: Held) -> None:
    long = [await held.ask("a" * (LONG_TEXT_CHARS + 1)) for _ in range(2)]
    short = await held.begin("b")
    assert len(held.begun) == 2 and not any(task.done() for task in (*long, short))
    held.go.set()
    await asyncio.gather(*long, short)


async def test_a_full_queue_refuses_the_tenant_with_most(model_folder: Path) -> None:
    held = Held(model_folder, ENCODE_THREADS + 3)
    with on_behalf_of(b"flood"):
        flood = [await held.ask(f"f{number}") for number in range(ENCODE_THREADS + 3)]
    with on_behalf_of(b"other"):
        other = await held.ask("x")
    await asyncio.sleep(0)
    assert isinstance(flood[-1].exception(), Overloaded) and not other.done()
    held.go.set()
    await asyncio.gather(other, *flood[:-1])
    await held.tokenizer.close()


async def test_a_text_too_long_is_left_after_a_part_of_it(held: Held) -> None:
    text = "the lazy dog " * 50_000
    held.go.set()
    assert await held.tokenizer.exceeds(text, 4096)
    assert len("".join(held.begun)) < len(text) / 4
    held.begun.clear()
    assert not await held.tokenizer.exceeds(text, len(text) // 6 + 1)
    assert held.begun == []


_PIECES = st.sampled_from(["the ", "dog", " ", "\n", "é", "aaaa", "<|im_end|>", "🎉", "x y"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_PIECES, st.integers(1, 40)), min_size=1, max_size=40))
def test_no_text_that_fits_is_too_long(model_folder: Path, parts: list[tuple[str, int]]) -> None:
    text = "".join(piece * count for piece, count in parts)

    async def main() -> None:
        tokenizer = HfTokenizer(model_folder / "tokenizer.json")
        tokens = await tokenizer.encode(text, add_special_tokens=False)
        assert not await tokenizer.exceeds(text, len(tokens))
        await tokenizer.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "LIKELY_CHARS_PER_TOKEN", 0)
        patch.setattr(tokenizer_module, "SLICE_CHARS", 64)
        patch.setattr(tokenizer_module, "EXTRA_SLICE_TOKENS", 8)
        asyncio.run(main())


@pytest.mark.timed
async def test_long_texts_of_one_tenant_do_not_delay_another(model_folder: Path) -> None:
    """Two prompts of 8 MiB that are too long, and two of half a MiB that are not."""
    tokenizer = HfTokenizer(model_folder / "tokenizer.json")
    text = "the quick brown fox jumps over the lazy dog " * ((8 << 20) // 44 + 1)
    with on_behalf_of(b"long"):
        began_s = time.perf_counter()
        long = [asyncio.create_task(tokenizer.exceeds(text[: 8 << 20], 1 << 17)) for _ in range(2)]
        for _ in range(2):
            encoding = tokenizer.encode(text[: 1 << 19], add_special_tokens=False)
            long.append(asyncio.create_task(encoding))  # type: ignore[arg-type] # of another kind
    waits_s = []
    with on_behalf_of(b"short"):
        while not all(task.done() for task in long):
            asked_s = time.perf_counter()
            await tokenizer.encode("the lazy dog", add_special_tokens=False)
            waits_s.append(time.perf_counter() - asked_s)
            # The other tenant asks at this period.
            await asyncio.sleep(0.01)
    took_s = time.perf_counter() - began_s
    waits_s.sort()
    assert len(waits_s) > 10 and waits_s[len(waits_s) // 2] < took_s / 20, (waits_s, took_s)
    assert waits_s[-1] < took_s / 3, (waits_s[-1], took_s)
    await tokenizer.close()
