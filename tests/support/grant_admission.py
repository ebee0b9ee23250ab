"""A worker's answer to the opening of a handoff: watched, replaced or asked for directly.

`Grants` gets its `admit` from its worker when it is made, and no peer may see or change it. A test
that refuses an opening, or notes it, does so here, at the only place that reaches into `Grants`.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.kv_transfer.granter import GrantedPrompt
from baton.kv_transfer.peers.grants import Grants
from baton.proto import handoff_pb2


def admit(grants: Grants, opening: handoff_pb2.OpenHandoff) -> GrantedPrompt:
    """Return what the worker grants for `opening`, without a handoff. The caller ends it."""
    return grants._admit(opening)


def before_each_admission(grants: Grants, act: Callable[[handoff_pb2.OpenHandoff], None]) -> None:
    """Call `act` with each opening before the worker decides. An error of `act` is the answer."""
    decide = grants._admit

    def answer(opening: handoff_pb2.OpenHandoff) -> GrantedPrompt:
        act(opening)
        return decide(opening)

    grants._admit = answer
