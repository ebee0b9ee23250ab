"""Other orders of prompts than the product's, for measuring what its order is worth.

    python -m benchmarks.fleets.chunk_orders ORDER benchmarks.fleets.sleeping_workers ARGUMENTS...

Replaces the chunk scheduler of both roles by that of ORDER, then runs the module: sleeping workers,
or the command line (baton.deploy.cli.main). Only benchmarks use it: the product has no such switch.

    shortest   the product's: the least work left first, with ageing
    unaged     the same without ageing
    first      first come, first served
    shared     half of each step for the oldest prompt, the rest for those with the least left
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from baton.decode_worker import scheduler as decode_scheduler
from baton.deploy.cli import main as cli
from baton.engine.scheduling.chunks import Chunk, ChunkScheduler, Key
from baton.prefill_worker import scheduler as prefill_scheduler
from benchmarks.fleets import sleeping_workers


class FirstComeFirstServed(ChunkScheduler[Key]):
    """The prompts in order of arrival."""

    def _ranked(self, tokens_per_s: float, among: Callable[[Key], bool]) -> list[Key]:
        return [key for key, p in self._prompts.items() if p.unplanned and among(key)]


class ShortestFirst(FirstComeFirstServed[Key]):
    """The prompts with the fewest tokens left first, however long others have waited."""

    def _ranked(self, tokens_per_s: float, among: Callable[[Key], bool]) -> list[Key]:
        return sorted(super()._ranked(tokens_per_s, among), key=self.unplanned)


class SharedSteps(FirstComeFirstServed[Key]):
    """Half of a step for the oldest prompt, the rest for those with the fewest tokens left, and
    what these leave for the oldest again. Draws cost nothing here."""

    def plan(
        self, tokens_per_s: float = 0.0, among: Callable[[Key], bool] = lambda _: True
    ) -> list[Chunk[Key]]:
        waiting = self._ranked(tokens_per_s, among)
        if not waiting:
            return []
        oldest = waiting[0]
        share = self._step_tokens if len(waiting) == 1 else self._step_tokens // 2
        spans = {oldest: self._fit(oldest, max(share, self._block_size))}
        budget = self._step_tokens - spans[oldest]
        for key in sorted(waiting[1:], key=self.unplanned):
            if span := self._fit(key, budget):
                spans[key] = span
                budget -= span
        spans[oldest] = self._fit(oldest, spans[oldest] + budget)
        return [self._chunk(key, span) for key, span in spans.items()]


ORDERS: dict[str, type[ChunkScheduler[Any]]] = {
    "shortest": ChunkScheduler,
    "unaged": ShortestFirst,
    "first": FirstComeFirstServed,
    "shared": SharedSteps,
}


@contextmanager
def prompts_in_order(order: str) -> Iterator[None]:
    """Let schedulers that are made here take the prompts in this order."""
    modules = (prefill_scheduler, decode_scheduler)
    for module in modules:
        if module.__dict__.get("ChunkScheduler") is not ChunkScheduler:
            raise RuntimeError(f"{module.__name__} has no chunk scheduler to replace")
        module.__dict__["ChunkScheduler"] = ORDERS[order]
    try:
        yield
    finally:
        for module in modules:
            module.__dict__["ChunkScheduler"] = ChunkScheduler


def main() -> None:
    order, module, *arguments = sys.argv[1:]
    if order not in ORDERS:
        sys.exit(f"{order!r} is no order of prompts: give one of {', '.join(ORDERS)}")
    sys.argv = [module, *arguments]
    with prompts_in_order(order):
        if module == sleeping_workers.__name__:
            sleeping_workers.main()
        else:
            sys.exit(cli.main())


if __name__ == "__main__":
    main()
