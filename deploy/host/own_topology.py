"""The place of a worker among its peers: labels that the operator gives, then its host.

Routers prefer prefill workers that are near (router/fleet/topology.py). Not a setting: it differs
from host to host, and a pod has it from its labels.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.kv_transfer.peers.host_id import host_id
from baton.runtime.errors import ConfigError

VARIABLE = "BATON_TOPOLOGY"
MAX_LABELS = 3  # above the host
MAX_CHARACTERS = 63  # of a label, as in Kubernetes


def own_topology(environ: Mapping[str, str], host: str | None = None) -> str | None:
    """Return the labels of BATON_TOPOLOGY, such as `zone-a/rack-7`, and the host, one level after
    the other; None where the host is not known. Raises ConfigError for labels that cannot be
    compared."""
    host = host_id() if host is None else host
    given = environ.get(VARIABLE, "")
    labels = given.split("/") if given else []
    usable = all(1 <= len(label) <= MAX_CHARACTERS and label.isprintable() for label in labels)
    if len(labels) > MAX_LABELS or not usable:
        raise ConfigError(
            f"{VARIABLE} is {given[:200]!r}: give at most {MAX_LABELS} labels of 1 to "
            f"{MAX_CHARACTERS} characters, separated by '/', the outermost first, such as "
            "zone-a/rack-7"
        )
    return "/".join([*labels, host]) if host else None
