"""The buffers that captured decode graphs read and write, as a test sees them between two steps.

A graph's inputs and outputs are fixed in memory and belong to `DecodeGraphs` alone. Of all tests
only this module looks at them, where what is sent to a device is the promise itself.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from baton.engine.execution.decode_graph import DecodeGraphs


def tables_of(graphs: DecodeGraphs) -> Tensor:
    """Return the block tables on the device, int32 [rows, table width]; not a copy."""
    return graphs._tables


def sent_tables(graphs: DecodeGraphs) -> np.ndarray:
    """Return the block tables that the device is known to hold."""
    return graphs._sent


def drawn_tokens(graphs: DecodeGraphs, rows: int) -> list[int]:
    """Return the tokens that the last replay drew for the first `rows` rows."""
    return [int(token) for token in graphs._results[0, :rows]]


def send_tables(graphs: DecodeGraphs, bucket: int, tables: np.ndarray) -> None:
    """Send the inputs of a step of `bucket` rows with these tables, as `start` does."""
    graphs._send(graphs._stagings[0], bucket, tables)


def limit_entries(graphs: DecodeGraphs, entries: int) -> None:
    """Let steps with more penalties and biases a row than `entries` run eagerly."""
    graphs._entries = entries
