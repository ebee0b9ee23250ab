"""Time spent compiling: added up over threads and compilers, and reported while it goes on."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numba
import pytest

from baton.engine.cpu import compiled
from baton.engine.scheduling import compile_clock
from baton.engine.scheduling.compile_clock import CompileClock, watch_triton


class Now:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_what_overlaps_counts_once_and_grows_while_it_goes_on() -> None:
    now = Now()
    clock = CompileClock(now)
    assert clock.seconds() == 0
    clock.begin()
    now.seconds += 2
    assert clock.seconds() == 2
    clock.begin()  # another thread, or a function inside
    now.seconds += 3
    clock.end()
    assert clock.seconds() == 5
    clock.end()
    now.seconds += 50
    assert clock.seconds() == 5
    clock.end()  # a word too many
    clock.begin()
    now.seconds += 1
    assert clock.seconds() == 6


def test_what_has_failed_does_not_go_on() -> None:
    now = Now()
    clock = CompileClock(now)
    clock.begin()
    clock.begin()
    now.seconds += 4
    clock.abort()
    now.seconds += 4
    assert clock.seconds() == 4
    clock.abort()
    assert clock.seconds() == 4


def test_a_watcher_hears_the_first_begin_and_the_last_end() -> None:
    clock, seen = CompileClock(), list[bool]()
    clock.watch(seen.append)
    clock.begin()
    clock.begin()
    clock.end()
    assert seen == [True]
    clock.end()
    clock.end()  # one too many
    assert seen == [True, False]
    clock.begin()
    clock.abort()
    clock.abort()
    assert seen == [True, False, True, False]


def test_numba_is_heard() -> None:
    assert compiled.compiled  # importing it is what lets the clock hear
    before_s = compile_clock.clock.seconds()
    function: Any = numba.njit(lambda x: x * 3 + 1)
    began_s = time.monotonic()
    assert function(2) == 7
    took_s = time.monotonic() - began_s
    first_s = compile_clock.clock.seconds() - before_s
    assert 0 < first_s <= took_s
    assert function(3) == 10  # compiled already
    assert compile_clock.clock.seconds() - before_s == first_s


def test_triton_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hooks, called as its launcher calls them: by name. The first one lets it go on."""
    runtime = SimpleNamespace(jit_cache_hook=None, jit_post_compile_hook=None)
    triton = SimpleNamespace(knobs=SimpleNamespace(runtime=runtime))
    now = Now()
    monkeypatch.setattr(compile_clock, "clock", CompileClock(now))
    monkeypatch.setattr(compile_clock, "import_module", {"triton": triton}.__getitem__)
    watch_triton()
    hooks: Any = runtime
    assert not hooks.jit_cache_hook(key="k", repr="r", fn=None, compile={}, already_compiled=False)
    now.seconds += 7
    assert not hooks.jit_post_compile_hook(key="k", repr="r", fn=None, compile={})
    now.seconds += 7
    assert compile_clock.clock.seconds() == 7
