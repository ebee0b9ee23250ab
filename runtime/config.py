"""Every setting of every process, as frozen dataclasses with their defaults and bounds.

`runtime/settings.py` fills them from a file, the environment and flags; `runtime/baton.toml`
is the commented default file, held against these classes by a test. Pure standard library.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from baton.runtime.errors import ConfigError

PlacementMode = Literal["auto", "disaggregated", "local"]
ToolCalls = Literal["auto", "none", "hermes", "llama", "mistral"]
StrictTools = Literal["refuse", "ignore"]
OpenApi = Literal["auto", "on", "off"]
ControlTokensInChats = Literal["text", "tokens"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int4"]
KvDtype = Literal["auto", "int8", "fp8_e4m3"]
NO_GRPC = -1  # as router.grpc_port


@dataclass(frozen=True, slots=True)
class RouterConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = NO_GRPC  # for clients that speak gRPC; 0: the system gives one
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()  # of web pages that may call the API; "*" needs api_keys
    shared_prefixes: bool = False  # between API keys; else each finds its own prefixes alone
    placement: PlacementMode = "auto"
    local_prefill_tokens: int = 64  # auto: lacking fewer, a prompt stays local; else by cost
    max_body_bytes: int = 8 << 20
    bodies_bytes: int = 512 << 20  # of all request bodies being received or tokenized
    key_bodies_bytes: int = 128 << 20  # of one API key's
    max_requests: int = 1024  # admission tickets; one more is answered 503
    max_connections: int = 4096  # of clients; one more is answered 503
    backlog: int = 1024  # connections that the system keeps until they are taken
    max_waiting: int = 512  # requests that wait on one decode worker; one more goes elsewhere
    tokenizer_queue: int = 256  # prompts that wait for a tokenizer thread; one more is answered 503
    link_queue: int = 8192  # messages to a worker that does not read; one more goes elsewhere
    index_blocks: int = 4 << 20  # of workers, that it remembers; beyond, it forgets the oldest used
    max_choices: int = 16  # `n`
    tool_calls: ToolCalls = "auto"  # how the model writes them; auto: as its template prints them
    openapi: OpenApi = "auto"  # /openapi.json; auto: on the loopback alone
    control_tokens: ControlTokensInChats = "text"  # what clients write of them in chats
    strict_tools: StrictTools = "refuse"  # `strict: true`: no call is held to its schema yet
    model_sampling: bool = True  # temperature and so on as the model's files have them
    stream_buffer_messages: int = 1024  # a slow client's own buffer: tokens, and others' logprobs
    leave_s: float = 0.0  # told to stop, /readyz is red for so long before the port closes
    drain_s: float = 300.0  # then open requests may finish for so long
    request_s: float = 3600.0  # a request's longest life; X-Request-Deadline shortens it
    handed_back_s: float = 120.0  # what a stopping worker hands back waits so long for another
    max_attempts: int = 4  # placements of one request, the first included
    retry_share: float = 0.2  # of what is being served, that may be placed again at once
    retry_floor: int = 10  # so many may, however little is being served
    rebuild_s: float = 5.0  # started, it and its requests wait so long to know its workers' blocks
    link_heartbeat_s: float = 0.5
    link_silence_s: float = 2.5  # silence ends a link
    hang_s: float = 1.5  # so long a worker may be overdue with a step, before it is left
    link_grace_s: float = 1.0  # a broken link may come back before requests are placed again

    @property
    def on_loopback(self) -> bool:
        """Whether this machine alone can reach the router."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def publishes_openapi(self) -> bool:
        return self.openapi == "on" or (self.openapi == "auto" and self.on_loopback)


@dataclass(frozen=True, slots=True)
class PoolConfig:
    block_size: int = 16  # tokens
    blocks: int = 0  # 0: sized from `memory_fraction`
    memory_fraction: float = 0.5  # of what is free after loading, shared by the host's workers
    kv_dtype: KvDtype = "auto"  # auto: what the model computes in
    tenant_share: float = 1.0  # of the pool; an API key with more loses its own prefixes first
    quarantine_limit: float = 0.25  # share of the pool; above it the worker drains and restarts


@dataclass(frozen=True, slots=True)
class StepConfig:
    prefill_tokens: int = 512  # prompt tokens per step on a prefill worker
    chunk_tokens: int = 256  # of one prompt per step
    local_prefill_tokens: int = 128  # prompt tokens per step on a decode worker
    max_sequences: int = 64  # in one decode batch
    max_prompts: int = 32  # admitted at once on a prefill worker
    max_queue: int = 512  # prompts or requests waiting; one more is refused as busy
    expected_growth_tokens: int = 128  # of output, in a decode credit
    waiting_share: float = 0.5  # of the pool, for grants that do not decode yet
    choices_share: float = 0.25  # of the batch, for requests with n > 1 beside others


