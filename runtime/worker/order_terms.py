"""The terms of controllers that a worker has heard of: an order of a lower one is late."""

from __future__ import annotations

from baton.runtime.errors import Unavailable


class OrderTerms:
    """The terms that one boot of a worker has heard of."""

    def __init__(self) -> None:
        self._highest = 0

    def note(self, term: int) -> None:
        """Record that the controller of this term has asked."""
        self._highest = max(self._highest, term)

    def check(self, term: int) -> None:
        """Raises Unavailable for an order of a controller that leads no more; 0: it has no term."""
        if term and term < self._highest:
            raise Unavailable(
                f"the order is of the controller of term {term}, and one of term {self._highest} "
                "leads since: the order is void, and the present controller decides"
            )
        self.note(term)
