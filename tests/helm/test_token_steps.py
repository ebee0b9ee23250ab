"""The token in a release's Secret: all pods take it, and it can be replaced without a pause."""

from __future__ import annotations

import pytest

from baton.deploy.host.cluster_secrets import ClusterSecrets, read_secrets
from baton.deploy.host.release_secrets import create_credentials
from baton.deploy.host.secrets_api import Secret
from tests.support.chart import Document, Values, example, merged, render

ROLES: Values = {"autoscaling": {"mode": "baton", "baton": {"ttftSeconds": 2}}}
FORMS: dict[str, Values] = {"plain": {}, "roles": ROLES, "kuberay": {"orchestrator": "kuberay"}}
NEEDING = {"router", "worker", "controller", "fleet"}  # containers whose process is a member
STEPS = (  # docs/security.md, "Two tokens"
    {"token": "old"},
    {"token": "old", "token-also": "new", "identity-secret": "old"},
    {"token": "new", "token-also": "old", "identity-secret": "old"},
    {"token": "new", "identity-secret": "old"},
)


def environment_of(container: Document, data: dict[str, str]) -> dict[str, str]:
    """Return the variables that a container gets where the Secret has this data. Raises KeyError
    where Kubernetes would not start it."""
    found = {}
    for each in container["env"]:
        reference = each.get("valueFrom", {}).get("secretKeyRef")
        if reference is None or reference["key"] not in STEPS[1]:
            continue
        assert reference["name"] == "chat-baton-secrets"
        if reference["key"] in data or not reference.get("optional"):
            found[each["name"]] = data[reference["key"]]
    return found


def secrets_at(form: str, data: dict[str, str]) -> set[ClusterSecrets]:
    """Return the secrets that the processes of a release have."""
    names, found = set(), set()
    for _, pod in render(merged(example("cpu-demo"), FORMS[form])).pods():
        for container in pod["containers"]:
            name = container["name"]
            if name in NEEDING:
                names.add(name)
                found.add(read_secrets(environment_of(container, data)))
    assert {"router", "worker"} <= names
    return found


@pytest.mark.parametrize("form", FORMS)
def test_pods_of_two_steps_accept_each_other(form: str) -> None:
    for before, after in zip(STEPS, STEPS[1:], strict=False):
        (old,), (new,) = secrets_at(form, before), secrets_at(form, after)
        assert old.token in new.accepted and new.token in old.accepted
        assert old.identity == new.identity


class Store:
    """The Secrets of a namespace."""

    def __init__(self) -> None:
        self.made: list[Secret] = []

    def read(self, name: str) -> Secret | None:
        return next((each for each in self.made if each.name == name), None)

    def create(self, secret: Secret) -> bool:
        self.made.append(secret)
        return True

    def replace(self, secret: Secret) -> bool:
        raise AssertionError(f"{secret.name} is replaced")


def test_what_the_hook_creates_is_enough_for_each_pod() -> None:
    store = Store()
    assert create_credentials(store, "chat-baton")
    (secret,) = store.made
    data = {name: value.decode() for name, value in secret.data.items()}
    (found,) = secrets_at("plain", data)
    assert found.accepted == (data["token"],) and found.identity == data["token"]
