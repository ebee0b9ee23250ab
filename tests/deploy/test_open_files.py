"""A process takes as many open files as the system lets it have."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from baton.deploy.host.open_files import MOST_FILES, raise_limit


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_to_the_hard_one(limits: tuple[int, int]) -> None:
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    assert raise_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert raise_limit() == (MOST_FILES if hard == resource.RLIM_INFINITY else hard)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard


def test_a_limit_that_is_none_stays_none(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: endless)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: pytest.fail("nothing to raise"))
    assert raise_limit() == resource.RLIM_INFINITY
