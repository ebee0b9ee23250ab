"""Sums as movers ask for them: the handoff's own, from kernels run by Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STORY = Path(__file__).with_name("device_sums_story.py")


@pytest.fixture(scope="module")
def told():
    """What the story prints, by name; its process has Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-P", STORY],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("count", ["one", "two", "three", "none"])
def test_sums_are_the_handoffs(told, count):
    assert told["sums"][count]


def test_threads_ask_at_once(told):
    assert told["threads"] == [True] * 4


def test_a_pool_of_the_engine_is_summed_where_it_lies_and_read_over_nixl(told):
    if told["handoff"] is None:
        pytest.skip("nixl is not installed")
    assert told["handoff"] == {"equal": True, "sums": True, "spoiled": True}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("block beyond", "IndexError: a block of [0, 6] is not in a pool of 6"),
        ("block before", "IndexError: a block of [-1] is not in a pool of 6"),
        ("seeds", "ValueError: 1 seeds for 2 blocks"),
        ("slabs", "ValueError: 192 bytes of a block are not 5 slabs of 8-byte words"),
    ],
)
def test_what_cannot_be_summed_is_refused(told, name, says):
    assert told["refused"][name] == says
