"""A port that cannot be listened on is reported with the option to change."""

from __future__ import annotations

import socket

import pytest

from baton.deploy.host.ports import address_of, bind, check_grpc_port, check_port
from baton.runtime.config import RouterConfig
from baton.runtime.errors import ConfigError


def test_an_unknown_host_is_not_reported_as_a_port_in_use() -> None:
    with pytest.raises(ConfigError, match=r"--host no\.such\.host\.invalid.*give a name"):
        check_port(RouterConfig(host="no.such.host.invalid"))


def test_a_port_that_is_taken_and_one_that_is_free_again() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127\.0\.0\.1.*another --port"):
            check_port(RouterConfig(port=port))
        with pytest.raises(OSError, match="in use"):
            bind("127.0.0.1", port)
    check_port(RouterConfig(port=port))
    bind("127.0.0.1", port)  # what was tried is let go of


def test_a_grpc_port_is_checked_where_there_is_to_be_one() -> None:
    check_grpc_port(RouterConfig())
    check_grpc_port(RouterConfig(grpc_port=0))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on .*another --grpc-port"):
            check_grpc_port(RouterConfig(grpc_port=port))
        check_port(RouterConfig(port=0, grpc_port=port))  # that of HTTP alone
    check_grpc_port(RouterConfig(grpc_port=port))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"on 192\.0\.2\.1 cannot be used"):
        check_port(RouterConfig(host="192.0.2.1"))  # of a network for examples alone


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert address_of("127.0.0.1", 80) == "127.0.0.1:80"
    assert address_of("host.example", 80) == "host.example:80"
    assert address_of("fd00::1", 80) == "[fd00::1]:80"
