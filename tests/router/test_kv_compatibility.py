"""A prefill worker that nobody can read from is named, with what differs."""

from __future__ import annotations

import pytest

from baton.router.fleet.worker_view import KvFormat, incompatible_prefill_workers

DECODE: KvFormat = ("f", "bfloat16", 16)


@pytest.mark.parametrize(
    ("kv_format", "said"),
    [
        (("g", "bfloat16", 16), "model fingerprint 'g', decode workers have 'f'"),
        (("f", "float32", 16), "KV dtype 'float32', decode workers have 'bfloat16'"),
        (("f", "bfloat16", 8), "block size 8, decode workers have 16"),
        (
            ("f", "float32", 8),
            "KV dtype 'float32', decode workers have 'bfloat16'; "
            "block size 8, decode workers have 16",
        ),
    ],
)
def test_what_differs_is_named(kv_format: KvFormat, said: str) -> None:
    assert incompatible_prefill_workers({"p": kv_format, "fits": DECODE}, {"d": DECODE}) == {
        "p": said
    }


def test_the_nearest_decode_worker_is_the_one_compared_with() -> None:
    decode = {"d": ("x", "y", 4), "e": DECODE}
    found = incompatible_prefill_workers({"p": ("f", "bfloat16", 8)}, decode)
    assert found == {"p": "block size 8, decode workers have 16"}


def test_without_decode_workers_nothing_can_be_said() -> None:
    assert incompatible_prefill_workers({"p": DECODE}, {}) == {}
