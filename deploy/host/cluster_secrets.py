"""The secrets that all processes of a cluster share, from the environment.

To replace the token without a pause, restart all processes three times: with the new token in
BATON_TOKEN_ALSO, with the two exchanged, and without the old one; set BATON_IDENTITY_SECRET to
the old token throughout, or workers of two steps cannot read each other's KV. Holds no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.deploy.host.instance import TOKEN_KEY
from baton.runtime.errors import ConfigError

ALSO_KEY = "BATON_TOKEN_ALSO"
IDENTITY_KEY = "BATON_IDENTITY_SECRET"


@dataclass(frozen=True, slots=True)
class ClusterSecrets:
    """`accepted` are the tokens that other processes may send; this one sends the first.
    `identity` keys the identities of KV blocks and admits no process."""

    accepted: tuple[str, ...]
    identity: str

    @property
    def token(self) -> str:
        """The token that this process sends and signs with."""
        return self.accepted[0]


def read_secrets(environ: Mapping[str, str]) -> ClusterSecrets:
    """Return the secrets. Raises ConfigError if BATON_TOKEN is not set."""
    token, also = environ.get(TOKEN_KEY, ""), environ.get(ALSO_KEY, "")
    if not token:
        raise ConfigError(
            "BATON_TOKEN is not set: set it to one secret for all processes of the cluster"
        )
    accepted = (token, also) if also else (token,)
    return ClusterSecrets(accepted, environ.get(IDENTITY_KEY) or token)
