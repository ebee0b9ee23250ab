"""A peer's program for the tests: the real loop around an engine that only counts.

Each sequence's first token is 7; it says in its facts what it was started with.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.getcwd())  # as `python -m` has it

from benchmarks.peers.request_loop import options, serve


class Counting:
    def __init__(self) -> None:
        self._given = options()
        self._held = 0
        print("a library says hello")
        os.write(1, b"and so does its C++\n")

    def facts(self) -> dict[str, str]:
        inherited = [name for name in os.environ if name.startswith(("OMP_", "GOMP_", "PYTHON"))]
        return {
            "kv": "bf16",
            "threads": str(self._given.threads),
            "sequences": str(self._given.sequences),
            "inherited": " ".join(inherited) or "none",
        }

    def add(self, prompt: list[int]) -> str:
        if prompt == [13]:
            raise MemoryError("no room for thirteen")
        self._held += 1
        return str(self._held)

    def step(self) -> dict[str, int]:
        return {str(number + 1): 7 for number in range(self._held)}

    def drop(self) -> None:
        self._held = 0


serve(Counting)
