"""The plan of `baton serve`: its jobs, their commands and their environment. Pure.

Secrets and settings travel by environment, never on a command line that others can read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.deploy.host.authority import files_of
from baton.deploy.host.instance import TOKEN_KEY, Job, router_address_file
from baton.deploy.serve.device_defaults import on_gpu
from baton.deploy.serve.flag_values import MAX_WORKERS, NO_ADMIN
from baton.deploy.serve.model_source import ModelSource
from baton.runtime.config import Config, PoolConfig
from baton.runtime.errors import ConfigError
from baton.runtime.settings.checks import check_groups
from baton.runtime.settings.loading import given_names

LauncherName = Literal["ray", "process"]
ROUTER_JOB = "router"
FLEET_JOB = "fleet"  # the driver of workers on all nodes of Ray
CERTIFICATES = "tls"  # in the instance's folder
CLIENT = "client"  # the certificate of `baton drain` and `baton role`
EMBEDDED_BLOCKS = 2048  # the embedded model needs no half of a laptop
END_S = 10.0  # of a worker's loop, server and threads
MEMORY_FRACTION_LEAST = 0.01  # the setting's own bound
GPU_UNITS = 10_000  # of a GPU, as Ray counts


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """`flags` are settings given on the command line, as `section.key`: value. `pack`: few nodes of
    Ray rather than many."""

    config: Config
    prefill: int = 1
    decode: int = 1
    prefill_tp: int | None = None  # None: `worker.tp`
    decode_tp: int | None = None
    prefill_ep: int | None = None  # None: `worker.ep`
    decode_ep: int | None = None
    prefill_kv_dtype: str | None = None  # None: `pool.kv_dtype`
    decode_kv_dtype: str | None = None
    model: str | None = None
    config_file: Path | None = None
    flags: Mapping[str, str] | None = None
    launcher: LauncherName = "ray"
    ray_address: str = ""
    pack: bool = False
    start_timeout_s: float = 600.0
    admin_port: int = 0  # of the router; 0: the system chooses, NO_ADMIN: none

    def check(self) -> None:
        """Raise ConfigError naming the option that cannot work."""
        for option, count in (("--prefill", self.prefill), ("--decode", self.decode)):
            if not 0 <= count <= MAX_WORKERS:
                raise ConfigError(f"{option} is {count}: give a number from 0 to {MAX_WORKERS}")
        if not self.start_timeout_s > 0:  # also false for not-a-number
            raise ConfigError(f"--start-timeout is {self.start_timeout_s:g}: give seconds above 0")
        if self.decode == 0:
            raise ConfigError("--decode is 0: only decode workers emit tokens, give at least 1")
        if self.prefill == 0 and self.config.router.placement == "disaggregated":
            raise ConfigError("--placement disaggregated needs --prefill 1 or more")
        for role in ("prefill", "decode"):
            try:
                check_groups(*self.split_of(role))
            except ConfigError as error:
                raise ConfigError(f"{role} workers: {error} (--{role}-tp, --{role}-ep)") from error
        if self.over_nodes:
            self._check_over_nodes()
        elif "registry.location" in (self.flags or {}):
            raise ConfigError(
                f"--registry is {self.config.registry.location}, and workers of this host register "
                "in its own folder: with --ray-address and redis://HOST:PORT they start on all "
                "nodes of Ray; to start them one by one use `baton worker` and `baton router`"
            )
        elif self.pack:
            raise ConfigError(
                "--pack is given, and all workers start on this host: give --ray-address and "
                "--registry redis://HOST:PORT, or leave it out"
            )
        device = self.config.worker.device
        if self.launcher == "ray" and ":" in device:
            raise ConfigError(
                f"worker.device is {device}, and Ray chooses the GPUs of its actors: give cuda, or "
                "use --launcher process"
            )

    @property
    def over_nodes(self) -> bool:
        """Whether the workers go to all nodes of a running Ray, and so register on a server."""
        registry = self.config.registry
        if self.launcher != "ray" or not self.ray_address or not registry.location:
            return False
        from baton.runtime.shared_registry.registry_location import folder_of  # not on one host

        return folder_of(registry) is None

    def _check_over_nodes(self) -> None:
        from baton.runtime.shared_registry.registry_location import check_argument

        check_argument(self.config.registry.location)  # the router's, and the driver's
        if self.config_file is not None:
            raise ConfigError(
                f"--config {self.config_file} is a file of this host, and workers start on other "
                "nodes: give its settings by --set"
            )
        own = {
            "--prefill-tp": self.prefill_tp, "--decode-tp": self.decode_tp,
            "--prefill-ep": self.prefill_ep, "--decode-ep": self.decode_ep,
            "--prefill-kv-dtype": self.prefill_kv_dtype,
            "--decode-kv-dtype": self.decode_kv_dtype,
        }  # fmt: skip
        if given := [name for name, value in own.items() if value is not None]:
            raise ConfigError(
                f"{given[0]} is for workers of this host: on the nodes of {self.ray_address} both "
                "roles have the same settings; set BATON_WORKER__TP, say, in the environment of "
                "the nodes of one role and give `baton fleet --by-role`"
            )
        if makes_certificates(self):
            raise ConfigError(
                "security.certificate is not set, and workers on other nodes need certificates of "
                "one authority: issue them (baton authority issue) and set security.authority, "
                "security.certificate and security.key here and on each node, or set "
                "security.tls to off"
            )

    def split_of(self, role: str) -> tuple[int, int]:
        """Return `worker.tp` and `worker.ep` of a role's workers."""
        given = (
            (self.prefill_tp, self.prefill_ep)
            if role == "prefill"
            else (self.decode_tp, self.decode_ep)
        )
        return given[0] or self.config.worker.tp, given[1] or self.config.worker.ep


