"""The error tree: what a client sees, what may be retried, and the way over the wire."""

from __future__ import annotations

import re

import grpc
import pytest

from baton.runtime import errors, links
from baton.runtime.errors import BatonError, by_code


def tree(root: type[BatonError]) -> list[type[BatonError]]:
    return [root, *(below for child in root.__subclasses__() for below in tree(child))]


OURS = [found for found in tree(BatonError) if found.__module__.startswith("baton.")]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_error_comes_back_from_its_code(kind: type[BatonError]) -> None:
    error = kind("what happened")
    back = by_code(error.code, str(error))
    assert type(back) is kind
    assert str(back) == "what happened"


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_error_has_true_statuses(kind: type[BatonError]) -> None:
    assert 400 <= kind.http_status < 600
    assert getattr(grpc.StatusCode, kind.grpc_code) is not grpc.StatusCode.OK
    if kind.http_status < 500 and kind is not errors.RateLimited:
        assert not kind.retryable  # the client's own doing does not get better by itself


def test_a_class_of_another_module_is_known_too() -> None:
    assert isinstance(by_code("LinkClosed", "x"), links.LinkClosed)


def test_an_unknown_code_keeps_its_name() -> None:
    error = by_code("NewFangled", "from a newer peer")
    assert type(error) is BatonError
    assert str(error) == "NewFangled: from a newer peer"


def test_the_drawing_shows_every_class_with_its_status_and_place() -> None:
    drawn: dict[str, tuple[int, int | None]] = {}
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"    ([│├└─ ]*)(\w+)\s*(\d{3})?", line):
            drawn[found[2]] = (len(found[1]) // 4, int(found[3]) if found[3] else None)

    def check(kind: type[BatonError], depth: int) -> None:
        if kind.__module__ == errors.__name__:
            level, status = drawn[kind.__name__]
            assert level == depth, kind
            assert status in (kind.http_status, None), kind
            for child in kind.__subclasses__():
                check(child, depth + 1)

    check(BatonError, 0)
    assert set(drawn) == {kind.__name__ for kind in OURS if kind.__module__ == errors.__name__}


def test_an_invalid_request_names_its_field() -> None:
    assert errors.InvalidRequest("too hot", "temperature").field == "temperature"
    assert errors.NotFound("no such model").field is None
    assert errors.RateLimited("slow down", 3.5).retry_after_s == 3.5
