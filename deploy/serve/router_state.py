"""The addresses of an instance's router, and which workers it has. Keeps no state."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

from baton.deploy.host.instance import (
    admin_address_file,
    grpc_address_file,
    router_address_file,
)
from baton.deploy.host.router_trust import connect, url_of


def router_address(folder: Path) -> str | None:
    """host:port of the router, behind https:// if it speaks TLS; known once it listens."""
    try:
        return router_address_file(folder).read_text().strip()
    except FileNotFoundError:
        return None


def grpc_address(folder: Path) -> str | None:
    """host:port where the router serves gRPC, if it does; known once it listens."""
    try:
        return grpc_address_file(router_address_file(folder)).read_text().strip()
    except FileNotFoundError:
        return None


def admin_address(folder: Path) -> str | None:
    """Same as `router_address` for the router's admin port, if it has one."""
    try:
        return admin_address_file(router_address_file(folder)).read_text().strip()
    except FileNotFoundError:
        return None


def linked_workers(address: str) -> dict[str, int]:
    """How many workers of each role the router at `address` is linked to; none if it is not
    ready or does not answer within two seconds."""
    connection = connect(url_of(address), 2.0)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        body = answer.read()
        return dict(json.loads(body)["workers"]) if answer.status == 200 else {}
    except (OSError, http.client.HTTPException):
        return {}
    finally:
        connection.close()
