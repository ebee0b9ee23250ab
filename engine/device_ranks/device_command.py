"""The commands of a leader to ranks on devices of their own. See `ranks/rank_message.py`."""

from __future__ import annotations

from enum import IntEnum


class DeviceCommand(IntEnum):
    """The next task of a rank, and the arrays that come with it."""

    POOL = 1  # none; the pool's memory follows through the socket
    RELEASE = 8  # none; free the pool and what was built upon it, and report
    HIDDEN = 2  # a layout
    HIDDEN_SHORTENED = 3  # [1]: how many layers to compute; a layout
    LOGITS = 4  # [1]: the rows of the leader's hidden states, which it broadcasts
    CAPTURE = 5  # [1]: a bucket of decode rows
    REPLAY = 6  # [1]: the bucket; a layout
    COPY = 7  # [2]: a block, and the block that becomes its copy
