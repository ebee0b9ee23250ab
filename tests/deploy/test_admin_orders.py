"""Orders through the admin port: whose are taken, and what is said of one that waits."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from baton.deploy.processes import admin
from baton.deploy.processes.admin import AdminServer


def no_books(check: bool) -> dict[str, Any]:
    return {}


def give(address: str, line: str, *given: str) -> tuple[int, bytes]:
    """Status and body of the answer to "METHOD path" with these headers."""
    method, path = line.split()
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request(method, path, headers=dict(each.split(":", 1) for each in given))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@asynccontextmanager
async def with_orders() -> AsyncIterator[tuple[str, list[str]]]:
    given: list[str] = []
    orders = {path: partial(given.append, path) for path in ("/drain", "/role/decode")}
    server = AdminServer(
        "127.0.0.1", 0, no_books, orders=orders, proof=lambda path: f"proof-of-{path}"
    )
    try:
        yield await server.start(), given
    finally:
        await server.stop()


async def test_an_order_with_its_proof_is_carried_out() -> None:
    async with with_orders() as (address, given):
        header = "authorization:  bearer proof-of-/drain "
        assert await asyncio.to_thread(give, address, "POST /drain", header) == (202, b"taken\n")
    assert given == ["/drain"]


async def test_an_order_that_the_loop_has_no_time_for_is_accepted_and_said_not_to_be_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is carried out as soon as the loop turns, so it is not called unavailable."""
    monkeypatch.setattr(admin, "ANSWER_S", 0.2)
    async with with_orders() as (address, given):
        told: list[tuple[int, bytes]] = []

        def order() -> None:
            told.append(give(address, "POST /drain", "Authorization: Bearer proof-of-/drain"))

        with capture_logs() as logs:
            for _ in range(2):  # who asks again hears the same, and it is one order
                beside = threading.Thread(target=order)
                beside.start()
                beside.join(30)  # this loop, which is the worker's, stands still
        assert given == [] and told == [(202, admin.TO_BE_TAKEN)] * 2
        assert [line["order"] for line in logs if "waits" in line["event"]] == ["/drain"] * 2
        async with asyncio.timeout(20):
            while not given:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert given == ["/drain"]


@pytest.mark.parametrize(
    ("line", "given", "status"),
    [
        ("POST /drain", "", 401),
        ("POST /drain", "Authorization: Bearer ", 401),
        ("POST /drain", "Authorization: Bearer proof-of-/drain2", 401),
        ("POST /drain", "Authorization: Bearer proof-of-/role/decode", 401),
        ("POST /drain", "Authorization: Basic proof-of-/drain", 401),
        ("POST /drain", "X-Authorization: Bearer proof-of-/drain", 401),
        ("GET /drain", "Authorization: Bearer proof-of-/drain", 405),
        ("POST /other", "Authorization: Bearer proof-of-/other", 405),
    ],
)
async def test_an_order_without_its_proof_or_by_reading_is_none(
    line: str, given: str, status: int
) -> None:
    async with with_orders() as (address, carried_out):
        headers = [given] if given else []
        assert (await asyncio.to_thread(give, address, line, *headers))[0] == status
    assert carried_out == []


@pytest.mark.parametrize("options", [{}, {"proof": lambda _: ""}])
async def test_without_proofs_a_port_takes_no_order(options: Any) -> None:
    carried_out: list[str] = []
    orders = {"/drain": lambda: carried_out.append("drain")}
    server = AdminServer("127.0.0.1", 0, no_books, orders=orders, **options)
    try:
        address = await server.start()
        header = "Authorization: Bearer "
        assert (await asyncio.to_thread(give, address, "POST /drain", header))[0] == 401
    finally:
        await server.stop()
    assert carried_out == []
