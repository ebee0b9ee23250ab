"""The limits of rendering a chat template: processor time, memory, output.

Each value that a template makes has a weight: a character weighs 1, an entry of a list or object
ENTRY_WEIGHT plus its content, each time that a list contains it. No value weighs more than
MAX_WEIGHT, so one operation takes little time, and the clock is read between operations. Knows no
template. State: of one rendering.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from types import GeneratorType
from typing import Any

from jinja2 import Undefined

TIME_LIMIT_S = 0.5  # of the processor
MAX_WEIGHT = 1 << 24
MAX_TOTAL_CHARS = 1 << 28  # in all values together, and in the output
ENTRY_WEIGHT = 64
MAX_INT_BITS = 4096  # of an integer
_POINTER = 8  # bytes
_PLAIN = (str, int, float, list, tuple, dict, type(None), Undefined)


class LimitExceeded(Exception):
    """The rendering takes too long, or makes too many characters."""


class Meter:
    def __init__(self) -> None:
        self._made = 0
        self._weights: dict[
            int, tuple[Any, int]
        ] = {}  # with their values, so that no id is used again
        self._started_s = time.thread_time()
        self._next_check_s = time.perf_counter() + TIME_LIMIT_S

    def tick(self, made: int = 0) -> bool:
        """Count so many characters, and return True. Raises LimitExceeded, also by time."""
        self._made += made
        if self._made > MAX_TOTAL_CHARS:
            raise LimitExceeded("it makes too much text")
        if (
            time.perf_counter() > self._next_check_s
        ):  # the cheaper clock, which runs for other threads too
            left_s = self._started_s + TIME_LIMIT_S - time.thread_time()
            if left_s <= 0:
                raise LimitExceeded(f"it takes over {TIME_LIMIT_S} s")
            self._next_check_s = time.perf_counter() + left_s
        return True

    def reserve(self, weight: int) -> None:
        """Raises LimitExceeded if a value of this weight may not be made."""
        if weight > MAX_WEIGHT:
            raise LimitExceeded(f"it makes a value of over {MAX_WEIGHT} characters")

    def admit(self, value: Any) -> Any:
        """Count a new value and return it. Raises LimitExceeded if it is too large."""
        if isinstance(value, str):
            self.reserve(len(value))
            self.tick(len(value))
        elif isinstance(value, list | tuple | dict):
            self.weigh(value)
            self.tick(_POINTER * len(value))
        elif isinstance(value, GeneratorType):
            return self._each(value)
        else:
            if isinstance(value, int):
                self.weigh(value)
            self.tick()
        return value

    def admit_sum(self, left: Any, right: Any, total: Any) -> Any:
        """Same as `admit` for the sum of two lists, without reading both."""
        weight = self.weigh(left) + self.weigh(right)
        self.reserve(weight)
        self._weights[id(total)] = total, weight
        self.tick(_POINTER * len(total))
        return total

    def copied(self, value: Any) -> Any:
        """Count a slice of another value, and return it."""
        self.tick(len(value) if isinstance(value, str | list | tuple) else 0)
        return value

    def printed(self, value: Any) -> Any:
        """Count a value that becomes text, and return it. Raises LimitExceeded for types that no
        request contains: a namespace could contain itself."""
        if isinstance(value, str):
            self.tick(len(value))
        elif isinstance(value, _PLAIN):
            self.tick(self.weigh(value))
        else:
            raise LimitExceeded(f"it prints a {type(value).__name__}")
        return value

    def weigh(self, value: Any) -> int:
        """Return a value's weight. Raises LimitExceeded if it is too large."""
        if isinstance(value, str):
            weight = len(value)
        elif isinstance(value, list | tuple | dict):
            known = self._weights.get(id(value))
            if known is not None:
                return known[1]
            weight = ENTRY_WEIGHT + sum(ENTRY_WEIGHT + self.weigh(entry) for entry in value)
            if isinstance(value, dict):
                weight += sum(map(self.weigh, value.values()))
            self._weights[id(value)] = value, weight
        elif not isinstance(value, _PLAIN):
            raise LimitExceeded(f"it puts a {type(value).__name__} into a list or an object")
        elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise LimitExceeded(f"it makes an integer of over {MAX_INT_BITS} bits")
        else:
            weight = 1
        self.reserve(weight)
        return weight

    def _each(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            yield self.admit(value)
