"""A running instance: one `baton serve`, its folder, and the lock that is its lifeline.

    <runtime folder>/port-8000/          mode 0700, removed at the end
      lifeline           flocked by `baton serve` while it lives; holds the instance's id
      environment.json   what every child adds to its environment, the cluster token included
      admin.key          the operator's key for the router's admin port
      client.json        with which settings this user's commands call the workers
      registry/          the workers' announcements
      <job>.json         what to run          <job>.status   its state
      <job>.progress     what it does before it is ready
      <job>.lock         flocked by its supervisor, whose pid it holds
      <job>.log          what it wrote (job_log.py)

The kernel drops a flock when its holder dies, however it dies: so a supervisor that waits for the
lifeline learns of the end of `baton serve` without pids, parents or heartbeats. All on one
host. Knows nothing of what the jobs are.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from baton.runtime.errors import ConfigError

INSTANCE_KEY = "BATON_INSTANCE"  # in the environment of every process of the instance
TOKEN_KEY = "BATON_TOKEN"  # the cluster token
ADMIN_KEY = "BATON_ADMIN_KEY"  # of the router's admin port
ADMIN_KEY_FILE = "admin.key"
ERROR_KEY = "BATON_ERROR_FILE"  # for a child's error message
PROGRESS_KEY = "BATON_PROGRESS_FILE"  # for a child's progress before readiness
CLIENT_SETTINGS = "client.json"
STOP_DEADLINE_S = 30.0
LOG_BYTES = 64 << 20  # a longer log becomes its .1
PID_TIMEOUT_S = 1.0  # for a supervisor to write its pid
RUNTIME_SPACE = (
    "free space on its disk, or set XDG_RUNTIME_DIR to a folder that this user can write"
)
KILL_S = 5.0  # for a supervisor to kill a child after its grace, and to end

JobState = Literal["running", "waiting", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class Job:
    """A command that a supervisor keeps running."""

    name: str
    argv: tuple[str, ...]
    grace_s: float = 10.0  # between SIGTERM and SIGKILL
    log_bytes: int = LOG_BYTES
    tended: bool = False  # kept on a node of Ray: no lifeline ends it (deploy/nodes)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The state of a job; only its supervisor writes it."""

    name: str
    state: JobState
    pid: int  # of the last child
    starts: int
    ended: str | None = None  # how the child before this one ended
    message: str | None = None  # its own clear message, where it left one; why there is no child
    proven: bool = False  # it has run long once, so it is always restarted


def make_private_folder(folder: Path, remedy: str) -> None:
    """Make the folder, and those above it, unless it exists. Raises ConfigError with the remedy."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made ({error.strerror or error}): {remedy}"
        ) from error


@contextlib.contextmanager
def writing(folder: Path, remedy: str) -> Iterator[None]:
    """Raise ConfigError with the remedy if the context cannot write in the folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror or error}): {remedy}"
        ) from error


