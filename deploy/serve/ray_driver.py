"""The process that talks to Ray: makes the placement group and the actors, then waits.

It may die, and Ray with it, without any worker noticing; its supervisor starts it again, and the
new actors adopt the workers that run. Ray's exceptions are translated here, and only here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.deploy.host.instance import INSTANCE_KEY, is_locked, write_private
from baton.deploy.host.job_log import open_log
from baton.deploy.host.process_lifecycle import run_to_exit_code
from baton.deploy.serve.process_launcher import Launcher, ProcessLauncher
from baton.runtime.errors import ConfigError, Unavailable

TEND_S = 0.5
READY_TIMEOUT_S = 60.0
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
CPU_SHARE = 0.001  # of a core: a bundle must hold something, and actors do no work
NODE_SHARE = 0.001
HEAD_LOST_S = 10  # Ray waits a minute for its head, and no process restarts a local one
PATH_BYTES = 107  # of a socket, at most
SOCKET_BYTES = len("/session_2026-01-31_12-30-59_123456_1234567/sockets/plasma_store")


class WorkerActor:
    """Keeps the supervisor of one job alive; runs in an actor process of Ray."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder = Path(folder)
        self._name = name
        self._failed: Exception | None = None
        self.thread = threading.Thread(target=self._tend, daemon=True)
        self.thread.start()

    def check(self) -> str:
        """The job's name; raises what keeps this actor from its work."""
        failed = self._failed  # the thread may clear it at any time
        if failed is not None:
            raise failed
        return self._name

    def _tend(self) -> None:
        launcher = ProcessLauncher(self._folder, [self._name])
        pause = threading.Event()
        while self._turn(launcher):
            pause.wait(TEND_S)

    def _turn(self, launcher: Launcher) -> bool:
        """Whether the instance lives. No error ends the thread, because no other thread
        starts supervisors. `check` raises it until a turn succeeds."""
        try:
            if not is_locked(self._folder / "lifeline"):
                return False
            launcher.tend()
            self._failed = None
        except Exception as error:  # the thread's last stop: see above
            if repr(error) != repr(self._failed):
                self._tell(f"keeping {self._name} through Ray: {error!r}; it is tried again")
            self._failed = error
        return True

    def _tell(self, text: str) -> None:
        """Write to the log of the job, or to Ray's own for this actor."""
        try:
            with open_log(self._folder, self._name) as log:
                log.write(f"{text}\n".encode())
        except OSError:
            print(text, file=sys.stderr, flush=True)


def connect(folder: Path | None, address: str, namespace: str | None = None) -> Any:
    """Join the cluster at `address`, or start a local one; the `ray` module. `folder` is the
    instance's, for a local one. Named actors are looked up in `namespace`.

    Raises ConfigError when Ray is missing or the cluster does not answer.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not address:
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(HEAD_LOST_S))
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "Ray is not installed: pip install 'baton-serve[worker]', or use --launcher process"
        ) from error
    settings: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if namespace is not None:
        settings["namespace"] = namespace
    try:
        if address or folder is None:
            ray.init(address=address, **settings)
        else:
            settings |= {"include_dashboard": False, "_temp_dir": _own_files(folder)}
            ray.init(address="local", **settings)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = address or "a local Ray"
        raise ConfigError(
            f"{where} cannot be used ({error}): check --ray-address, or use --launcher process"
        ) from error
    return ray


def _own_files(folder: Path) -> str | None:
    """Where a local Ray keeps its sockets and logs: with the instance, for this user alone, and
    gone with it. None, Ray's own place, which all users can read and no process clears, if the
    names of its sockets would be too long, or RAY_TMPDIR names one. The logs of the Ray before
    stay."""
    own = folder / "ray"
    if "RAY_TMPDIR" in os.environ or len(os.fsencode(own)) + SOCKET_BYTES > PATH_BYTES:
        return None
    for old in sorted(own.glob("session_2*"))[:-1]:
        shutil.rmtree(old, ignore_errors=True)  # what has not ended yet may write there
    return str(own)


def place(ray: Any, folder: Path, gpus: Mapping[str, float]) -> list[Any]:
    """Make the actors of the jobs in one placement group on this host. `gpus` of each job: one for
    each of its worker's ranks, or a share of one. A job has one bundle, since an actor takes its
    GPUs from one; Ray names them in CUDA_VISIBLE_DEVICES, which its worker inherits.

    Raises ConfigError when the cluster has no room for them here, Unavailable when an actor
    does not start in time or cannot do its work.
    """
    node = f"node:{ray.util.get_node_ip_address()}"
    bundles = [
        {"CPU": CPU_SHARE, node: NODE_SHARE} | ({"GPU": each} if each else {})
        for each in gpus.values()
    ]
    group = ray.util.placement_group(bundles, strategy="STRICT_PACK")
    if not group.wait(READY_TIMEOUT_S):
        wanted = ", ".join(f"{each:g}" for each in gpus.values())
        remedy = f", which want {wanted} GPUs: give --device cpu, or use --launcher process"
        raise ConfigError(
            f"Ray has no room for {len(gpus)} workers on this host ({node})"
            + (remedy if any(gpus.values()) else "")
        )
    actor = ray.remote(WorkerActor)
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    actors = [
        actor.options(
            num_cpus=0,
            num_gpus=each,
            max_restarts=-1,
            scheduling_strategy=strategy(group, placement_group_bundle_index=index),
        ).remote(str(folder), name)
        for index, (name, each) in enumerate(gpus.items())
    ]
    try:
        ray.get([one.check.remote() for one in actors], timeout=READY_TIMEOUT_S)
    except ray.exceptions.RayError as error:
        raise Unavailable(f"Ray started no actor for a worker: {error}") from error
    return actors


def drive(folder: Path, gpus: Mapping[str, float], address: str) -> None:
    """Place the jobs, as in `place`, and stay until SIGTERM or SIGINT."""
    ray = connect(folder, address)
    received, sender = socket.socketpair()
    sender.setblocking(False)  # `set_wakeup_fd` demands it
    signal.set_wakeup_fd(sender.fileno())  # so that a signal during `place` is kept
    for number in ENDING_SIGNALS:
        signal.signal(number, lambda *_: None)  # else its default action ends the process
    try:
        actors = place(ray, folder, gpus)  # they live as long as this reference
        write_private(folder / "ray.placed", os.environ.get(INSTANCE_KEY, ""))
        while received.recv(1)[0] not in ENDING_SIGNALS:
            pass  # another signal that has a handler
        for actor in actors:
            ray.kill(actor)
    finally:
        signal.set_wakeup_fd(-1)
        received.close()
        sender.close()
        ray.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(prog="baton-ray-driver")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--address", default="")
    parser.add_argument("jobs", nargs="+", metavar="NAME=GPUS")
    options = parser.parse_args()
    jobs = (job.split("=") for job in options.jobs)
    gpus = {name: float(each) for name, each in jobs}
    return run_to_exit_code(lambda: drive(options.folder, gpus, options.address))


if __name__ == "__main__":
    sys.exit(main())
