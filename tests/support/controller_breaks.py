"""Which seed with controllers catches each break of them, and by which words of a breach."""

from __future__ import annotations

from collections.abc import Mapping

CONTROLLER_BREAKS: Mapping[str, tuple[int, str]] = {
    "remove-undrained-workers": (980, "had no order to drain"),
    "lead-after-the-lease": (10980, "after its lease has ended"),
    "number-from-before-the-drain": (980, "workers are asked for"),
    "leave-no-memory": (21380, "is amid another step"),
    "recall-no-memory": (21380, "is amid another step"),
    "forget-steps-under-way": (2580, "is amid another step"),
    "obey-late-orders": (1180, "and was asked in"),
}