def runtime_folder() -> Path:
    """The folder of all instances of this user: private, made when missing.

    Raises ConfigError where the folder belongs to another user or is open to others.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base, "baton") if base else Path(tempfile.gettempdir(), f"baton-{os.getuid()}")
    make_private_folder(folder, "set XDG_RUNTIME_DIR to a folder that this user can write")
    found = folder.lstat()
    if found.st_uid != os.getuid():
        raise ConfigError(
            f"{folder} belongs to another user: run this as the user of `baton serve`, "
            "or set XDG_RUNTIME_DIR to a folder of your own"
        )
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder} is not a private folder: remove it, "
            "or set XDG_RUNTIME_DIR to a folder of mode 0700"
        )
    return folder


class Instance:
    """A running instance, owned by `baton serve`. `claim` takes the lifeline, `end` releases it and
    removes the folder."""

    def __init__(self, folder: Path, lifeline: int, instance_id: str) -> None:
        self.folder = folder
        self.instance_id = instance_id
        self._stop_s = STOP_DEADLINE_S
        self._lifeline: int | None = lifeline

    @classmethod
    def claim(cls, name: str, stopped: Callable[[], bool] = lambda: False) -> Instance | None:
        """Take the folder `name` for this process. None: `stopped` returned true while the
        children of an earlier instance were still ending.

        Raises ConfigError when a live instance holds it, when the children of a dead one do not
        end within STOP_DEADLINE_S, or when it cannot be written.
        """
        folder = runtime_folder() / name
        with writing(folder, RUNTIME_SPACE):
            return cls._claim(folder, stopped)

    @classmethod
    def _claim(cls, folder: Path, stopped: Callable[[], bool]) -> Instance | None:
        lifeline = _lock_lifeline(folder)
        if lifeline is None:
            raise ConfigError(
                f"another `baton serve` holds {folder}: stop it, or choose another --port"
            )
        if not wait_unkept(folder, time.monotonic() + STOP_DEADLINE_S, stopped):
            os.close(lifeline)
            if stopped():
                return None
            raise ConfigError(
                f"processes of an earlier instance in {folder} still run or serve open requests: "
                "wait, or kill them"
            )
        for path in folder.iterdir():
            if path.name != "lifeline":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        instance_id = secrets.token_hex(16)
        os.ftruncate(lifeline, 0)
        os.pwrite(lifeline, instance_id.encode(), 0)
        (folder / "registry").mkdir(mode=0o700)
        return cls(folder, lifeline, instance_id)

    def write_environment(self, environment: dict[str, str]) -> None:
        """Store what every child adds to its environment; the instance's id is added here."""
        write_private(
            self.folder / "environment.json",
            json.dumps(environment | {INSTANCE_KEY: self.instance_id}),
        )

    def write_client_settings(self, settings: Mapping[str, str]) -> None:
        """Store with which settings ("section.key": text) this user's commands call workers."""
        write_private(self.folder / CLIENT_SETTINGS, json.dumps(dict(settings)))

    def write_job(self, job: Job) -> None:
        write_job(self.folder, job)
        self._stop_s = max(self._stop_s, job.grace_s + KILL_S)

    def release(self) -> None:
        """Release the lifeline: every supervisor then ends its child and itself."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def end_job(self, name: str, hurried: Callable[[], bool] = lambda: False) -> None:
        """End one job while the others go on, and wait until its supervisor has ended. Once
        `hurried` returns true, its open requests are cut off. A supervisor that no signal reaches
        ends with the others."""
        if signal_supervisor(self.folder, name, signal.SIGTERM):
            self._wait_ended(f"{name}.lock", hurried)

    def end(
        self, hurried: Callable[[], bool] = lambda: False, sweep: Callable[[], None] = lambda: None
    ) -> bool:
        """`release`, wait for the supervisors, `sweep` away what they have left, remove the folder.
        False if some supervisor stayed. `hurried` as in `end_job`."""
        self.release()
        ended = self._wait_ended("*.lock", hurried)
        sweep()
        if not ended and not wait_unkept(self.folder, time.monotonic() + KILL_S):
            return False
        lifeline = _lock_lifeline(self.folder)
        if lifeline is not None:  # else a new instance has claimed the folder
            shutil.rmtree(self.folder)
            os.close(lifeline)
        return True

    def _wait_ended(self, locks: str, hurried: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + self._stop_s
        if wait_unkept(self.folder, deadline, hurried, locks):
            return True
        if hurried():
            for path in self.folder.glob(locks):
                signal_supervisor(self.folder, path.stem, signal.SIGINT)
        return wait_unkept(self.folder, deadline, locks=locks)


def tended_lock(folder: Path, name: str) -> Path:
    """Return the file that the actor which tends a job locks (deploy/nodes/node_folder.py)."""
    return folder / f"{name}.tended"


def signal_supervisor(folder: Path, name: str, number: signal.Signals) -> bool:
    """Send a signal to the supervisor of a job: SIGTERM to end, SIGINT to make haste with it. False
    if it has none, or one whose pid had no room on the disk. A supervisor's lock names it, and its
    pid is its own while it holds that."""
    path = folder / f"{name}.lock"
    deadline = time.monotonic() + PID_TIMEOUT_S
    while is_locked(path):
        if supervisor := path.read_text():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(supervisor), number)
            return True
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)  # another process holds the lock, and flock waits without a limit
    return False


def _lock_lifeline(folder: Path) -> int | None:
    """The locked lifeline's descriptor; None when another process holds it."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        lifeline = os.open(folder / "lifeline", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lifeline, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lifeline)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.stat(folder / "lifeline").st_ino == os.fstat(lifeline).st_ino:
                return lifeline
        os.close(lifeline)  # its last holder removed the folder before we had the lock


def wait_unkept(
    folder: Path,
    deadline: float,
    stopped: Callable[[], bool] = lambda: False,
    locks: str = "*.lock",
) -> bool:
    """Whether no supervisor holds a job of `folder`, or those whose `locks` match, waiting until
    `deadline` (time.monotonic), or until `stopped` returns true."""
    while any(is_locked(path) for path in folder.glob(locks)):
        if time.monotonic() > deadline or stopped():
            return False
        time.sleep(0.02)  # another process holds the lock, and flock waits without a limit
    return True


def is_locked(path: Path) -> bool:
    """Whether a live process holds the flock of `path`."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):  # not made yet, or a stray file beside us
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def live_instances() -> list[Path]:
    """Folders of the instances of this user that are running."""
    return [
        folder for folder in sorted(runtime_folder().iterdir()) if is_locked(folder / "lifeline")
    ]


def processes_of(instance_id: str) -> list[int]:
    """Pids of all processes, this one excepted, that carry the instance's id in their
    environment. Processes of other users are not seen."""
    marker = f"{INSTANCE_KEY}={instance_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if marker in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def read_environment(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "environment.json").read_text())
    return found


def read_client_settings(folder: Path) -> dict[str, str] | None:
    """Return what `write_client_settings` stored; None before it did."""
    try:
        found: dict[str, str] = json.loads((folder / CLIENT_SETTINGS).read_text())
    except FileNotFoundError:
        return None
    return found


def write_job(folder: Path, job: Job) -> None:
    write_private(folder / f"{job.name}.json", json.dumps(asdict(job)))


def read_job(folder: Path, name: str) -> Job:
    found = json.loads((folder / f"{name}.json").read_text())
    return Job(**found | {"argv": tuple(found["argv"])})


def read_status(folder: Path, name: str) -> JobStatus | None:
    """The job's status; None before its first start."""
    try:
        return JobStatus(**json.loads((folder / f"{name}.status").read_text()))
    except FileNotFoundError:
        return None


def read_progress(folder: Path, name: str) -> str | None:
    """Return the job's report of what it does before it is ready; None without a report."""
    try:
        return (folder / f"{name}.progress").read_text()
    except FileNotFoundError:
        return None


def grpc_address_file(address_file: Path) -> Path:
    """Return the file of the gRPC address of the router whose HTTP address is in `address_file`."""
    return address_file.with_suffix(".grpc_address")


def router_address_file(folder: Path) -> Path:
    """Return the file in which the router of an instance leaves its address."""
    return folder / "router.address"


def admin_address_file(address_file: Path) -> Path:
    """Return the file of the address of that router's admin port."""
    return address_file.with_suffix(".admin_address")


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically, readable by this user alone."""
    draft = path.with_suffix(path.suffix + f".{os.getpid()}.draft")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(draft, path)