@dataclass(frozen=True, slots=True)
class HandoffConfig:
    lease_s: float = 2.0
    renewals_per_lease: int = 4
    window_reads: int = 4  # READs in flight per handoff
    window_bytes: int = 128 << 20  # and their bytes; what is posted of them is far less
    read_bytes: int = 64 << 20  # of one READ, at most; a block at least
    read_threads: int = 2  # of a decode worker: they copy, where the host does, and sum
    piece_queue: int = 1 << 16  # pieces of READs that wait for a thread; a READ more is tried again
    offer_queue: int = 64  # computed chunks of a handoff without sums; the next one waits
    read_timeout_s: float = 5.0  # for a READ's next piece; for checksums or tokens a granter owes
    verify: bool = True  # off only in experiments: a wrong block is then used
    preflight_floor_gbps: float = 0.05  # GB/s; a slower pair is marked degraded


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_folder: str = ""  # of `baton serve`; empty: in the instance's folder, and gone with it
    log_bytes: int = 64 << 20  # of one process; a longer log becomes its .1, and begins anew
    otlp_endpoint: str = ""  # empty: no export
    span_queue: int = 8192  # spans that wait to be exported; the newest beyond are dropped
    log_prompts: bool = False


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    host: str = "127.0.0.1"
    port: int = 0  # 0: the system gives one
    admin_port: int = 0
    device: str = "auto"  # a GPU where torch sees one, else the CPU; or cpu, cuda, cuda:N
    threads: int = 0  # 0: torch's own choice
    dtype: Dtype = "auto"
    max_context: int = 0  # tokens; 0: the model's own
    max_connections: int = 4096  # of routers and of other workers; one more is closed
    event_queue: int = 1024  # messages about blocks, for one router; behind, it gets all anew
    quantization: Quantization = "none"  # of weights that are stored plainly
    deterministic: bool = False  # a sequence's tokens do not depend on batch, chunks or cache
    drain_s: float = 10.0  # told to stop, it finishes what it has for so long, then hands it back
    failing_s: float = 10.0  # every step has failed for so long: the worker ends, to start anew


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """The three files are given together. None: `baton serve` makes them for its processes."""

    tls: Literal["on", "off"] = "on"  # between processes; both sides show a certificate
    authority: str = ""  # PEM: whose certificates this process believes
    certificate: str = ""  # PEM: its own, then those between it and the authority
    key: str = ""  # PEM: of its certificate, without a passphrase
    server_name: str = ""  # in workers' certificates; empty: they bear the workers' addresses


@dataclass(frozen=True, slots=True)
class Config:
    """All sections; every process reads the same file."""

    router: RouterConfig = field(default_factory=RouterConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    step: StepConfig = field(default_factory=StepConfig)
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)


_VISIBLE = re.compile(r"[!-~]+")
_ORIGIN = re.compile(r"https?://[a-z0-9.\-\[\]:]+(?<!:)")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,4})?")

_BOUNDS: dict[str, tuple[float, float]] = {
    "router.port": (0, 65535),
    "router.grpc_port": (NO_GRPC, 65535),
    "router.local_prefill_tokens": (0, 1 << 20),
    "router.max_body_bytes": (1 << 10, 1 << 30),
    "router.bodies_bytes": (1 << 10, 1 << 40),
    "router.key_bodies_bytes": (1 << 10, 1 << 40),
    "router.max_requests": (1, 1 << 20),
    "router.max_connections": (1, 1 << 20),
    "router.backlog": (1, 65535),
    "router.max_waiting": (1, 1 << 20),
    "router.tokenizer_queue": (1, 1 << 20),
    "router.link_queue": (16, 1 << 20),
    "router.index_blocks": (1 << 10, 1 << 30),
    "router.max_choices": (1, 128),
    "router.stream_buffer_messages": (16, 1 << 20),
    "router.leave_s": (0, 300),
    "router.drain_s": (0, 3600),
    "router.request_s": (0.01, 86_400),
    "router.handed_back_s": (0, 86_400),
    "router.max_attempts": (1, 16),
    "router.retry_share": (0, 1),
    "router.retry_floor": (1, 1 << 20),
    "router.rebuild_s": (0, 300),
    "router.link_heartbeat_s": (0.01, 60),
    "router.link_silence_s": (0.05, 300),
    "router.hang_s": (0.05, 300),
    "router.link_grace_s": (0, 300),
    "worker.port": (0, 65535),
    "worker.admin_port": (0, 65535),
    "worker.threads": (0, 1024),
    "worker.max_context": (0, 1 << 24),
    "worker.max_connections": (16, 1 << 20),
    "worker.event_queue": (16, 1 << 20),
    "worker.drain_s": (0, 3600),
    "worker.failing_s": (1, 3600),
    "pool.block_size": (1, 256),
    "pool.blocks": (0, 1 << 31),
    "pool.memory_fraction": (0.01, 0.98),
    "pool.tenant_share": (0.01, 1),
    "pool.quarantine_limit": (0.01, 1),
    "step.prefill_tokens": (1, 1 << 20),
    "step.chunk_tokens": (1, 1 << 20),
    "step.local_prefill_tokens": (1, 1 << 20),
    "step.max_sequences": (1, 4096),
    "step.max_prompts": (1, 4096),
    "step.max_queue": (1, 1 << 20),
    "step.expected_growth_tokens": (1, 1 << 20),
    "step.waiting_share": (0.05, 1),
    "step.choices_share": (0.05, 1),
    "handoff.lease_s": (0.1, 60),
    "handoff.renewals_per_lease": (2, 100),
    "handoff.window_reads": (1, 256),
    "handoff.window_bytes": (1 << 16, 1 << 40),
    "handoff.read_bytes": (1 << 10, 1 << 40),
    "handoff.read_threads": (1, 64),
    "handoff.piece_queue": (1, 1 << 24),
    "handoff.offer_queue": (1, 1 << 16),
    "handoff.read_timeout_s": (0.05, 600),
    "handoff.preflight_floor_gbps": (0, 10_000),
    "telemetry.log_bytes": (1 << 16, 1 << 40),
    "telemetry.span_queue": (512, 1 << 20),
}


