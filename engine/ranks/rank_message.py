"""The messages of a leader to its ranks: arrays in shared memory, announced through a socket.

    bell   int64: command, slot, bytes          through a socket; closing it ends the rank
    slot   number of arrays | dtype, dimensions, shape of each | the arrays, 8-byte aligned

No object is serialised, so only numbers can arrive. The functions are pure, over buffers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from baton.runtime.errors import EngineError

_DTYPES = (np.int64, np.int32, np.float32, np.uint16)
_MAX_DIMENSIONS = 4
_HEAD = 2 + _MAX_DIMENSIONS  # numbers of one array's description
BELL = struct.Struct("<qqq")
SLOT_BYTES = 32 << 20  # of a command's arrays
SLOTS = 2  # one is written while ranks read the other


class Command(IntEnum):
    """The next task of a rank."""

    HIDDEN = 1  # compute a layout
    LOGITS = 2  # of hidden states, those of the rank's tokens
    HIDDEN_SHORTENED = 3  # [1]: how many layers to compute; then same as HIDDEN
    DRAFT_HIDDEN = 4  # same as HIDDEN, by the draft model
    DRAFT_LOGITS = 5  # same as LOGITS, by the draft model


def write_arrays(slot: NDArray[np.uint8], arrays: Sequence[NDArray[np.generic]]) -> int:
    """Write `arrays` into `slot` and return the bytes used. Raises EngineError if they do not
    fit."""
    offset = 8 * (1 + _HEAD * len(arrays))
    needed = offset + sum(-(-array.nbytes // 8) * 8 for array in arrays)
    if needed > slot.nbytes:
        raise EngineError(
            f"a step of {needed} bytes exceeds the {slot.nbytes} bytes that ranks share: reduce "
            "step.prefill_tokens or step.max_sequences"
        )
    head = slot[:offset].view(np.int64)
    head[0] = len(arrays)
    for number, array in enumerate(arrays):
        row = head[1 + number * _HEAD : 1 + (number + 1) * _HEAD]
        row[:] = 0
        row[0], row[1] = _DTYPES.index(array.dtype.type), array.ndim
        row[2 : 2 + array.ndim] = array.shape
        flat = np.ascontiguousarray(array).reshape(-1)
        slot[offset : offset + array.nbytes] = flat.view(np.uint8)
        offset += -(-array.nbytes // 8) * 8
    return needed


def read_arrays(slot: NDArray[np.uint8]) -> list[NDArray[np.generic]]:
    """Return copies of the arrays that `write_arrays` wrote."""
    count = int(slot[:8].view(np.int64)[0])
    offset, found = 8 * (1 + _HEAD * count), []
    head = slot[8:offset].view(np.int64).reshape(count, _HEAD)
    for row in head.tolist():
        shape = tuple(row[2 : 2 + row[1]])
        dtype = np.dtype(_DTYPES[row[0]])
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        found.append(slot[offset : offset + size].view(dtype).reshape(shape).copy())
        offset += -(-size // 8) * 8
    return found


def slot_of(commands: NDArray[np.uint8], slot: int) -> NDArray[np.uint8]:
    return commands[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
