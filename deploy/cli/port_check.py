"""The doctor's check of ports: each is free, or held by a Baton that runs already."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from baton.deploy.cli.doctor import Finding
from baton.deploy.cli.process_list import ports_in_use
from baton.deploy.host.ports import bind, check_grpc_port, check_port
from baton.runtime.config import Config
from baton.runtime.errors import ConfigError
from baton.runtime.serving.secure_connection import PLAIN_TEXT

ANSWER_TIMEOUT_S = 2.0
METRIC_OF_BATON = b"baton_role{"  # in the metrics of each router and worker
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class _Port(NamedTuple):
    name: str
    host: str
    number: int
    check: Callable[[], None]  # raises ConfigError where the port cannot be listened on


def ports(config: Config) -> list[Finding]:
    """Check the router's ports, and a worker's where they are set: 0 lets the system choose. A
    gRPC port is taken for Baton's where the HTTP port of the same process is."""
    router, worker = config.router, config.worker
    http_port = _Port("port", router.host, router.port, partial(check_port, router))
    grpc_port = _Port("gRPC port", router.host, router.grpc_port, partial(check_grpc_port, router))
    found = _of_process(http_port, grpc_port)
    admin, serving = "worker.admin_port", "worker.port"
    check_admin = partial(_check_worker, worker.host, worker.admin_port, admin)
    check_serving = partial(_check_worker, worker.host, worker.port, serving)
    workers = _of_process(
        _Port(admin, worker.host, worker.admin_port, check_admin),
        _Port(serving, worker.host, worker.port, check_serving),
    )
    return found + [each for each in workers if config.worker.admin_port or each.name != admin]


def _of_process(http_port: _Port, grpc_port: _Port) -> list[Finding]:
    first, batons = _finding(http_port)
    if grpc_port.number <= 0:
        return [first]
    return [first, _finding(grpc_port, batons=batons)[0]]


def _finding(port: _Port, *, batons: bool = False) -> tuple[Finding, bool]:
    """Return the finding, and whether the port is Baton's; `batons`: it is if it is taken."""
    address = f"{port.host}:{port.number}"
    try:
        port.check()
    except ConfigError as error:
        if batons or port.number in ports_in_use() or _answers_as_baton(port):
            return Finding(port.name, "ok", f"{address} is in use by baton"), True
        return Finding(port.name, "fail", f"{address} cannot be used", str(error)), False
    return Finding(port.name, "ok", f"{address} is free"), False


def _answers_as_baton(port: _Port) -> bool:
    host = ANY_ADDRESS.get(port.host, port.host)
    connection = http.client.HTTPConnection(host, port.number, timeout=ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics", headers={"Host": "localhost"})  # else 403
        answer = connection.getresponse().read()
        return METRIC_OF_BATON in answer or answer == PLAIN_TEXT
    except (OSError, http.client.HTTPException):
        return False  # another program, or no program at all: the port's own error says which
    finally:
        connection.close()


def _check_worker(host: str, number: int, name: str) -> None:
    try:
        bind(host, number)
    except OSError as error:
        raise ConfigError(
            f"{host}:{number} cannot be used ({error.strerror or error}): stop what listens there, "
            f"or give another {name}, or 0; and for worker.host an address of this machine"
        ) from error
