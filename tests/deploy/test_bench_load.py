"""`baton bench` sends: prompts of wanted lengths, at the intended times."""

from __future__ import annotations

import asyncio
import math

import pytest

from baton.deploy.bench.answer import UNFINISHED, Measurement
from baton.deploy.bench.bench_report import bench_table, make_report
from baton.deploy.bench.bench_run import BenchResult
from baton.deploy.bench.load import Load, poisson, run_load, scaled
from baton.deploy.bench.prompts import TextPrompts, TokenIdPrompts, TokenRate
from baton.planner.latency import latency_of
from baton.planner.traces import TraceRequest
from baton.simulation.capacity.layout import Objectives
from baton.simulation.virtual import virtual_loop

# -- prompts ----------------------------------------------------------------------------------


def asked(prompt_tokens: int, *blocks: int) -> TraceRequest:
    return TraceRequest(0.0, prompt_tokens, 1, blocks)


@pytest.mark.parametrize("length", [1, 7, 8, 100, 512, 1300, 20_000])
def test_prompts_of_ids_have_their_exact_length(length: int) -> None:
    found = TokenIdPrompts(100, 4000, seed=1).prompt(3, asked(length))
    assert len(found) == length
    assert min(found) >= 100 and max(found) <= 4000


@pytest.mark.parametrize("rate", [TokenRate(), TokenRate(1.3, 11.0), TokenRate(2.25, 4.0)])
@pytest.mark.parametrize("length", [40, 600, 9000])
def test_prompts_of_words_have_their_length(rate: TokenRate, length: int) -> None:
    blocks = range(-(-length // 512))
    for request in (asked(length), asked(length, *blocks)):
        words = len(TextPrompts(rate, seed=1).prompt(0, request).split())
        tokens = rate.overhead_tokens + words * rate.tokens_per_word
        assert tokens == pytest.approx(length, abs=rate.tokens_per_word)


def test_equal_leading_blocks_are_equal_text() -> None:
    for prompts, block in ((TextPrompts(TokenRate(2.0), 0), 256), (TokenIdPrompts(0, 99, 0), 512)):
        first, second = (
            prompt.split() if isinstance(prompt, str) else prompt
            for prompt in (
                prompts.prompt(0, asked(1500, 7, 8, 9)),
                prompts.prompt(1, asked(1400, 7, 8, 10)),
            )
        )
        assert first[: 2 * block] == second[: 2 * block]
        assert first[2 * block : 2 * block + 8] != second[2 * block : 2 * block + 8]


def test_prompts_without_hashes_differ_from_their_start() -> None:
    for prompts in (TextPrompts(TokenRate(), 0), TokenIdPrompts(0, 5000, 0)):
        starts = {tuple(prompts.prompt(number, asked(400))[:60]) for number in range(300)}
        assert len(starts) == 300
    again = TextPrompts(TokenRate(), 0).prompt(5, asked(400))
    assert again == TextPrompts(TokenRate(), 0).prompt(5, asked(400))
    assert again != TextPrompts(TokenRate(), 1).prompt(5, asked(400))


def test_a_scaled_trace_shares_scaled_prefixes() -> None:
    trace = scaled([asked(1500, 1, 2, 3), asked(1500, 1, 2, 4)], 0.1)
    assert [each.prompt_tokens for each in trace] == [150, 150]
    prompts = TokenIdPrompts(0, 5000, 0, scale=0.1)
    first, second = (prompts.prompt(number, each) for number, each in enumerate(trace))
    shared = next(
        at for at, pair in enumerate(zip(first, second, strict=True)) if len(set(pair)) > 1
    )
    assert shared == 102


def test_blocks_have_the_length_that_their_request_says() -> None:
    """Blocks of 16 tokens: two of 62 are equal, and the prompts differ after 32 tokens."""
    trace = [
        TraceRequest(0.0, 1000, 1, (1, 2, *range(low, low + 60)), block_tokens=16)
        for low in (100, 200)
    ]
    ids = TokenIdPrompts(0, 5000, 0)
    first, second = (ids.prompt(number, each) for number, each in enumerate(trace))
    assert first[:32] == second[:32] and first[32] != second[32]
    words = TextPrompts(TokenRate(2.0), 0)
    first, second = (words.prompt(number, each).split() for number, each in enumerate(trace))
    assert first[:16] == second[:16] and first[16:24] != second[16:24]


def test_text_after_the_named_blocks_is_the_requests_own() -> None:
    prompts = TokenIdPrompts(0, 5000, 0)
    first, second = (prompts.prompt(number, asked(1500, 7, 8)) for number in range(2))
    assert len(first) == len(second) == 1500
    assert first[:1024] == second[:1024] and first[1024:1032] != second[1024:1032]


def test_the_token_rate_is_the_line_through_two_prompts() -> None:
    assert TokenRate.measured((16, 39), (320, 647)) == TokenRate(2.0, 7.0)
    with pytest.raises(ValueError, match="16 words have 39 tokens"):
        TokenRate.measured((16, 39), (320, 39))


# -- open and closed loop ---------------------------------------------------------------------


class OneAtATime:
    """A server of one request at a time: each takes `service_s`, and it stands still from
    `stall_s[0]` to `stall_s[1]`."""

    def __init__(self, service_s: float, stall_s: tuple[float, float]) -> None:
        self.latencies_s: list[float] = []
        self.sent_s: list[float] = []
        self._lock = asyncio.Lock()
        self._service_s = service_s
        self._stall_s = stall_s

    async def send(self, number: int, request: TraceRequest, intended_s: float) -> float:
        now = asyncio.get_running_loop().time
        self.sent_s.append(now())
        async with self._lock:
            if self._stall_s[0] <= now() < self._stall_s[1]:
                # The server that this simulates stands still.
                await asyncio.sleep(self._stall_s[1] - now())
            # The server that this simulates takes this long for a request.
            await asyncio.sleep(self._service_s)
        self.latencies_s.append(now() - intended_s)
        return 0.0


def regular(count: int, gap_s: float) -> list[TraceRequest]:
    return [TraceRequest(number * gap_s, 1, 1) for number in range(count)]


def test_a_stall_is_in_the_tail_of_the_open_loop_alone() -> None:
    """100 s of ten requests a second, and a stall of 10 s: a tenth of the requests is sent into it
    and waits for up to 10 s. The closed loop's one client waits once."""

    async def run(load: Load) -> list[float]:
        server = OneAtATime(0.01, (20.0, 30.0))
        await run_load(load, server.send, asyncio.get_running_loop().time)
        return server.latencies_s

    requests = regular(1000, 0.1)
    expected, free_s = [], 0.0
    for each in requests:  # the same server as a recursion
        begin_s = max(each.arrived_s, free_s)
        free_s = (30.0 if 20.0 <= begin_s < 30.0 else begin_s) + 0.01
        expected.append(free_s - each.arrived_s)
    found = virtual_loop.run(run(Load(requests)))
    assert found == pytest.approx(expected, abs=0.001)
    open_loop = latency_of(found)
    closed_loop = latency_of(
        virtual_loop.run(run(Load(regular(9000, 0.0), clients=1, repeat=False)))
    )
    assert open_loop is not None and closed_loop is not None
    assert open_loop.p99 > 8.9 and open_loop.max == pytest.approx(10.01, abs=0.001)
    assert closed_loop.p99 < 0.02 and closed_loop.max == pytest.approx(10.01, abs=0.02)


def test_a_closed_loop_has_so_many_requests_under_way() -> None:
    async def run() -> tuple[int, int]:
        now = most = total = 0

        async def send(number: int, request: TraceRequest, intended_s: float) -> float:
            nonlocal now, most, total
            now, total = now + 1, total + 1
            most = max(most, now)
            await asyncio.sleep(0.5 + 0.1 * (number % 3))
            now -= 1
            return 0.0

        clock = asyncio.get_running_loop().time
        await run_load(Load(regular(4, 0.0), clients=3, duration_s=10.0, repeat=True), send, clock)
        return most, total

    most, total = virtual_loop.run(run())
    assert most == 3
    assert 45 <= total <= 57  # 10 s, three clients, 0.6 s each, and the last of each ends later


def test_a_client_waits_as_long_as_it_is_asked_to() -> None:
    async def run() -> list[float]:
        sent_s: list[float] = []

        async def send(number: int, request: TraceRequest, intended_s: float) -> float:
            sent_s.append(asyncio.get_running_loop().time())
            return 2.0

        await run_load(Load(regular(3, 0.0), 1), send, asyncio.get_running_loop().time)
        return [after - before for before, after in zip(sent_s, sent_s[1:], strict=False)]

    assert virtual_loop.run(run()) == pytest.approx([2.0, 2.0], abs=0.001)


def test_nothing_is_sent_after_the_duration() -> None:
    async def run() -> list[float]:
        server = OneAtATime(0.0, (9.0, 9.0))
        await run_load(
            Load(regular(100, 0.5), 0, 3.0), server.send, asyncio.get_running_loop().time
        )
        return server.sent_s

    assert virtual_loop.run(run()) == pytest.approx([0.5 * n for n in range(7)], abs=0.001)


def test_poisson_arrivals_have_their_rate_and_begin_at_once() -> None:
    arrivals = [each.arrived_s for each in poisson(regular(4000, 9.0), 5.0, seed=3)]
    assert arrivals[0] == 0.0 and arrivals == sorted(arrivals)
    gaps = [after - before for before, after in zip(arrivals, arrivals[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.2, rel=0.05) and deviation == pytest.approx(mean, rel=0.1)


# -- the report -------------------------------------------------------------------------------


def measured(
    intended_s: float,
    ttft_s: float,
    gaps_s: list[float],
    *,
    warm_up: bool = False,
    error: str | None = None,
) -> Measurement:
    found = Measurement(TraceRequest(0.0, 100, len(gaps_s) + 1), warm_up, intended_s)
    found.sent_s = intended_s + 0.001
    found.first_s = intended_s + ttft_s
    found.gaps_s.extend(gaps_s)
    found.chunks = len(gaps_s) + 1
    found.last_s = found.end_s = found.first_s + sum(gaps_s)
    found.prompt_tokens, found.output_tokens = 98, len(gaps_s) + 1
    found.error = error
    return found


def test_a_report_has_the_figures_of_its_requests() -> None:
    result = BenchResult(
        [
            measured(0.0, 9.0, [9.0], warm_up=True),
            measured(10.0, 0.5, [0.1, 0.3]),
            measured(11.0, 1.5, [0.1, 0.1]),
            measured(12.0, 0.4, [0.5, 0.5]),
            measured(13.0, 0.1, [], error="http 429"),
            measured(14.0, 0.0, [6.0], error=UNFINISHED),
        ],
        interrupted=True,
    )
    result.measurements[4].retry_after_s = 1.0
    objectives = Objectives(ttft_s=1.0, itl_s=0.25)
    report = make_report(result, objectives, server="s", model="m", load="l")
    assert (report.requests, report.finished, report.unfinished) == (4, 3, 1)
    assert (report.errors, report.retry_after) == ({"http 429": 1}, 1)
    assert (report.seconds, report.output_tokens, report.prompt_tokens) == (10.0, 9, 294)
    assert (report.wanted_output_tokens, report.tokens_from) == (9, "usage")
    assert report.ttft_s is not None and report.itl_s is not None and report.tpot_s is not None
    assert report.ttft_s.mean == pytest.approx(0.8) and report.ttft_s.max == pytest.approx(1.5)
    assert report.itl_s.mean == pytest.approx(1.6 / 6) and report.itl_s.p50 == pytest.approx(0.1)
    assert report.tpot_s.p50 == pytest.approx(0.2)
    assert report.e2e_s is not None and report.e2e_s.max == pytest.approx(1.7)
    assert report.send_lag_s is not None and report.send_lag_s.max == pytest.approx(0.001)
    assert (report.good_share, report.goodput_per_s) == (0.25, 0.1)
    assert report.objectives == {"ttft_s": 1.0, "itl_s": 0.25}
    table = bench_table(report)
    assert "3 of 4 finished, 1 unfinished" in table and "l, interrupted" in table
    assert "error           1 http 429" in table and "late" not in table


def test_chunks_count_where_the_server_reports_no_usage() -> None:
    found = measured(1.0, 0.02, [0.1, 0.1])
    found.output_tokens = None
    found.sent_s = 1.01
    report = make_report(BenchResult([found]), Objectives(), server="s", model="m", load="l")
    assert (report.output_tokens, report.tokens_from) == (3, "chunks")
    table = bench_table(report)
    assert "a chunk counts as a token" in table
    assert "requests were sent late: 10.0 ms" in table


def test_a_report_of_nothing_has_no_latency() -> None:
    report = make_report(BenchResult(), Objectives(), server="s", model="m", load="l")
    assert (report.requests, report.ttft_s, report.good_share) == (0, None, 0.0)
    assert "TTFT" in bench_table(report)
