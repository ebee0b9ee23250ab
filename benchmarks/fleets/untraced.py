"""Run a process whose requests keep no trace, for measuring what traces cost.

    python -m benchmarks.fleets.untraced MODULE ARGUMENTS...

Replaces the recording methods of the router's and the decode worker's timelines, and of the store,
by ones that do nothing; then runs MODULE: benchmarks.fleets.hash_workers, or the command line
(baton.deploy.cli.main). Only benchmarks use it: the product has no such switch.
"""

from __future__ import annotations

import sys
from typing import Any

from baton.decode_worker.request_timeline import RequestTimeline
from baton.deploy.cli import main as cli
from baton.router.answers.request_handler import RequestHandler
from baton.router.requests.request_trace import RequestTrace
from benchmarks.fleets import hash_workers

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
    if sys.argv[0] == hash_workers.__name__:
        hash_workers.main()
    else:
        sys.exit(cli.main())


if __name__ == "__main__":
    main()
