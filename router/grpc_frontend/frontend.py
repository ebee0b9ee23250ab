"""The router's gRPC front end: its server with its limits, on the HTTP front end's host.

    frontend.start() ─▶ address ... frontend.stop(grace): no new calls, open calls may end

The largest message and the number of connections are those of HTTP. Messages come uncompressed;
idle connections are closed. With `router.tls` it speaks TLS 1.3 alone. Knows no method's meaning.
"""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from baton.router.client_access.router import Router
from baton.router.grpc_frontend.call import MAX_KEYLESS_CALLS, CallGuard
from baton.router.grpc_frontend.health import HEALTH, HealthService
from baton.router.grpc_frontend.inference import SERVICE, InferenceService
from baton.router.grpc_frontend.reflection import REFLECTION, REFLECTION_V1, ReflectionService
from baton.runtime.config import RouterConfig
from baton.runtime.errors import ConfigError
from baton.runtime.serving.client_tls import ClientTls

HEADER_BYTES = 16 << 10
IDLE_TIMEOUT_S = 300
HANDSHAKE_TIMEOUT_S = 20
PING_INTERVAL_S = 30  # a client that does not answer in PING_TIMEOUT_S is disconnected
PING_TIMEOUT_S = 10
MIN_CLIENT_PING_INTERVAL_S = 10  # a client that pings more often is disconnected


class GrpcFrontend:
    """The gRPC server of a router; in plain text without `tls`."""

    def __init__(self, router: Router, tls: ClientTls | None = None) -> None:
        config = router.config
        self._config = config
        self._tls = tls
        self._stopping = asyncio.Event()
        self._stops: set[asyncio.Task[None]] = set()
        self._server = grpc.aio.server(options=_options(config))
        guard = CallGuard(config, router.validator.turns)
        inference = {
            name: guard.handler(method)
            for name, method in InferenceService(router).methods().items()
        }
        health = {
            name: guard.handler(method, keyless=True)
            for name, method in HealthService(router, self._stopping).methods().items()
        }
        reflection = {
            name: guard.handler(method)
            for name, method in ReflectionService(router).methods().items()
        }
        services = {
            SERVICE: inference,
            HEALTH: health,
            REFLECTION: reflection,
            REFLECTION_V1: reflection,
        }
        self._server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(name, methods)
                for name, methods in services.items()
            ]
        )

    async def start(self) -> str:
        """Listen, and return the address as host:port. Raises ConfigError if the port cannot be
        used."""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        wanted = self._config.grpc_port
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(f"{host}:{wanted}")
            else:
                credentials = self._tls.server_credentials()
                port = self._server.add_secure_port(f"{host}:{wanted}", credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"port {wanted} on {self._config.host} cannot be used for gRPC: stop what listens "
                "there, or set another port with router.grpc_port"
            ) from error
        await self._server.start()
        return f"{host}:{port}"

    def stop(self, grace_s: float) -> asyncio.Task[None]:
        """Refuse new calls, and let open ones end within `grace_s`. The task ends with the last of
        them. If called again, the grace that ends first counts."""
        self._stopping.set()
        stop = asyncio.create_task(self._server.stop(grace_s), name="grpc stop")
        self._stops.add(stop)
        stop.add_done_callback(self._stops.discard)
        return stop


def _options(config: RouterConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_body_bytes),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # none: no message grows when read
        ("grpc.max_metadata_size", HEADER_BYTES),
        ("grpc.absolute_max_metadata_size", HEADER_BYTES),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        # Of one connection: more than are served, so that a surplus call gets a status.
        ("grpc.max_concurrent_streams", config.max_connections + MAX_KEYLESS_CALLS),
        ("grpc.max_connection_idle_ms", IDLE_TIMEOUT_S * 1000),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_S * 1000),
        ("grpc.keepalive_time_ms", PING_INTERVAL_S * 1000),
        (
            "grpc.keepalive_timeout_ms",
            PING_TIMEOUT_S * 1000,
        ),  # of the peer's kernel; the next one of the peer
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_CLIENT_PING_INTERVAL_S * 1000),
    ]
