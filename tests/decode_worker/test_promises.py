"""The books of credit over a scheduler's life: what routers receive, and what several choices
count of the prompt that they share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.decode_worker import credit
from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequences import Request, Sequence
from baton.engine.scheduling.batch import Drawn, StepResult
from baton.engine.scheduling.blocks import BlockPool
from baton.runtime.config import StepConfig
from tests.support.scripted_request import scripted_request

SIZE = 4
GROWTH = 8  # tokens that a sequence is expected to grow by


class Books:
    """A scheduler, its pool, and requests one after another."""

    def __init__(self, blocks: int = 1024) -> None:
        self.pool = BlockPool(blocks, SIZE)
        config = StepConfig(expected_growth_tokens=GROWTH, waiting_share=1.0)
        self.scheduler = DecodeScheduler(self.pool, config, b"key")
        self._arrived = 0.0

    def submit(self, prompt: int, n: int = 1, max_tokens: int = 64, local: bool = True) -> Request:
        self._arrived += 1.0
        request = scripted_request(
            [int(self._arrived)] * prompt,
            n=n,
            at_s=self._arrived,
            max_tokens=max_tokens,
            local=local,
        )
        self.scheduler.submit(request)
        return request

    def step(self) -> None:
        self.scheduler.admit()
        plan = self.scheduler.plan()
        if not plan:
            return
        drawn = tuple(tuple(Drawn(d.choice, 7) for d in piece.draws) for piece in plan.batch.slices)
        for sequence, token in self.scheduler.commit(plan, StepResult(drawn)).drawn:
            if sequence.ended:
                continue
            sequence.output.append(token.token)
            if sequence.growth_left == 0:
                self.scheduler.end(sequence)

    def until(self, happens: Callable[[], bool]) -> None:
        for _ in range(200):
            if happens():
                return
            self.step()
        raise AssertionError("it never happens")

    def living(self, request: Request) -> list[Sequence]:
        return [sequence for sequence in request.sequences if not sequence.ended]


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("prompt", [2000, 2002])
def test_the_report_counts_promised_blocks_once(prompt: int, local: bool) -> None:
    """Of 16 choices of one prompt: two blocks of growth each, whether it is on its way or here."""
    books = Books()
    request = books.submit(prompt, n=16, local=local)
    assert books.scheduler.promised_blocks == 0
    (group,) = books.scheduler.admit()
    assert len(group.blocks) + len(group.spares) == books.pool.counts().total - books.pool.available
    assert books.scheduler.promised_blocks == 32
    if local:
        books.until(lambda: books.scheduler.running == 16)
    else:
        books.scheduler.fetched(group)
    assert 16 <= books.scheduler.promised_blocks <= 32
    for sequence in request.sequences:
        books.scheduler.end(sequence)
    assert books.scheduler.promised_blocks == 0


def test_a_choice_that_ends_during_the_fetch_gets_no_promise() -> None:
    books = Books()
    request = books.submit(2000, n=2, local=False)
    books.scheduler.admit()
    assert books.scheduler.promised_blocks == 4
    books.scheduler.end(request.sequences[0])
    assert books.scheduler.promised_blocks == 2
    assert credit.outstanding(request.sequences) == 502


def distinct(books: Books) -> int:
    """Blocks that are held now."""
    return books.pool.total - books.pool.available


@pytest.mark.parametrize("first", range(3))
def test_the_first_end_leaves_the_common_prompt_accounted(first: int) -> None:
    books = Books()
    request = books.submit(40, n=3)
    books.until(lambda: books.scheduler.running == 3)
    for gone in (first, (first + 1) % 3):
        books.scheduler.end(request.sequences[gone])
        living = books.living(request)
        assert credit.outstanding(living) == 10 + 2 * len(living) >= distinct(books)
    books.scheduler.end(request.sequences[(first + 2) % 3])
    assert credit.outstanding(request.sequences) == distinct(books) == 0


def test_the_first_preemption_leaves_the_common_prompt_accounted() -> None:
    books = Books(blocks=24)
    request = books.submit(40, n=3, max_tokens=24)
    books.until(lambda: books.scheduler.preemptions > 0)
    again = [sequence for sequence in request.sequences if not sequence.blocks]
    assert again and again[0].choice == 0  # it had counted the prompt
    rest = [sequence for sequence in request.sequences if sequence.blocks]
    assert credit.outstanding(rest) >= distinct(books)
    books.until(lambda: request.ended)
    assert credit.outstanding(request.sequences) == distinct(books) == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_books_never_count_less_than_what_is_held(data: st.DataObject) -> None:
    """Whatever ends or is preempted, each request that runs has credit for all its blocks."""
    books = Books(blocks=data.draw(st.sampled_from([40, 60, 200])))
    requests = [
        books.submit(data.draw(st.integers(1, 40)), n=data.draw(st.integers(1, 4)), max_tokens=24)
        for _ in range(3)
    ]
    for _ in range(data.draw(st.integers(1, 60))):
        books.step()
        everyone = [s for request in requests for s in books.living(request)]
        running = [s for s in everyone if s.blocks]
        held = {block for sequence in running for block in sequence.blocks}
        assert credit.outstanding(running) >= len(held)
        if everyone and data.draw(st.integers(0, 7)) == 0:
            books.scheduler.end(data.draw(st.sampled_from(everyone)))
    for request in requests:
        for sequence in books.living(request):
            books.scheduler.end(sequence)
    assert distinct(books) == 0
    books.pool.check()
