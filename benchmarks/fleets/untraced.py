"""Run a module of Baton whose requests keep no trace, for measuring what traces cost.

    python -m benchmarks.fleets.untraced MODULE ARGUMENTS...

Replaces the recording methods of the router's and the decode worker's timelines, and of the store,
by ones that do nothing; then runs MODULE as `python -m` would. Only benchmarks use it: the product
has no such switch.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from baton.decode_worker.request_timeline import RequestTimeline
from baton.router.answers.request_handler import RequestHandler
from baton.router.requests.request_trace import RequestTrace

RECORDING = {
    RequestTrace: ("mark", "record_sent", "record_loss", "record_output", "record_written"),
    RequestTimeline: ("mark", "mark_chunk", "take_first", "take_fetch", "preempt", "report"),
    RequestHandler: ("_keep_trace",),
}


def _nothing(*_: Any, **__: Any) -> None:
    pass


def main() -> None:
    for owner, names in RECORDING.items():
        for name in names:
            if not callable(getattr(owner, name)):
                raise RuntimeError(f"{owner.__name__}.{name} is no method: correct RECORDING")
            setattr(owner, name, _nothing)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
