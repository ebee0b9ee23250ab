"""The router's gRPC front end: its server, bounded, on the HTTP front end's host.

    front.start() ─▶ address ... front.leave(grace): nobody new, open calls may end

A message is as large as an HTTP body may be, and comes uncompressed; connections are as many as
HTTP's, and idle ones are closed. TLS is a proxy's, as for HTTP. Knows no method's meaning.
"""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from baton.router.client_access.router import Router
from baton.router.grpc_frontend.call import OPEN_CALLS, Doorkeeper
from baton.router.grpc_frontend.health import HEALTH, Health
from baton.router.grpc_frontend.inference import SERVICE, Inference
from baton.router.grpc_frontend.reflection import REFLECTION, REFLECTION_V1, Reflection
from baton.runtime.config import RouterConfig
from baton.runtime.errors import ConfigError

HEADER_BYTES = 16 << 10
IDLE_S = 300
HANDSHAKE_S = 20
PING_S = 30  # a client that does not answer one in PONG_S is gone
PONG_S = 10
LEAST_PING_S = 10  # between two of a client's own; it is sent away for more


class GrpcFront:
    """`address` is host:port once it has started."""

    def __init__(self, router: Router) -> None:
        config = router.config
        self._config = config
        self._leaving = asyncio.Event()
        self._stops: set[asyncio.Task[None]] = set()
        self._server = grpc.aio.server(options=_options(config))
        door = Doorkeeper(config, router.validator.turns)
        inference = {
            name: door.handler(method) for name, method in Inference(router).methods().items()
        }
        health = {
            name: door.handler(method, everyone=True)
            for name, method in Health(router, self._leaving).methods().items()
        }
        reflection = {
            name: door.handler(method) for name, method in Reflection(router).methods().items()
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
        self.address = ""

    async def start(self) -> None:
        """Raises ConfigError if the port cannot be used."""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        asked = self._config.grpc_port
        try:
            port = self._server.add_insecure_port(f"{host}:{asked}")
        except RuntimeError as error:
            raise ConfigError(
                f"port {asked} on {self._config.host} cannot be used for gRPC: stop what listens "
                "there, or give another with router.grpc_port"
            ) from error
        await self._server.start()
        self.address = f"{host}:{port}"

    def leave(self, grace_s: float) -> asyncio.Task[None]:
        """No call is taken any more; open ones may end for `grace_s`. The task ends with the
        last of them. Told again, the grace that ends first counts."""
        self._leaving.set()
        stop = asyncio.create_task(self._server.stop(grace_s), name="grpc leaves")
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
        # of one connection: more than are served, so that one too many hears of it
        ("grpc.max_concurrent_streams", config.max_connections + OPEN_CALLS),
        ("grpc.max_connection_idle_ms", IDLE_S * 1000),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
        ("grpc.keepalive_time_ms", PING_S * 1000),
        ("grpc.keepalive_timeout_ms", PONG_S * 1000),  # for the peer's kernel, and for itself:
        ("grpc.http2.ping_timeout_ms", PONG_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", LEAST_PING_S * 1000),
    ]
