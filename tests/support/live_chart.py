"""The chart, rendered as `helm upgrade` renders it: templates look objects of the cluster up."""

from __future__ import annotations

from pathlib import Path

import helm_python
import yaml

from tests.support.chart import Release, Values, chart, release_of
from tests.support.pods.secrets_server import SecretsServer


def upgraded(server: SecretsServer, values: Values, folder: Path) -> Release:
    """Render with the rights of the account `user` of this server's. Raises helm_python.HelmError
    with Helm's words."""
    account = server.account_files("user")
    authority = folder / "ca.crt"
    authority.write_bytes(account["ca.crt"])
    config = helm_python.Config(
        kubeconfig_content=yaml.safe_dump({"apiVersion": "v1", "kind": "Config"}),
        kube_apiserver=f"https://127.0.0.1:{server.port}",
        kube_token=account["token"].decode(),
        kube_ca_file=authority,
    )
    found = config.render(chart(), values, name="chat", namespace="llm", is_upgrade=True)
    return release_of(found)
