"""Sums as movers ask for them: the handoff's own, from kernels run by Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from baton.engine.triton.device_checksums import OwnStream
from tests.support.json_values import JsonObject

pytestmark = pytest.mark.nightly  # under the interpreter, one story of half a minute

STORY = Path(__file__).with_name("device_sums_story.py")


@pytest.fixture(scope="module")
def reported() -> JsonObject:
    """What the story prints, by name; its process has Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-P", STORY],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("count", ["one", "two", "three", "none"])
def test_sums_are_the_handoffs(reported: JsonObject, count: str) -> None:
    assert reported["sums"][count]


def test_threads_ask_at_once(reported: JsonObject) -> None:
    assert reported["threads"] == [True] * 4


def test_a_pool_of_the_engine_is_checksummed_in_place_and_read(reported: JsonObject) -> None:
    if reported["handoff"] is None:
        pytest.skip("nixl is not installed")
    assert reported["handoff"] == {"equal": True, "sums": True, "spoiled": True}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("block beyond", "IndexError: [0, 6]: one is not in a pool of 6 blocks"),
        ("block before", "IndexError: [-1]: one is not in a pool of 6 blocks"),
        ("seeds", "ValueError: 1 seeds for 2 blocks"),
        ("slabs", "ValueError: a block of 192 bytes cannot have 5 slabs of 8-byte words"),
    ],
)
def test_what_cannot_be_summed_is_refused(reported: JsonObject, name: str, says: str) -> None:
    assert reported["refused"][name] == says


class Driver:
    """Which device a thread has current, and which have a context, as with torch.cuda's own:
    leaving a stream makes the device of before current by a call that gives it a context."""

    def __init__(self):
        self.current, self.stream_of, self.contexts = 0, None, set()

    @contextmanager
    def on_device(self, device):
        before, self.current = self.current, device.index
        self.contexts.add(device.index)
        try:
            yield
        finally:
            self.current = before

    def new_stream(self, device, priority):
        assert priority < 0
        self.contexts |= {device.index, self.current}
        return device

    @contextmanager
    def on_stream(self, device):
        before = self.current
        self.current = self.stream_of = device.index
        try:
            yield
        finally:
            self.current, self.stream_of = before, None
            self.contexts.add(before)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()

    class Again:
        """torch's managers can be entered again."""

        def __init__(self, manager, device):
            self.make = lambda: manager(device)

        def __enter__(self):
            self.inner = self.make()
            return self.inner.__enter__()

        def __exit__(self, *raised):
            return self.inner.__exit__(*raised)

    monkeypatch.setattr(torch.cuda, "device", lambda device: Again(found.on_device, device))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: Again(found.on_stream, stream))
    monkeypatch.setattr(torch.cuda, "Stream", found.new_stream)
    return found


def test_a_thread_on_another_device_makes_no_context_there(driver: Driver) -> None:
    aside = OwnStream(torch.device("cuda", 1))
    for _ in range(2):
        with aside:
            assert (driver.current, driver.stream_of) == (1, 1)
        assert (driver.current, driver.stream_of) == (0, None)
    with pytest.raises(ZeroDivisionError), aside:
        raise ZeroDivisionError
    assert driver.current == 0 and driver.contexts == {1}
