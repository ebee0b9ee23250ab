"""The supervisor of one job: a small process that starts it, watches it and starts it again.

    baton serve ──(process or Ray actor)──▶ supervisor ──▶ child in its own session
         │                                    │
         └── holds the lifeline's flock ◀─────┘ waits for it

A supervisor is no child of the process that started it (it forks twice), so it outlives a Ray
actor, a raylet and Ray's head; it ends with the lifeline alone, or by SIGTERM; SIGINT then signals
its child a second time, and the child ends at once. Its child dies with it by PR_SET_PDEATHSIG, so
nothing survives kill -9 of any of them. A second supervisor of a job finds the lock held and ends
at once: that is how a re-made Ray actor adopts what still runs. On a node of a Ray cluster
(deploy/nodes) there is no lifeline: there a supervisor starts its child again only while an actor
tends the job. Standard library alone, Linux alone (pidfd, prctl)."""

from __future__ import annotations

import contextlib
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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from baton.deploy.host.instance import (
    ERROR_KEY,
    INSTANCE_KEY,
    PROGRESS_KEY,
    Job,
    JobState,
    JobStatus,
    is_locked,
    read_environment,
    read_job,
    read_status,
    tended_lock,
    write_private,
)
from baton.deploy.host.job_log import open_log, rotate
from baton.deploy.host.restarts import CONFIG_EXIT, OTHER_EXIT, RestartRule

