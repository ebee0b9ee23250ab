"""The place that a worker states."""

from __future__ import annotations

import pytest

from baton.deploy.host.own_topology import VARIABLE, own_topology
from baton.kv_transfer.peers.host_id import host_id
from baton.runtime.errors import ConfigError


def test_labels_come_before_the_host() -> None:
    assert own_topology({VARIABLE: "zone-a/rack-7"}, "h1") == "zone-a/rack-7/h1"
    assert own_topology({}, "h1") == "h1"
    assert own_topology({VARIABLE: ""}, "h1") == "h1"
    assert own_topology({}) == host_id()


def test_a_host_that_is_not_known_has_no_place() -> None:
    assert own_topology({VARIABLE: "zone-a"}, "") is None


@pytest.mark.parametrize("given", ["a//b", "/", "a/", "a/b/c/d", "a" * 64, "a\nb"])
def test_labels_that_cannot_be_compared_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="separated by '/', the outermost first"):
        own_topology({VARIABLE: given}, "h1")
