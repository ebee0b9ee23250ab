"""Every setting of every process, declared once: default, bounds, unit and meaning.

A field that is declared with `setting(...)` may be set by an operator; the other fields are
constants that tests and the simulation change through the constructor. `runtime/settings/` fills
the sections from a file, the environment and flags, and checks them; `make settings` generates
`runtime/baton.toml` and `docs/settings.md`. Pure standard library.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field, fields
from typing import Literal

from baton.runtime.cluster_config import RegistryConfig, SecurityConfig, SloConfig
from baton.runtime.errors import ConfigError
from baton.runtime.setting import setting

PlacementMode = Literal["auto", "disaggregated", "local"]
ToolCalls = Literal["auto", "none", "hermes", "llama", "mistral",
                    "qwen3_coder", "glm", "deepseek_v3", "deepseek_v31", "gpt_oss"]  # fmt: skip
ControlTokensInChats = Literal["text", "tokens"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int4"]
Speculate = Literal["off", "ngram", "suffix", "draft", "eagle3"]
KvDtype = Literal["auto", "int8", "fp8_e4m3"]
LogLevel = Literal["debug", "info", "warning", "error"]
NO_GRPC = -1  # as router.grpc_port
_PORTS = 65_535
_BODIES_BYTES = 512 << 20
_DAY_S = 86_400.0
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,4})?")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach what listens on the address or name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The router: its ports, its clients' limits, and how long it waits for workers."""

    host: str = setting(
        "127.0.0.1", "Address to listen on; 0.0.0.0 accepts clients from other machines."
    )
    port: int = setting(8000, "HTTP port; 0 lets the system choose one.", low=0, high=_PORTS)
    grpc_port: int = setting(
        NO_GRPC,
        "Port for gRPC clients, on the same host; -1 turns gRPC off, 0 lets the system choose.",
        low=NO_GRPC,
        high=_PORTS,
    )
    tls: str = setting(
        "",
        "Folder with tls.crt and tls.key, a certificate and its key in PEM, for TLS with clients; "
        "empty: plain text.",
    )
    api_keys: tuple[str, ...] = setting(
        (), "API keys of which a client must send one; with an empty list, none is required."
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        'Origins of web pages that may call the API, such as "https://host"; "*" needs API keys.',
    )
    shared_prefixes: bool = setting(
        False, "Whether API keys share cached prefixes; otherwise each key reuses only its own."
    )
    placement: PlacementMode = setting(
        "auto",
        "Where prompts are prefilled: auto compares the predicted times, disaggregated always uses "
        "prefill workers, local never does.",
    )
    read_cached: bool = setting(
        True,
        "Whether a prefill worker reads blocks that another worker holds, such as the answers of a "
        "conversation, instead of computing them again.",
    )
    max_body_bytes: int = setting(
        8 << 20, "Largest request body.", low=1 << 10, high=_BODIES_BYTES, unit="bytes"
    )
    max_requests: int = setting(
        1024,
        "Requests served at the same time, and a quarter of the client connections; further ones "
        "get 503.",
        low=1,
        high=1 << 20,
    )
    tool_calls: ToolCalls = setting(
        "auto",
        "Format in which the model writes tool calls; auto takes the one that its chat template "
        "prints.",
    )
    control_tokens: ControlTokensInChats = setting(
        "text",
        "How control tokens in chat messages, such as <|im_end|>, are read: as text, or as tokens, "
        "with which a client can forge a turn.",
    )
    model_sampling: bool = setting(
        True,
        "Whether sampling parameters that a request omits come from the model's files; otherwise "
        "from the OpenAI defaults.",
    )
    leave_s: float = setting(
        0.0,
        "Time between the stop signal and the closing of the port, with /readyz red, for load "
        "balancers to react.",
        low=0,
        high=300,
        unit="s",
    )
    drain_s: float = setting(
        300.0, "Time for open requests to finish after that.", low=0, high=3600, unit="s"
    )
    request_s: float = setting(
        3600.0,
        "Longest lifetime of a request; a client shortens it with X-Request-Deadline.",
        low=0.01,
        high=_DAY_S,
        unit="s",
    )
    link_silence_s: float = setting(
        2.5,
        "Silence after which a link between router and worker counts as lost.",
        low=0.05,
        high=300,
        unit="s",
    )

    backlog: int = 1024  # of the listening socket
    max_waiting: int = 512  # requests queued at a decode worker
    link_queue: int = 8192  # messages that a worker has not read
    # Unread messages of one slow client, with tokens and logprobs.
    stream_buffer_messages: int = 1024
    connections_per_request: int = 4  # open connections of clients for each of max_requests
    bodies_bytes: int = _BODIES_BYTES  # of request bodies received or tokenized; beyond it: 429
    key_bodies_share: float = 0.25  # of bodies_bytes, for one API key
    returned_wait_s: float = 120.0  # of a drained request, for a worker
    max_attempts: int = 4  # of a request, the first included
    # Concurrent migrations: a share of the requests served, or the floor if that is more.
    retry_share: float = 0.2
    retry_floor: int = 10
    rebuild_s: float = 5.0  # for a new router's block index
    link_heartbeat_s: float = 0.5
    link_grace_s: float = 1.0  # for a broken link to reconnect
    hang_s: float = 1.5  # overdue step before migration

    @property
    def max_connections(self) -> int:
        """How many client connections may be open, of HTTP and of gRPC each."""
        return self.connections_per_request * self.max_requests

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the router."""
        return is_loopback(self.host)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A prefill or decode worker: its ports, its device and its model's dtype."""

    host: str = setting(
        "127.0.0.1", "Address to listen on for routers, other workers and the admin port."
    )
    advertise: str = setting(
        "",
        "Address that the worker announces: an IP, a host name or a network interface; empty: "
        "worker.host.",
    )
    port: int = setting(
        0, "Port for routers and other workers; 0 lets the system choose.", low=0, high=_PORTS
    )
    admin_port: int = setting(
        0, "Port for metrics and health; 0 lets the system choose one.", low=0, high=_PORTS
    )
    device: str = setting(
        "auto",
        "Device for the model: cpu, cuda, cuda:N, or auto, which takes a GPU if torch sees one.",
    )
    threads: int = setting(0, "CPU threads of torch; 0 leaves its default.", low=0, high=1024)
    dtype: Dtype = setting("auto", "Dtype of the computation; auto takes the model's own.")
    max_context: int = setting(
        0,
        "Longest sequence, prompt and output; 0 takes the model's own limit.",
        low=0,
        high=1 << 24,
        unit="tokens",
    )
    tp: int = setting(
        1,
        "Tensor parallelism: processes of this host over which the worker's model is split.",
        low=1,
        high=64,
    )
    ep: int = setting(
        1,
        "Expert parallelism: groups of these processes that each hold other experts of a mixture; "
        "a divisor of worker.tp.",
        low=1,
        high=64,
    )
    quantization: Quantization = setting(
        "none", "Quantisation of plain weights at load, which saves memory."
    )
    deterministic: bool = setting(
        False,
        "Whether a sequence's tokens are independent of batch, chunks, cache and worker, at some "
        "cost in speed.",
    )
    speculate: Speculate = setting(
        "off",
        "Speculative decoding, which changes no token: ngram proposes what followed in the text, "
        "suffix also in the tenant's output, draft and eagle3 what a model or EAGLE-3 head draws.",
    )
    draft_model: str = setting(
        "",
        "Folder of the draft model or EAGLE-3 head, the same on all workers; empty: the folder "
        "beside the model's with -draft or -eagle3 behind its name.",
    )
    drain_s: float = setting(
        10.0,
        "Time for a stopping worker to finish its requests; it returns the others to the router.",
        low=0,
        high=3600,
        unit="s",
    )

    failing_s: float = 10.0  # without one successful step; then the worker exits to be restarted


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The pool of KV blocks of a worker."""

    block_size: int = setting(16, "Tokens of a KV block.", low=1, high=256, unit="tokens")
    blocks: int = setting(
        0,
        "Blocks of the pool; 0 derives them from pool.memory_fraction (2048 for the embedded "
        "model).",
        low=0,
        high=1 << 31,
    )
    memory_fraction: float = setting(
        0.5,
        "Share of the memory that is free after loading, divided among the host's workers; 0.9 by "
        "default on a GPU.",
        low=0.01,
        high=0.98,
    )
    kv_dtype: KvDtype = setting(
        "auto",
        "Dtype of KV blocks; auto takes the computation's, the others hold twice the tokens and "
        "are less exact.",
    )
    tenant_share: float = setting(
        1.0,
        "Share of the pool above which an API key's own cached prefixes are evicted first; 1.0 "
        "turns this off.",
        low=0.01,
        high=1,
    )


@dataclass(frozen=True, slots=True)
class StepConfig:
    """The size of one engine step."""

    prefill_tokens: int = setting(
        256,
        "Prompt tokens in a step of a prefill worker; 8192 by default on a GPU.",
        low=1,
        high=1 << 20,
        unit="tokens",
    )
    chunk_tokens: int = setting(
        256,
        "Tokens of one prompt in a step, a multiple of pool.block_size; 8192 by default on a GPU.",
        low=1,
        high=1 << 20,
        unit="tokens",
    )
    local_prefill_tokens: int = setting(
        128, "Prompt tokens in a step of a decode worker.", low=1, high=1 << 20, unit="tokens"
    )
    max_sequences: int = setting(
        64, "Sequences in a decode batch; 256 by default on a GPU.", low=1, high=4096
    )

    draft_tokens: int = 8  # proposed for one sequence in a step at most; DraftLength takes fewer
    max_prompts: int = 32  # computed at once by a prefill worker
    max_queue: int = 512  # requests waiting on one worker
    expected_growth_tokens: int = 128  # output reserved with a prompt
    waiting_share: float = 0.5  # of the pool, before decoding begins
    choices_share: float = 0.25  # of the batch, for n > 1


@dataclass(frozen=True, slots=True)
class HandoffConfig:
    """The transfer of a prompt's KV blocks from a prefill to a decode worker."""

    lease_s: float = setting(
        2.0,
        "Time that a prefill worker keeps blocks pinned after the reader's last renewal.",
        low=0.1,
        high=60,
        unit="s",
    )
    preflight_floor_gb_per_s: float = setting(
        0.05,
        "Bandwidth below which a pair of workers is reported as degraded.",
        low=0,
        high=10_000,
        unit="GB/s",
    )

    verify: bool = True  # false only in experiments: blocks are used without their checksums
    # Longest pause between two pieces of a READ, and longest wait for a peer's checksums or tokens.
    read_timeout_s: float = 5.0
    window_reads: int = 4  # in flight for one handoff
    window_bytes: int = 128 << 20  # in flight for one handoff
    read_bytes: int = 64 << 20  # of one READ; one block at least


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Logs and traces."""

    log_level: LogLevel = setting("info", "Lowest level that is logged.")
    log_folder: str = setting(
        "",
        "Folder of the logs of `baton serve`; empty: the instance's folder, which is deleted at "
        "its end.",
    )
    otlp_endpoint: str = setting(
        "", "Address (host:port) of an OTLP gRPC collector of traces; empty turns the export off."
    )
    trace_ratio: float = setting(
        1.0,
        "Share of requests whose traces are exported; slow, failed, migrated and preempted ones "
        "always are.",
        low=0,
        high=1,
    )


@dataclass(frozen=True, slots=True)
class Config:
    """All sections; every process reads the same file."""

    router: RouterConfig = field(default_factory=RouterConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    step: StepConfig = field(default_factory=StepConfig)
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)


def section_names() -> list[str]:
    """Return the names of the sections, in the order of the default file."""
    return [f.name for f in fields(Config)]


def check_device(name: str) -> None:
    """Raise ConfigError unless `name` has the form of a device; torch knows whether it exists."""
    if _DEVICE.fullmatch(name) is None:
        raise ConfigError(
            f"worker.device is {name!r}: give auto, cpu, cuda, or cuda:N (cuda:0 is the first GPU)"
        )