ALREADY_KEPT = 3  # exit code: another supervisor has the job
NO_LIFELINE = 4  # exit code: the instance has ended
WAKE_S = 60.0  # no wait is endless; waking up early does no harm
POLL_S = 10.0
HURRY_TIMEOUT_S = 15.0  # from the second SIGTERM to a child to its SIGKILL
SIGNAL_GAP_S = 0.2  # closer signals may arrive as one
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
        before = self._written = read_status(folder, job.name)  # of a supervisor that has ended
        first = JobStatus(job.name, "waiting", 0, 0)
        self._status = (
            replace(before, ended="with its supervisor", message=None) if before else first
        )
        self._rule = RestartRule(proven=self._status.proven)
        self._stop_read, self._stop_write = os.pipe()
        self._hurry_read, self._hurry_write = os.pipe()

    def stop(self) -> None:
        """End the child and `run`. Safe in signal handlers and other threads, as is `hurry`."""
        os.write(self._stop_write, b".")

    def hurry(self) -> None:
        """The child is to end at once, where it is being ended."""
        os.write(self._hurry_write, b".")

    def run(self) -> None:
        """Start, watch, start again; returns when stopped, given up or no longer tended, the child
        being gone."""
        pause: float | None = 0.0
        while pause is not None:
            if self._stopped_within(pause) or not self._tended():
                self._set_state("stopped", pid=0)
                return
            began = time.monotonic()
            try:
                child, ended = self._start()
            except OSError as error:
                pause = self._not_started(error)
                continue
            self._set_state("running", pid=child.pid)
            stopped = self._watch(child, ended, began)
            code = child.returncode
            outcome = {"ended": _describe(code), "message": self._error_message()}
            if stopped:
                self._set_state("stopped", **outcome)
                return
            pause = self._rule.record_end(time.monotonic() - began, code)
            self._set_state("failed" if pause is None else "waiting", **outcome)
        while self._status != self._written and not self._stopped_within(POLL_S):
            self._write()  # else another supervisor would start what was given up

    def _tended(self) -> bool:
        """Whether the child may be started: of an untended job another node may have one."""
        return not self._job.tended or is_locked(tended_lock(self._folder, self._job.name))

    def _not_started(self, error: OSError) -> float | None:
        """The pause before the next attempt. A command or a log that is not there is a wrong
        setting, unless it has been there; of everything else there may be enough next time."""
        wrong = isinstance(error, FileNotFoundError | PermissionError)
        pause = self._rule.record_end(0.0, CONFIG_EXIT if wrong else OTHER_EXIT)
        self._set_state(
            "failed" if pause is None else "waiting",
            pid=0,
            ended=self._status.ended or "not started",
            message=f"{self._job.name} was not started: {error}",
        )
        return pause

    def _start(self) -> tuple[subprocess.Popen[bytes], int]:
        """The child, and a descriptor that can be read once it has ended. Raises OSError, and
        then there is no child."""
        self._status = replace(self._status, starts=self._status.starts + 1)
        self._error_file.unlink(missing_ok=True)
        self._progress_file.unlink(missing_ok=True)
        supervisor = os.getpid()

        def die_with_supervisor() -> None:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:  # it died before the line above
                os._exit(1)

        with open_log(self._folder, self._job.name) as log:
            child = subprocess.Popen(
                self._job.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                preexec_fn=die_with_supervisor,
            )
        try:
            return child, os.pidfd_open(child.pid)
        except OSError:
            _signal_group(child, signal.SIGKILL)
            self._reap(child)
            raise

    def _watch(self, child: subprocess.Popen[bytes], ended: int, began: float) -> bool:
        """Wait for the child's end or for `stop`; True after `stop`. The child is reaped."""
        try:
            while True:
                ready, _, _ = select.select([ended, self._stop_read], [], [], POLL_S)
                self._bound_log()
                self._rule.record_run(time.monotonic() - began)
                self._write()  # retry of a failed write, or it has proven itself
                if self._stop_read in ready:
                    self._end(child, ended)
                if ready:
                    # The unreaped leader still holds its group's number: no stranger is hit.
                    _signal_group(child, signal.SIGKILL)
                    self._reap(child)
                    return self._stop_read in ready
        finally:
            os.close(ended)

    def _end(self, child: subprocess.Popen[bytes], ended: int) -> None:
        """Let it end within its grace, or within HURRY_TIMEOUT_S once it is hurried."""
        _signal_group(child, signal.SIGTERM)
        ready, _, _ = select.select([ended, self._hurry_read], [], [], self._job.grace_s)
        if ready == [self._hurry_read] and not select.select([ended], [], [], SIGNAL_GAP_S)[0]:
            _signal_group(child, signal.SIGTERM)
            select.select([ended], [], [], HURRY_TIMEOUT_S)

    def _reap(self, child: subprocess.Popen[bytes]) -> None:
        """Wait for a killed child. One that waits for a device or a disk in the kernel ends later:
        until then this supervisor keeps its lock, so that no second child takes its place."""
        while True:
            try:
                child.wait(WAKE_S)
                return
            except subprocess.TimeoutExpired:
                _print(f"{self._job.name} (process {child.pid}) does not end, though it is killed")

    def _bound_log(self) -> None:
        try:
            rotate(self._folder, self._job.name, self._job.log_bytes)
        except OSError as error:  # no reason to end a job; the next look may do better
            _print(f"the log of {self._job.name} was not cut: {error}")

    def _stopped_within(self, seconds: float) -> bool:
        return bool(select.select([self._stop_read], [], [], seconds)[0])

    def _error_message(self) -> str | None:
        """Return what the child has left in its error file; None without any text."""
        try:
            return self._error_file.read_text().strip() or None
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"the error file cannot be read: {error}"

    def _set_state(self, state: JobState, **changes: Any) -> None:
        self._status = replace(self._status, state=state, **changes)
        self._write()

    def _write(self) -> None:
        """Write the status if it is not what was written last. What cannot be written, as on a
        full disk, is no reason to end a job: each look tries again."""
        self._status = replace(self._status, proven=self._rule.proven)
        if self._status == self._written:
            return
        path = self._folder / f"{self._job.name}.status"
        try:
            write_private(path, json.dumps(asdict(self._status)))
            self._written = self._status
        except OSError as error:
            _print(f"the status of {self._job.name} was not written: {error}")


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a child's group of processes. One that was killed before it had a group of
    its own, just after the fork, has left none."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _print(text: str) -> None:
    """Write to the job's log. A disk that is full has no room for that either."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


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
    """Become the supervisor of a job: returns to the caller's process once the lock is held (0) or
    refused; the supervisor itself goes on in a process of its own and never returns."""
    job = read_job(folder, name)
    lifeline = None if job.tended else _open_lifeline(folder)
    if lifeline is None and not job.tended:
        return NO_LIFELINE
    lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ALREADY_KEPT
    os.ftruncate(lock, 0)  # it named the supervisor before
    if os.fork():
        return 0
    os.setsid()
    supervisor = Supervisor(folder, job, os.environ | read_environment(folder))
    signal.signal(signal.SIGTERM, lambda *_: supervisor.stop())
    signal.signal(signal.SIGINT, lambda *_: supervisor.hurry())
    with contextlib.suppress(OSError):  # a full disk: then it ends with the lifeline alone
        os.pwrite(lock, str(os.getpid()).encode(), 0)  # for `signal_supervisor`
    if lifeline is not None:
        threading.Thread(target=_follow_lifeline, args=(lifeline, supervisor), daemon=True).start()
    supervisor.run()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(keep(Path(sys.argv[1]), sys.argv[2]))