def worker_names(options: ServeOptions) -> list[str]:
    """Return the workers' names, which are also their ids."""
    return [f"prefill-{n}" for n in range(options.prefill)] + [
        f"decode-{n}" for n in range(options.decode)
    ]


def workers_per_gpu(options: ServeOptions, gpus: int) -> int:
    """How many workers share a GPU where torch sees `gpus`; 0: none uses one."""
    device = options.config.worker.device
    if device == "cpu" or not gpus:
        return 0
    ranks = sum(_ranks(options, name) for name in worker_names(options))
    return -(-ranks // (1 if ":" in device else gpus))


def _ranks(options: ServeOptions, name: str) -> int:
    return options.split_of(name.split("-")[0])[0]


def devices(options: ServeOptions, gpus: int) -> dict[str, str]:
    """Return `worker.device` of each worker: the GPUs in turn, unless the user named one for all;
    the ranks of a worker have GPUs that follow each other. Under Ray an actor sees none but those
    that Ray gave it. Empty: the CPU. Raises ConfigError for ranks that cannot have GPUs."""
    names = worker_names(options)
    if not workers_per_gpu(options, gpus):
        return {}
    if ":" in options.config.worker.device:
        return dict.fromkeys(names, options.config.worker.device)
    most = max(_ranks(options, name) for name in names)
    if most > gpus:
        raise ConfigError(
            f"worker.tp is {most}, and torch sees {gpus} GPUs on this host: give at most {gpus}, "
            "or --device cpu"
        )
    if options.launcher == "ray":
        if most > 1 and workers_per_gpu(options, gpus) > 1:
            raise ConfigError(
                f"worker.tp is {most}, and Ray has {gpus} GPUs for the ranks of all workers, each "
                "of which needs one: start fewer workers, or use --launcher process"
            )
        return dict.fromkeys(names, "cuda")
    found, following = {}, 0
    for name in names:
        ranks = _ranks(options, name)
        first = following if following + ranks <= gpus else 0
        found[name], following = f"cuda:{first}", (first + ranks) % gpus
    return found


def gpus_of_actors(options: ServeOptions, gpus: int) -> dict[str, float]:
    """Return how many GPUs Ray gives each worker: one for each rank, or a share of one in Ray's
    unit of 1/10,000; 0 on the CPU."""
    sharing = workers_per_gpu(options, gpus)
    share = GPU_UNITS // sharing / GPU_UNITS if sharing else 0.0
    return {name: share * _ranks(options, name) for name in worker_names(options)}


def makes_certificates(options: ServeOptions) -> bool:
    """Whether the processes get certificates of the instance's own authority."""
    security = options.config.security
    return security.tls == "on" and not security.certificate


def grace_s(config: Config) -> float:
    """Return the seconds from a worker's SIGTERM to its SIGKILL: its drain, the leases that it has
    granted, and the end of its threads."""
    return config.worker.drain_s + 2 * config.handoff.lease_s + END_S


def jobs(options: ServeOptions, model: ModelSource, folder: Path, gpus: int = 0) -> list[Job]:
    """The router's job, then the workers' of this host, for the instance in `folder`."""
    location = options.config.registry.location if options.over_nodes else folder / "registry"
    shared = ["--model", str(model.folder), "--registry", str(location)]
    if options.config_file is not None:
        shared += ["--config", str(options.config_file.resolve())]
    address_file = str(router_address_file(folder))
    router = ["router", "--model-name", model.name, "--address-file", address_file, *shared]
    if options.admin_port != NO_ADMIN:
        router += ["--admin-port", str(options.admin_port)]
    chosen = devices(options, gpus)
    workers = []
    for name in [] if options.over_nodes else worker_names(options):
        own = ["--role", name.split("-")[0], "--worker-id", name]
        own += ["--set", f"worker.device={chosen[name]}"] if name in chosen else []
        tp, ep = options.split_of(name.split("-")[0])
        own += ["--set", f"worker.tp={tp}"] if tp != options.config.worker.tp else []
        own += ["--set", f"worker.ep={ep}"] if ep != options.config.worker.ep else []
        prefills = name.startswith("prefill")
        kv_dtype = options.prefill_kv_dtype if prefills else options.decode_kv_dtype
        own += ["--set", f"pool.kv_dtype={kv_dtype}"] if kv_dtype else []
        own += _certificate(options, folder, name)
        command = baton("worker", *own, *shared)
        workers.append(Job(name, command, grace_s(options.config)))
    router += _certificate(options, folder, ROUTER_JOB)
    leaving = options.config.router
    router_grace_s = leaving.leave_s + leaving.drain_s + 2 * END_S  # and the streams' last events
    return [Job(ROUTER_JOB, baton(*router), router_grace_s), *workers]


def _certificate(options: ServeOptions, folder: Path, name: str) -> list[str]:
    if not makes_certificates(options):
        return []
    settings = files_of(folder / CERTIFICATES, name).settings()
    return [part for setting in settings.items() for part in ("--set", "=".join(setting))]


def client_settings(options: ServeOptions, folder: Path) -> dict[str, str]:
    """Return the settings with which a command of this user calls the instance's workers, and
    trusts its router, from any working directory."""
    security, registry = options.config.security, options.config.registry
    settings = {"security.tls": security.tls, "security.server_name": security.server_name}
    if options.config.router.tls:
        settings["router.tls"] = str(Path(options.config.router.tls).resolve())
    if options.over_nodes:
        settings["registry.location"] = registry.location
        settings["registry.cluster"] = registry.cluster
        settings["registry.password"] = registry.password
    if makes_certificates(options):
        return settings | files_of(folder / CERTIFICATES, CLIENT).settings()
    files = {
        "security.authority": security.authority,
        "security.certificate": security.certificate,
        "security.key": security.key,
        "registry.authority": registry.authority if options.over_nodes else "",
    }
    return settings | {name: str(Path(file).resolve()) for name, file in files.items() if file}


SHORT_SPIN = "10000"  # iterations: 20 to 40 microseconds on the machines measured


def environment(
    options: ServeOptions, token: str, cores: int, inherited: Mapping[str, str], gpus: int = 0
) -> dict[str, str]:
    """Return what the jobs add to the environment that they inherit.

    OpenMP must not spin for long: two torch processes that spin on shared cores slow each other
    thirty times. Where the workers' threads have a core each they spin for some ten microseconds:
    waking a thread that sleeps costs up to sixty, two hundred times in a decode step.
    Cores and pool memory are divided among the workers: what the user gives as
    `pool.memory_fraction` is for this host, or for each of its GPUs.
    """
    workers = _workers(options)
    added = {TOKEN_KEY: token, "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    for name, value in (options.flags or {}).items():
        added["BATON_" + name.replace(".", "__").upper()] = value
    if options.config.worker.threads == 0 and "OMP_NUM_THREADS" not in inherited:
        added["OMP_NUM_THREADS"] = str(max(1, cores // workers))
        if workers <= cores:
            added["GOMP_SPINCOUNT"] = SHORT_SPIN
    if options.config.pool.blocks == 0 and options.model is None:
        added.setdefault("BATON_POOL__BLOCKS", str(EMBEDDED_BLOCKS))
    elif options.config.pool.blocks == 0:
        on_gpus = workers_per_gpu(options, gpus)
        fraction = _memory_fraction(options, inherited, bool(on_gpus)) / (on_gpus or workers)
        added["BATON_POOL__MEMORY_FRACTION"] = str(max(fraction, MEMORY_FRACTION_LEAST))
    return added


def _memory_fraction(options: ServeOptions, inherited: Mapping[str, str], gpus: bool) -> float:
    """Return the share of the host's memory that pools take; on GPUs, of each GPU's memory."""
    fraction = options.config.pool.memory_fraction
    if not gpus or fraction != PoolConfig().memory_fraction:
        return fraction
    given = given_names(options.config_file, inherited, options.flags or {})
    return on_gpu(options.config, given).pool.memory_fraction


def switched_off(options: ServeOptions, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each protection that the user has switched off."""
    if options.config.security.tls == "off":
        yield "security.tls is off: processes communicate in plain text"
    asked = environ.get("RAY_AUTH_MODE", "token").lower()  # as Ray reads it
    if options.launcher == "ray" and not options.ray_address and asked != "token":
        yield f"RAY_AUTH_MODE is {asked}: any client that reaches this host's Ray can run code here"


def _workers(options: ServeOptions) -> int:
    return options.prefill + options.decode


def baton(*arguments: str) -> tuple[str, ...]:
    """Return the command that runs `baton` with these arguments."""
    return (sys.executable, "-P", "-m", "baton.deploy.cli.main", *arguments)
