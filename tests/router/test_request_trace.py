"""What a request's trace takes from workers, and what a collector gets of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry.context import Context

from baton.proto import worker_pb2
from baton.router.answers import trace_spans
from baton.router.answers.trace_record import RequestEnd, reasons_to_keep, trace_record
from baton.router.answers.trace_spans import export_trace
from baton.router.requests.request_trace import RequestTrace
from baton.runtime.telemetry import tracing

MOST = (1 << 32) - 1


def reported(**fetch: Any) -> worker_pb2.Timeline:
    made = worker_pb2.Timeline()
    made.names.extend([worker_pb2.FETCH])
    made.micros.extend([MOST])
    made.counts.extend([9])
    made.fetch.CopyFrom(worker_pb2.FetchTimes(**fetch))
    return made


async def traced(**fetch: Any) -> RequestTrace:
    """A request whose first output carries such a fetch, a moment after it was sent; twice."""
    trace = RequestTrace()
    trace.mark("receive")
    for _ in range(2):
        trace.record_sent("decode-0")
        # The phase of the trace takes this long.
        await asyncio.sleep(0.01)
        trace.record_output(reported(**fetch))
    return trace


async def test_a_workers_numbers_are_bounded_by_what_the_router_saw() -> None:
    times = {"begin_us": [MOST], "landed_us": [MOST], "verified_us": [MOST], "blocks": [MOST]}
    trace = await traced(bytes=(1 << 64) - 1, reads=MOST, transport="x" * 4096, **times)
    end = RequestEnd("r", "finished", 1.0, 1, 1, 0, 0)
    found = trace_record(trace, end, [])
    assert found["read_bytes"] == 1 << 53
    assert found["transport"] == "x" * 64
    now_us = 1e6 * (asyncio.get_running_loop().time() - trace.begun_s)
    assert all(0 <= time <= now_us for *times, _ in found["offers"] for time in times)
    assert sum(took for _, took, *_ in found["path"]) <= now_us


async def test_a_fetch_is_hidden_until_the_first_token_came() -> None:
    """The first offer ended before it, the second straddles it, the third came after it."""
    trace = RequestTrace()
    trace.record_sent("decode-0")
    # The phases of the trace take this long.
    await asyncio.sleep(0.05)
    trace.record_output(worker_pb2.Timeline(names=[worker_pb2.CHUNK], micros=[50_000], counts=[9]))
    # The second output comes later.
    await asyncio.sleep(0.05)
    times = {"begin_us": [10_000, 20_000, 80_000], "landed_us": [15_000, 85_000, 85_000]}
    trace.record_output(reported(**times, verified_us=[20_000, 90_000, 90_000], blocks=[1, 2, 3]))
    found = trace_record(trace, RequestEnd("r", "finished", 1.0, 1, 1, 0, 0), [])
    begins = [begin for begin, *_ in found["offers"]]
    assert found["hidden_us"][0] == pytest.approx(10_000, abs=1)
    assert found["hidden_us"][1] == pytest.approx(found["after_us"] - begins[1], abs=1)
    assert found["hidden_us"][2] == 0


async def test_counts_of_spans_are_numbers_of_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a fetch, tokens of a chunk."""
    trace = await traced()
    trace.path.mark("chunk", trace.path.at_s + 1.0, 150, "prefill-0")
    spans: dict[str, dict[str, object]] = {}
    monkeypatch.setattr(
        trace_spans.tracing, "record", lambda name, *_, **more: spans.update({name: more})
    )
    monkeypatch.setattr(tracing, "is_sampled", lambda context: False)
    monkeypatch.setattr(tracing, "export_root", lambda *_, **__: Context())
    export_trace(trace, Context(), Context(), ["slow"], trace.begun_wall_s + 1.0, {})
    assert spans["fetch"] == {
        "worker": "decode-0",
        "blocks": 9,
        "critical": spans["fetch"]["critical"],
    }
    assert spans["chunk"]["tokens"] == 150 and "blocks" not in spans["chunk"]


async def test_a_prompts_blocks_are_named_at_even_distances() -> None:
    """Advice compares them. A retry has other tokens: the first attempt's names stay."""
    identities = [bytes([number]) * 16 for number in range(200)]
    trace = RequestTrace()
    trace.record_prompt(identities, 16)
    trace.record_prompt(identities[:1], 16)
    found = trace_record(trace, RequestEnd("r", "finished", 1.0, 3200, 1, 0, 0), [])
    expected = b"".join([identity[:8] for identity in identities[3::4]])
    assert found["prompt_blocks"] == [64, expected.hex()]
    longest = RequestTrace()
    longest.record_prompt(identities * 100, 16)
    assert longest.named_tokens == 512 and len(longest.block_names) == 8 * 20_000 // 32


@pytest.mark.parametrize(
    ("outcome", "migrations", "preempted", "slow", "reasons"),
    [
        ("finished", 0, False, False, []),
        ("cancelled", 0, False, False, []),
        ("finished", 0, False, True, ["slow"]),
        ("failed", 0, False, False, ["failed"]),
        ("finished", 2, False, False, ["migrated"]),
        ("finished", 0, True, False, ["preempted"]),
        ("failed", 1, True, True, ["slow", "failed", "migrated", "preempted"]),
    ],
)
async def test_a_trace_is_kept_for_each_of_four_reasons(
    outcome: str, migrations: int, preempted: bool, slow: bool, reasons: list[str]
) -> None:
    """A worker reports a preemption with the output that follows it; later ones do not undo it."""
    trace = RequestTrace()
    trace.record_sent("decode-0")
    for reported_preempted in (preempted, False):
        trace.record_output(worker_pb2.Timeline(preempted=reported_preempted))
    end = RequestEnd("r", outcome, 1.0, 1, 1, 0, migrations)
    assert reasons_to_keep(trace, end, slow=slow) == reasons
