"""A model over ranks with pools of their own, as on GPUs: by Triton's interpreter and gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.device_ranks.device_loading import Stalls, counted_stalls
from baton.engine.device_ranks.device_rank_group import (
    COUNTER_BYTES,
    compiling_flags,
    counters,
    ranks_behind,
)
from baton.engine.device_ranks.device_rank_process import DeviceRank
from baton.engine.ranks.rank_message import SLOT_BYTES, SLOTS
from baton.engine.ranks.shared_memory import SharedMemory
from baton.engine.scheduling import compile_clock
from tests.support.small_models import Reference


@pytest.mark.timeout(300)  # four interpreters share two cores
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("qwen3-window-small", []),
        ("qwen3-window", ["--sized", "--kv-dtype=int8"]),
        ("deepseek-v3", ["--ep=2"]),
        ("mixtral", ["--ranks=4"]),
        ("qwen3-window-small", ["--deterministic"]),
    ],
)
def test_ranks_on_devices_equal_one_process(
    references: Callable[[str], Reference], name: str, more: list[str]
) -> None:
    """Three sequences, in chunks and by graphs; a copied block; handoffs; a rank stopped, then
    killed. Windows, and KV in eight bits, over a pool that was sized after a first build; latents,
    experts in two groups; more ranks than KV heads; bits that do not depend on the batch, proved at
    the start."""
    script = Path(__file__).with_name("device_ranks_story.py")
    done = subprocess.run(
        [sys.executable, "-P", script, references(name).folder, "--device=cpu", "--steps=2", *more],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == [True] * 7


def test_only_a_rank_that_reads_nothing_stalls() -> None:
    """One that is behind and reads on does not, nor one that has read all."""
    stalls: Stalls = {}
    for poll in range(30):
        stalls = counted_stalls(stalls, {1: 7, 2: poll} | ({3: 5} if poll % 10 else {}))
    assert stalls == {1: (7, 29), 2: (29, 0), 3: (5, 8)}


def test_a_rank_that_compiles_is_not_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first use of a kernel may take seconds longer than the leader's."""
    clock = compile_clock.CompileClock()
    monkeypatch.setattr("baton.engine.device_ranks.device_rank_process.clock", clock)
    sizes = COUNTER_BYTES, SLOTS * SLOT_BYTES
    memories = [SharedMemory.create(size) for size in sizes]
    options = SimpleNamespace(rank=2, ranks=4, memory_bytes=sizes)
    loaded: Any = SimpleNamespace(options=options)
    unused: Any = None
    DeviceRank(unused, loaded, unused, [memory.descriptor for memory in memories])
    reads, compiling = counters(memories[0], 4), compiling_flags(memories[0], 4)
    reads[:] = 0, 5, 3, 3
    clock.begin()
    assert ranks_behind(reads, compiling, sent=5) == {3: 3}
    clock.end()
    assert ranks_behind(reads, compiling, sent=5) == {2: 3, 3: 3}
    for memory in memories:
        os.close(memory.descriptor)