def validate(config: Config) -> None:
    """Raise ConfigError naming the first setting that is out of bounds or contradicts another."""
    check_device(config.worker.device)
    _check_files(config.security)
    _check_keys(config.router.api_keys)
    _check_origins(config.router)
    for name in _BOUNDS:
        check_setting(config, name)
    if config.router.grpc_port > 0 and config.router.grpc_port == config.router.port:
        raise ConfigError("router.grpc_port and router.port are the same: give another")
    if config.router.link_silence_s <= config.router.link_heartbeat_s:
        raise ConfigError("router.link_silence_s must be longer than router.link_heartbeat_s")
    for name in ("bodies_bytes", "key_bodies_bytes"):
        if getattr(config.router, name) < config.router.max_body_bytes:
            raise ConfigError(
                f"router.{name} is {getattr(config.router, name)}: give at least "
                f"router.max_body_bytes ({config.router.max_body_bytes}), or lower that"
            )
    if config.step.chunk_tokens % config.pool.block_size:
        raise ConfigError(
            f"step.chunk_tokens is {config.step.chunk_tokens}: "
            f"give a multiple of pool.block_size ({config.pool.block_size})"
        )


def check_setting(config: Config, name: str) -> None:
    """Raise ConfigError if this setting is out of its own bounds, whatever the others are."""
    section, key = name.split(".")
    value = getattr(getattr(config, section), key)
    if name == "worker.device":
        check_device(value)
    low, high = _BOUNDS.get(name, (value, value))
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}: give a value from {low:g} to {high:g}")


def check_device(name: str) -> None:
    """Raise ConfigError unless a device may be called so. Whether it is there, torch knows."""
    if _DEVICE.fullmatch(name) is None:
        raise ConfigError(
            f"worker.device is {name!r}: give auto, cpu, cuda, or cuda:N (cuda:0 is the first GPU)"
        )


def _check_files(security: SecurityConfig) -> None:
    files = {name: getattr(security, name) for name in ("authority", "certificate", "key")}
    missing = [f"security.{name}" for name, file in files.items() if not file]
    if 0 < len(missing) < len(files):
        raise ConfigError(
            f"{' and '.join(missing)} must be given too: security.authority, "
            "security.certificate and security.key belong together"
        )


def _check_keys(keys: Sequence[str]) -> None:
    """Of an empty key everybody has one; what no header can bring nobody has. None is shown."""
    for place, key in enumerate(keys, start=1):
        if not _VISIBLE.fullmatch(key):
            raise ConfigError(
                f"router.api_keys: key {place} of {len(keys)} is empty or holds other than visible "
                "ASCII characters: give another, or leave it out"
            )


def _check_origins(router: RouterConfig) -> None:
    for origin in router.cors_origins:
        if origin == "*" and not router.api_keys:
            raise ConfigError(
                'router.cors_origins is "*" and router.api_keys is empty, so that every web page '
                "could use this server: name the origins, or set router.api_keys"
            )
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"router.cors_origins: {origin!r} is no origin: give scheme://host or "
                "scheme://host:port, without a path"
            )


def section_names() -> list[str]:
    return [f.name for f in fields(Config)]
