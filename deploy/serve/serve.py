"""`baton serve`: starts an instance, reports its progress, watches it, and ends every process.

One thread, one loop, no wait longer than a tick: Ctrl-C works at any moment, also while it
starts. It holds the instance's lifeline; everything else is done by supervisors (supervisor.py).
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from baton.deploy.host.advertised_host import advertised_host
from baton.deploy.host.authority import Authority
from baton.deploy.host.fleet_progress import WorkerProgress, check_start, read_fleet_progress
from baton.deploy.host.gpus import visible_gpus
from baton.deploy.host.instance import (
    ADMIN_KEY,
    ADMIN_KEY_FILE,
    RUNTIME_SPACE,
    TOKEN_KEY,
    Instance,
    processes_of,
    read_progress,
    read_status,
    write_private,
    writing,
)
from baton.deploy.host.job_log import keep_logs, log_end
from baton.deploy.host.packages import check_worker_packages
from baton.deploy.host.ports import check_grpc_port, check_port
from baton.deploy.host.restarts import EARLY_STARTS
from baton.deploy.host.router_trust import check_certificate, url_of
from baton.deploy.serve import plan
from baton.deploy.serve.flag_values import NO_ADMIN
from baton.deploy.serve.model_source import ModelSource, check_model, find_model
from baton.deploy.serve.plan import FLEET_JOB, ROUTER_JOB, ServeOptions
from baton.deploy.serve.process_launcher import Launcher, ProcessLauncher
from baton.deploy.serve.ray_launcher import RAY_JOB, RayLauncher
from baton.deploy.serve.router_state import (
    admin_address,
    grpc_address,
    linked_workers,
    router_address,
)
from baton.runtime.errors import BatonError, ConfigError, Unavailable
from baton.runtime.registry import DirectoryRegistry, WorkerRecord
from baton.runtime.registry_client import answer_within

TICK_S = 0.1  # between looks at jobs, the registry and signals, which call nothing here
SWEEP_S = 5.0
KILL_TIMEOUT_S = 1.0  # for killed processes to end
REPORT_AFTER_S = 1.0  # before it reports what it waits for
OPEN_REQUESTS = "open requests may finish; Ctrl-C again cuts them off"
OTHERS = "all requests have ended; waiting for the other processes"
ON_ONE_NODE = "workers start on this host: --registry redis://HOST:PORT uses all nodes of Ray"
NEXT_STEP = "baton serve Qwen/Qwen3-0.6B"

AfterReady = Callable[[str, str], bool]  # (url, model name) -> whether to go on serving


class Serving:
    """One run of `baton serve`. `say` prints one line."""

    def __init__(self, options: ServeOptions, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._stopping = False  # plain flags: an Event's lock is not safe in a signal handler
        self._hurried = False
        self._began = time.monotonic()
        self._workers = [] if options.over_nodes else plan.worker_names(options)  # of this host
        self._names = [ROUTER_JOB, *self._workers]
        if options.launcher == "ray":
            self._names.append(FLEET_JOB if options.over_nodes else RAY_JOB)
        self._starts: dict[str, int] = {}
        self._reported: dict[str, str] = {}  # the last line on each worker and other subject
        self._gpus = 0  # that torch sees on this host, for workers that may use them
        self._after_error: BaseException | None = None
        self._authority: Authority | None = None  # None: it makes no certificates

    def stop(self) -> None:
        """End `run` soon: open requests may finish, unless it is called twice. Safe in signal
        handlers and other threads."""
        self._hurried = self._stopping
        self._stopping = True

    def run(self, after_ready: AfterReady | None = None) -> None:
        """Serve until `stop`. Raises the BatonError that ended it, everything being gone then.

        `after_ready` runs in a thread of its own once requests can be served.
        """
        self._options.check()
        check_port(self._options.config.router)
        check_grpc_port(self._options.config.router)
        check_certificate(self._options.config.router)
        check_worker_packages(self._options.config.worker.device)
        if self._workers:
            self._gpus = visible_gpus(self._options.config.worker.device, lambda: self._stopping)
        if self._stopping:
            return
        model = find_model(self._options.model, self._progress, lambda: self._stopping)
        if model is None:
            return
        check_model(model.folder, self._options.config.worker.max_context)
        port = self._options.config.router.port
        name = f"port-{port}" if port else f"pid-{os.getpid()}"
        instance = Instance.claim(name, lambda: self._stopping)
        if instance is None:
            return
        try:
            with writing(instance.folder, RUNTIME_SPACE):
                launcher = self._prepare(instance, model)
            url = self._until_ready(instance, launcher)
            if url is not None:
                self._announce(url, model, instance.folder)
                if after_ready is not None:
                    self._afterwards(after_ready, url, model)
                self._watch(instance, launcher)
        finally:
            self._end(instance)
        if self._after_error is not None:
            raise self._after_error

    def _prepare(self, instance: Instance, model: ModelSource) -> Launcher:
        options, folder, gpus = self._options, instance.folder, self._gpus
        token = os.environ.get(TOKEN_KEY) or secrets.token_hex(32)
        cores = len(os.sched_getaffinity(0))
        added = plan.environment(options, token, cores, os.environ, gpus)
        instance.write_environment(added | self._admin_key(folder))
        if plan.makes_certificates(options):
            self._authority = self._certify(folder / plan.CERTIFICATES)
        instance.write_client_settings(plan.client_settings(options, folder))
        for job in plan.jobs(options, model, folder, gpus):
            instance.write_job(job)
        logs = Path(options.config.telemetry.log_folder or folder).expanduser()
        if logs != folder:
            keep_logs(folder, self._names, logs)
        self._progress(f"model {model.name} from {model.folder}")
        self._progress(
            f"starting the router, {options.prefill} prefill and {options.decode} decode workers "
            f"({options.launcher} launcher; logs in {logs})"
        )
        for warning in plan.switched_off(options, os.environ):
            self._progress(f"WARNING: {warning}")
        if gpus:
            placed = plan.devices(options, gpus).items()
            assignments = ", ".join(f"{name} on {device}" for name, device in placed)
            self._progress(f"torch sees {gpus} GPUs: {assignments}")
        if options.launcher == "process":
            return ProcessLauncher(folder, [ROUTER_JOB, *self._workers])
        if options.over_nodes:
            self._progress(
                f"workers start on the nodes of Ray at {options.ray_address}; {FLEET_JOB}.log has "
                "more of each"
            )
            from baton.deploy.serve.fleet_launcher import FleetLauncher  # not on one host

            return FleetLauncher(instance, options, model)
        self._progress(
            f"joining Ray at {options.ray_address}; {ON_ONE_NODE}"
            if options.ray_address
            else "starting a local Ray (about ten seconds)"
        )
        wanted = plan.gpus_of_actors(options, gpus)
        return RayLauncher(instance, [ROUTER_JOB], wanted, options.ray_address)

    def _admin_key(self, folder: Path) -> dict[str, str]:
        """Return the variable with the operator's key, which is kept in a file of this user."""
        if self._options.admin_port == NO_ADMIN:
            return {}
        key = os.environ.get(ADMIN_KEY) or secrets.token_urlsafe(24)
        write_private(folder / ADMIN_KEY_FILE, key + "\n")
        return {ADMIN_KEY: key}

    def _certify(self, folder: Path) -> Authority:
        """A certificate for each process. Workers serve, and call: their roles change."""
        authority = Authority(folder)
        host = advertised_host(self._options.config.worker)
        for name in plan.worker_names(self._options):
            authority.issue(name, host)
        for name in (ROUTER_JOB, plan.CLIENT):
            authority.issue(name, host=None)
        return authority

    def _until_ready(self, instance: Instance, launcher: Launcher) -> str | None:
        """The router's URL once a request can be served; None when stopped before."""
        registry = DirectoryRegistry(instance.folder / "registry")
        missing = set(self._workers)
        placing = self._options.launcher == "ray" and not self._options.over_nodes
        deadline = self._began + self._options.start_timeout_s
        while not self._stopping:
            launcher.tend()
            self._check_jobs(instance, starting=True)
            if placing and (instance.folder / "ray.placed").exists():
                placing = False
                self._progress("Ray has placed the workers")
            for name in sorted(missing):
                self._report_progress(instance, name)
            for record in _announced_workers(registry):
                if record.worker_id in missing:
                    missing.remove(record.worker_id)
                    self._progress(f"{record.worker_id} ready at {record.address}")
                    if record.memory:
                        self._progress(f"{record.worker_id} memory: {record.memory}")
            overdue = time.monotonic() > deadline
            check_start(self._report_fleet(instance), overdue=overdue)
            address = router_address(instance.folder)
            if not missing and address is not None and self._all_linked(address):
                return url_of(address)
            if overdue:
                waited = ", ".join(sorted(missing)) or f"{ROUTER_JOB} or its workers"
                where = f"{FLEET_JOB}.log" if self._options.over_nodes else "the logs"
                raise Unavailable(f"{waited} not ready in time: see {where}, or --start-timeout")
            time.sleep(TICK_S)  # other processes report in files
        return None

    def _report_progress(self, instance: Instance, name: str) -> None:
        """Report what a worker does before it is ready, if that has changed."""
        progress = read_progress(instance.folder, name)
        if progress is not None:
            self._report(name, f"{name} {progress}")

    def _report_fleet(self, instance: Instance) -> list[WorkerProgress]:
        """Report what has changed of workers on other nodes, and return all of them."""
        over_nodes = self._options.over_nodes
        workers = read_fleet_progress(instance.folder, FLEET_JOB) if over_nodes else []
        for worker in workers:
            for number, line in enumerate(worker.lines()):
                self._report(f"{worker.worker_id}/{number}", line)
        return workers

    def _report(self, subject: str, text: str) -> None:
        """Print a line, unless it is the last one on this subject."""
        if text != self._reported.get(subject):
            self._reported[subject] = text
            self._progress(text)

    def _all_linked(self, address: str) -> bool:
        """Whether the router can place on every worker: a request that came while only the
        decode workers were linked would be prefilled there, whatever the placement."""
        workers, options = linked_workers(address), self._options
        prefill, decode = workers.get("prefill", 0), workers.get("decode", 0)
        if options.over_nodes and workers:  # which report their progress on their own nodes
            self._report(
                "linked",
                f"the router is linked to {prefill} of {options.prefill} prefill and {decode} of "
                f"{options.decode} decode workers",
            )
        return prefill >= options.prefill and decode >= options.decode

    def _watch(self, instance: Instance, launcher: Launcher) -> None:
        """Watch the instance until `stop`, or until a job is given up."""
        while not self._stopping:
            time.sleep(TICK_S)  # supervisors report in files
            self._renew_certificates()
            self._tend(launcher)
            self._report_fleet(instance)
            try:
                self._check_jobs(instance, starting=False)
            except OSError as error:
                self._report(
                    "jobs",
                    f"the status of the jobs cannot be read: {error}; the next attempt follows",
                )

    def _tend(self, launcher: Launcher) -> None:
        try:
            launcher.tend()
        except BatonError as error:
            self._report("supervisors", f"{error}; the next attempt follows")

    def _renew_certificates(self) -> None:
        try:
            if self._authority is not None:
                self._authority.renew()
        except OSError as error:  # it is tried again; connections that stand need none
            self._progress(f"certificates cannot be renewed, so new connections will fail: {error}")

    def _check_jobs(self, instance: Instance, *, starting: bool) -> None:
        """Report which jobs were restarted. Raises ConfigError for one that was given up."""
        for name in self._names:
            status = read_status(instance.folder, name)
            if status is None:
                continue
            before = self._starts.get(name, 1)
            if status.state == "failed" or (starting and status.starts > EARLY_STARTS):
                end = f"The end of its log:\n{log_end(instance.folder, name)}"
                crash = f"{name} cannot be kept running ({status.ended}). {end}"
                raise ConfigError(status.message or crash)
            if status.state == "waiting" and status.message is not None:
                self._report(name, f"{status.message}; the next attempt follows")
            if status.starts > before and status.state == "running":
                how = "ended" if status.ended == "exit code 0" else "died"  # it was drained
                self._progress(f"{name} {how} ({status.ended}); restarted")
                self._starts[name] = status.starts
                for subject in (name, "supervisors"):  # a new failure is reported again
                    self._reported.pop(subject, None)

    def _announce(self, url: str, model: ModelSource, folder: Path) -> None:
        grpc, admin = grpc_address(folder), admin_address(folder)
        asked = [{"role": "user", "content": "Hello"}]
        body = {"model": model.name, "stream": True, "messages": asked}
        data = shlex.quote(json.dumps(body))
        also = f" (gRPC at {grpc})" if grpc else ""
        self._say(f"Ready at {url} after {time.monotonic() - self._began:.1f} s{also}. Try:")
        # an address of this host, which few certificates bear
        curl = "curl -kN" if url.startswith("https://") else "curl -N"
        self._say(
            f"  {curl} {url}/v1/chat/completions -H 'Content-Type: application/json' -d {data}"
        )
        if admin is not None:
            key = shlex.quote(str(folder / ADMIN_KEY_FILE))
            self._say(f"Console at {url_of(admin)} (its key: cat {key})")
        if model.demonstration:
            self._say(
                f"{model.name} is a demonstration model: it knows only a small invented world."
            )
            self._say(f"To serve a real model: {NEXT_STEP}")
        self._say("Press Ctrl-C to stop.")

    def _afterwards(self, after_ready: AfterReady, url: str, model: ModelSource) -> None:
        def work() -> None:
            try:
                if after_ready(url, model.name):
                    return
            except BaseException as error:  # `serve` raises it in its own thread
                self._after_error = error
            self._stopping = True  # without cutting requests off

        threading.Thread(target=work, daemon=True).start()

    def _end(self, instance: Instance) -> None:
        """End the router first, while workers can finish its open requests."""
        self._progress("stopping")
        try:
            instance.end_job(ROUTER_JOB, self._hurried_after(OPEN_REQUESTS))
        except OSError as error:  # as without descriptors: then it ends with the others
            self._progress(f"the router could not be stopped before the workers: {error}")
        ended = instance.end(self._hurried_after(OTHERS), lambda: self._sweep(instance.instance_id))
        self._progress(f"stopped; {'no process is left' if ended else 'some processes still end'}")

    def _hurried_after(self, waits_for: str) -> Callable[[], bool]:
        """Return a callable that returns whether to hurry, and after REPORT_AFTER_S reports what is
        waited for."""
        report_at_s = time.monotonic() + REPORT_AFTER_S

        def hurried() -> bool:
            if time.monotonic() > report_at_s:
                self._report("end", waits_for)
            return self._hurried

        return hurried

    def _sweep(self, instance_id: str) -> None:
        """Kill what has outlived its supervisor (a Ray daemon, say) by SWEEP_S, and supervisors."""
        began_s = time.monotonic()
        while (left := processes_of(instance_id)) and time.monotonic() < began_s + SWEEP_S:
            time.sleep(TICK_S)  # they are not our children
        for pid in left:
            self._progress(f"process {pid} did not end and was killed")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while processes_of(instance_id) and time.monotonic() < began_s + SWEEP_S + KILL_TIMEOUT_S:
            time.sleep(TICK_S)  # a dying process may write into the folder

    def _progress(self, text: str) -> None:
        self._say(f"[{time.monotonic() - self._began:6.1f} s] {text}")


def serve(
    options: ServeOptions,
    say: Callable[[str], None] | None = None,
    after_ready: AfterReady | None = None,
) -> None:
    """Run `baton serve` in the main thread until SIGINT, SIGTERM or SIGHUP."""
    serving = Serving(options, say or print_line)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: serving.stop())
    serving.run(after_ready)


def _announced_workers(registry: DirectoryRegistry) -> list[WorkerRecord]:
    """Return the announced workers, none while the file system hangs."""
    try:
        return answer_within(registry.workers)
    except TimeoutError:
        return []


def print_line(line: str) -> None:
    """Print `line` unless standard output cannot take it."""
    with suppress(OSError):  # a full disk, a closed pipe: no reason to end
        print(line, flush=True)
