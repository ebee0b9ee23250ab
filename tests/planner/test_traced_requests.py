"""Requests as traces have them: their times, the causes of their TTFT, and what they are for."""

from __future__ import annotations

import pytest

from baton.planner.traced_requests import (
    common_block_tokens,
    host_samples,
    kv_bytes_per_token,
    traced_requests,
    traffic_of,
    transfer_samples,
)
from baton.runtime.errors import ConfigError
from tests.support.json_values import JsonObject
from tests.support.traced_records import record


def test_the_causes_add_up_to_the_time_to_the_first_token() -> None:
    (found,) = traced_requests([record()])
    assert found.ttft_s == pytest.approx(0.1) and found.mean_gap_s == pytest.approx(0.01)
    expected = {"credit": 0.02, "queue": 0.03, "compute": 0.04, "cached read": 0, "rest": 0.01}
    assert found.causes == pytest.approx(expected)


def test_what_follows_the_first_token_is_no_cause() -> None:
    """Without a stream the path goes on to the end of the answer."""
    (found,) = traced_requests([record(ttft_ms=70.0)])
    assert sum(found.causes.values()) == pytest.approx(0.07)
    assert found.causes["compute"] == pytest.approx(0.019)


def test_only_answered_requests_count_in_order_of_arrival() -> None:
    records = [record(3.0), record(1.0), record(2.0, outcome="failed"), record(after_us=0)]
    found = traced_requests(records)
    assert [each.begun_wall_s for each in found] == [1.0, 3.0]
    traffic = traffic_of(found)
    assert [each.arrived_s for each in traffic] == [0.0, 2.0]


def test_cached_tokens_are_no_work_and_one_token_always_is() -> None:
    found = traced_requests([record(cached_tokens=48), record(cached_tokens=64)])
    assert sorted(each.prompt_tokens for each in traffic_of(found)) == [1, 16]


def test_reads_are_samples_of_transfers() -> None:
    offers = [[0, 2000, 2500, 3], [5000, 6000, 6100, 1]]
    found = traced_requests([record(offers=offers, read_bytes=4096)])
    samples = [(each.amounts[0], each.seconds) for each in transfer_samples(found)]
    assert samples == [(3072.0, pytest.approx(0.002)), (1024.0, pytest.approx(0.001))]
    assert kv_bytes_per_token(found, 16) == 64.0
    assert kv_bytes_per_token([], 16) == 0.0


def test_the_routers_part_of_a_migrated_request_is_no_sample() -> None:
    found = traced_requests([record(), record(migrations=1)])
    assert [each.seconds for each in host_samples(found)] == [pytest.approx(0.01)]


def test_a_record_of_another_version_is_refused() -> None:
    other = record()
    del other["path"]
    with pytest.raises(ConfigError, match="same version"):
        traced_requests([other])


def named(time_s: float, names: list[int], cached: int, size: int = 64) -> JsonObject:
    """Return the record of a prompt of these blocks and half a block more."""
    text = b"".join([(2 * name).to_bytes(8, "big") for name in names]).hex()
    tokens = size * len(names) + size // 2
    return record(time_s, prompt_tokens=tokens, cached_tokens=cached, prompt_blocks=[size, text])


def test_shared_blocks_are_left_to_the_simulation() -> None:
    """Block 1 was cached before the first request; 2 and 3 came with it, and are its own work."""
    found = traffic_of(
        traced_requests(
            [named(1.0, [1, 2, 3], 64), named(2.0, [1, 2, 3, 4], 192), named(3.0, [5], 0)]
        )
    )
    assert [each.blocks for each in found] == [(2, 3), (2, 3, 4), (5,)]
    assert [each.prompt_tokens for each in found] == [160, 224, 96]
    assert {each.block_tokens for each in found} == {64}


def test_names_of_unlike_lengths_are_compared_by_the_longer() -> None:
    found = traced_requests([named(1.0, [7, 8, 9, 10], 0, 32), named(2.0, [8, 10], 0, 64)])
    assert common_block_tokens(found) == 64
    assert [each.blocks for each in traffic_of(found)] == [(8, 10), (8, 10)]


def test_without_names_prompts_count_as_they_were_computed() -> None:
    found = traced_requests([named(1.0, [1], 64), record(2.0, prompt_tokens=50)])
    assert common_block_tokens(found) == 64  # the other one has no whole block of 64
    found = traced_requests([named(1.0, [1], 64), record(2.0, prompt_tokens=640, cached_tokens=48)])
    assert common_block_tokens(found) is None
    assert [each.prompt_tokens for each in traffic_of(found)] == [32, 592]
