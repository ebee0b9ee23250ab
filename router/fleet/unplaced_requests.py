"""The requests that a router could not give to a worker, which its heartbeats tell all workers.

The controller reads it from any of them: without it a full fleet looks like one whose clients ask
for no more than it serves. Owned by the loop.
"""

from __future__ import annotations

from baton.proto import worker_pb2


class UnplacedRequests:
    """`waiting`: requests that wait for a worker; `refused`: so many were refused because workers
    had no room."""

    def __init__(self) -> None:
        self.waiting = self.refused = 0

    def heartbeat(self) -> worker_pb2.RouterMessage:
        reported = worker_pb2.UnplacedRequests(waiting=self.waiting, refused=self.refused)
        return worker_pb2.RouterMessage(heartbeat=worker_pb2.Heartbeat(unplaced=reported))
