"""The keeper of one job: a small process that starts it, watches it and starts it again.

    baton serve ──(process or Ray actor)──▶ keeper ──▶ child in its own session
         │                                    │
         └── holds the lifeline's flock ◀─────┘ waits for it

A keeper is no child of whoever started it (it forks twice), so it outlives a Ray actor, a
raylet and Ray's head; it ends with the lifeline alone, or by SIGTERM. Its child dies with it by
PR_SET_PDEATHSIG, so nothing survives kill -9 of any of them. A second keeper of a job finds the
lock held and ends at once: that is how a re-made Ray actor adopts what still runs. Standard
library alone, Linux alone (pidfd, prctl).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

from baton.deploy.instance import (
    ERROR_KEY,
    INSTANCE_KEY,
    PROGRESS_KEY,
    Job,
    JobState,
    JobStatus,
    read_environment,
    read_job,
    write_private,
)
from baton.deploy.job_log import open_log, rotate
from baton.deploy.restarts import RestartRule

ALREADY_KEPT = 3  # exit code: another keeper has the job
NO_LIFELINE = 4  # exit code: the instance has ended
WAKE_S = 60.0  # no wait is endless; waking up early does no harm
LOG_LOOK_S = 10.0
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


class Supervisor:
    """Keeps `job` running until `stop`; the only writer of its status."""

    def __init__(self, folder: Path, job: Job, environment: dict[str, str]) -> None:
        self._folder = folder
        self._job = job
        self._error_file = folder / f"{job.name}.error"
        self._progress_file = folder / f"{job.name}.progress"
        named = {ERROR_KEY: self._error_file, PROGRESS_KEY: self._progress_file}
        self._environment = environment | {key: str(file) for key, file in named.items()}
        self._rule = RestartRule()
        self._starts = 0
        self._stop_read, self._stop_write = os.pipe()

    def stop(self) -> None:
        """End the child and `run`. Safe in signal handlers and other threads."""
        os.write(self._stop_write, b".")

    def run(self) -> None:
        """Start, watch, start again; returns when stopped or given up, the child being gone."""
        pause: float | None = 0.0
        ended = message = ""
        while pause is not None:
            if self._stopped_within(pause):
                self._write("stopped", 0, ended, message)
                return
            self._error_file.unlink(missing_ok=True)
            self._progress_file.unlink(missing_ok=True)
            started = time.monotonic()
            try:
                child = self._start()
            except OSError as error:
                self._write("failed", 0, "not started", f"{self._job.argv[0]}: {error}")
                return
            self._write("running", child.pid, ended, message)
            stopped = self._watch(child)
            code = child.returncode
            ended, message = _describe(code), self._left_message()
            if stopped:
                self._write("stopped", child.pid, ended, message)
                return
            pause = self._rule.died(time.monotonic() - started, code)
            self._write("failed" if pause is None else "waiting", child.pid, ended, message)

    def _start(self) -> subprocess.Popen[bytes]:
        self._starts += 1
        keeper = os.getpid()

        def die_with_keeper() -> None:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:  # it died before the line above
                os._exit(1)

        with open_log(self._folder, self._job.name) as log:
            return subprocess.Popen(
                self._job.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                preexec_fn=die_with_keeper,
            )

    def _watch(self, child: subprocess.Popen[bytes]) -> bool:
        """Wait for the child's end or for `stop`; True after `stop`. The child is reaped."""
        watched = os.pidfd_open(child.pid)
        try:
            while True:
                ready, _, _ = select.select([watched, self._stop_read], [], [], LOG_LOOK_S)
                self._bound_log()
                if self._stop_read in ready:
                    os.killpg(child.pid, signal.SIGTERM)
                    select.select([watched], [], [], self._job.grace_s)
                if ready:
                    # The unreaped leader still holds its group's number: no stranger is hit.
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait(WAKE_S)
                    return self._stop_read in ready
        finally:
            os.close(watched)

    def _bound_log(self) -> None:
        try:
            rotate(self._folder, self._job.name, self._job.log_bytes)
        except OSError as error:  # no reason to end a job; the next look may do better
            print(f"the log of {self._job.name} was not cut: {error}", file=sys.stderr)

    def _stopped_within(self, seconds: float) -> bool:
        return bool(select.select([self._stop_read], [], [], seconds)[0])

    def _left_message(self) -> str:
        try:
            return self._error_file.read_text().strip()
        except FileNotFoundError:
            return ""

    def _write(self, state: JobState, pid: int, ended: str, message: str) -> None:
        status = JobStatus(self._job.name, state, pid, self._starts, ended, message)
        path = self._folder / f"{self._job.name}.status"
        write_private(path, json.dumps(asdict(status)))


def _describe(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _follow_lifeline(lifeline: int, supervisor: Supervisor) -> None:
    fcntl.flock(lifeline, fcntl.LOCK_SH)  # granted when the instance's process is gone
    os.close(lifeline)
    supervisor.stop()


def _open_lifeline(folder: Path) -> int | None:
    """The lifeline of this very instance while it is held; None once it is over."""
    try:
        lifeline = os.open(folder / "lifeline", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lifeline, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        if os.pread(lifeline, 64, 0).decode() == os.environ.get(INSTANCE_KEY):
            return lifeline
    os.close(lifeline)
    return None


def keep(folder: Path, name: str) -> int:
    """Become the keeper of a job: returns to the caller's process once the lock is held (0) or
    refused; the keeper itself goes on in a process of its own and never returns."""
    lifeline = _open_lifeline(folder)
    if lifeline is None:
        return NO_LIFELINE
    lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ALREADY_KEPT
    if os.fork():
        return 0
    os.setsid()
    supervisor = Supervisor(folder, read_job(folder, name), os.environ | read_environment(folder))
    signal.signal(signal.SIGTERM, lambda *_: supervisor.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_lifeline, args=(lifeline, supervisor), daemon=True).start()
    supervisor.run()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(keep(Path(sys.argv[1]), sys.argv[2]))
