"""`baton worker`, all of whose steps fail from the moment on that a file is there:
ill-WORKER, beside the registry's folder."""

from __future__ import annotations

import sys
from pathlib import Path

from baton.deploy.cli.main import main
from baton.engine.execution.runner import ModelRunner
from baton.engine.scheduling.batch import RunningStep, StepBatch

start = ModelRunner.start


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


ILL = Path(option("--registry")).parent / f"ill-{option('--worker-id')}"


def failing_start(runner: ModelRunner, batch: StepBatch) -> RunningStep:
    if ILL.exists():
        raise RuntimeError("an illegal memory access was encountered")
    return start(runner, batch)


ModelRunner.start = failing_start
sys.exit(main())
