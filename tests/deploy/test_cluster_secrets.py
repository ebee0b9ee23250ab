"""The secrets of a cluster, and the steps in which its token is replaced."""

from __future__ import annotations

import pytest

from baton.deploy.host.cluster_secrets import ClusterSecrets, read_secrets
from baton.runtime.errors import ConfigError

STEPS = (
    {"BATON_TOKEN": "old"},
    {"BATON_TOKEN": "old", "BATON_TOKEN_ALSO": "new", "BATON_IDENTITY_SECRET": "old"},
    {"BATON_TOKEN": "new", "BATON_TOKEN_ALSO": "old", "BATON_IDENTITY_SECRET": "old"},
    {"BATON_TOKEN": "new", "BATON_IDENTITY_SECRET": "old"},
)


def test_one_token_is_enough() -> None:
    assert read_secrets({"BATON_TOKEN": "t"}) == ClusterSecrets(("t",), "t")


@pytest.mark.parametrize("environ", [{}, {"BATON_TOKEN": ""}, {"BATON_TOKEN_ALSO": "t"}])
def test_a_missing_token_is_named(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="BATON_TOKEN is not set"):
        read_secrets(environ)


@pytest.mark.parametrize("step", range(len(STEPS) - 1))
def test_each_step_of_a_rotation_accepts_the_step_beside_it(step: int) -> None:
    before, after = read_secrets(STEPS[step]), read_secrets(STEPS[step + 1])
    assert before.token in after.accepted and after.token in before.accepted
    assert before.identity == after.identity
