"""A prefill worker that no decode worker can read from is named, with what differs."""

from __future__ import annotations

import pytest

from baton.router.fleet.worker_view import KvFormat, hands_over, incompatible_prefill_workers
from baton.runtime.worker.kv_bridge import bridged_dtypes, bridges, most_targets

DECODE = KvFormat("f", "bfloat16", 16)


@pytest.mark.parametrize(
    ("kv_format", "said"),
    [
        (KvFormat("g", "bfloat16", 16), "model fingerprint 'g', decode workers have 'f'"),
        (KvFormat("f", "float32", 16), "KV dtype 'float32', decode workers have 'bfloat16'"),
        (KvFormat("f", "bfloat16", 24), "block size 24, decode workers have 16"),
        (DECODE._replace(terms="2"), "terms of KV exchange '2', decode workers have ''"),
        (
            KvFormat("f", "float32", 24),
            "KV dtype 'float32', decode workers have 'bfloat16'; "
            "block size 24, decode workers have 16",
        ),
    ],
)
def test_what_differs_is_named(kv_format: KvFormat, said: str) -> None:
    assert incompatible_prefill_workers({"p": kv_format, "fits": DECODE}, {"d": DECODE}) == {
        "p": said
    }


def test_the_nearest_decode_worker_is_the_one_compared_with() -> None:
    decode = {"d": KvFormat("x", "y", 4), "e": DECODE}
    found = incompatible_prefill_workers({"p": KvFormat("f", "bfloat16", 24)}, decode)
    assert found == {"p": "block size 24, decode workers have 16"}


@pytest.mark.parametrize("size", [1, 4, 8, 32, 64, 256])
def test_a_size_that_divides_the_other_fits(size: int) -> None:
    other = KvFormat("f", "bfloat16", size)
    assert hands_over(DECODE, other) and hands_over(other, DECODE)
    assert incompatible_prefill_workers({"p": other}, {"d": DECODE}) == {}


def test_without_decode_workers_nothing_can_be_said() -> None:
    assert incompatible_prefill_workers({"p": DECODE}, {}) == {}


@pytest.mark.parametrize("narrow", ["int8 of bfloat16", "fp8_e4m3 of bfloat16"])
def test_eight_bits_of_the_same_dtype_fit_either_way(narrow: str) -> None:
    other = KvFormat("f", narrow, 16)
    assert hands_over(DECODE, other) and hands_over(other, DECODE)
    assert incompatible_prefill_workers({"p": other}, {"d": DECODE}) == {}
    assert not hands_over(DECODE, KvFormat("g", narrow, 16))
    assert hands_over(DECODE, KvFormat("f", narrow, 8))  # both at once
    assert not hands_over(DECODE, KvFormat("f", narrow, 24))
    assert most_targets("bfloat16", narrow) == 1 and most_targets(narrow, "bfloat16") == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("bfloat16", "float32"),
        ("bfloat16", "int8 of float32"),
        ("int8 of bfloat16", "fp8_e4m3 of bfloat16"),
        ("bfloat16", "int4 of bfloat16"),
    ],
)
def test_other_dtypes_do_not_fit(one: str, other: str) -> None:
    assert not bridges(one, other) and not bridges(other, one)
    assert other not in bridged_dtypes(one)
    assert bridges(one, one) and most_targets(one, one) == 0


def test_float32_takes_four_blocks_of_eight_bits() -> None:
    assert most_targets("int8 of float32", "float32") == 4


def test_unlike_terms_never_fit() -> None:
    """Their handshake would refuse each other, whatever else is alike."""
    old, new = DECODE._replace(terms="protocol 1"), DECODE._replace(terms="protocol 2")
    narrow = new._replace(dtype="int8 of bfloat16", block_size=8)
    for one, other in [(old, new), (old, narrow), (old, DECODE)]:
        assert not hands_over(one, other) and not hands_over(other, one)
    assert hands_over(new, narrow) and hands_over(old, old)
