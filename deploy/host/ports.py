"""Whether a port can be listened on, asked before anything starts, and how an address is
written. Keeps no state."""

from __future__ import annotations

import socket

from baton.runtime.config import NO_GRPC, RouterConfig
from baton.runtime.errors import ConfigError


def check_port(router: RouterConfig) -> None:
    """Raise ConfigError where the router could not listen for HTTP."""
    _check(router.host, router.port, "--port")


def check_grpc_port(router: RouterConfig) -> None:
    """Raise ConfigError where it could not listen for gRPC, if it is to."""
    if router.grpc_port != NO_GRPC:
        _check(router.host, router.grpc_port, "--grpc-port")


def _check(host: str, port: int, option: str) -> None:
    try:
        bind(host, port)
    except socket.gaierror as error:
        raise ConfigError(
            f"--host {host}: {error.strerror or error}; give a name or an address of this machine"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"port {port} on {host} cannot be used ({error.strerror or error}): "
            f"stop what listens there, or choose another {option}"
        ) from error


def bind(host: str, port: int) -> None:
    """Take a port as a server would, and let go of it. Raises OSError; its gaierror for a host
    that is none."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def address_of(host: str, port: int) -> str:
    """host:port; an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
