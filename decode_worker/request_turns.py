"""The order of steps between requests that are computed alone and all others. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from baton.decode_worker.sequences import Request


class RequestTurns:
    """The alternation of steps: requests that are computed alone use every other step, one after
    another; the others share the rest. The decode scheduler owns it."""

    def __init__(self) -> None:
        self._turns = 0  # steps planned for one request alone
        self._was_alone = False

    def next(self, computable: Callable[[], Iterator[Request]]) -> Callable[[Request], bool]:
        """Return a predicate: does a request take part in the next step? `computable` yields the
        requests that a step could compute tokens of."""
        alone = {each for each in computable() if each.alone}
        others = alone and any(not each.alone for each in computable())
        if alone and not (self._was_alone and others):
            request = min(alone, key=lambda each: (each.last_turn, each.arrived_s))
            self._turns += 1
            request.last_turn, self._was_alone = self._turns, True
            return lambda each: each is request
        self._was_alone = False
        return lambda each: not each.alone
