"""The chart, rendered as `helm upgrade` and `helm install` render it: templates look objects of the
cluster up, or ask which APIs it has."""

from __future__ import annotations

from pathlib import Path

import helm_python
import yaml

from tests.support.chart import Release, Values, chart, release_of
from tests.support.pods.secrets_server import SecretsServer


def upgraded(server: SecretsServer, values: Values, folder: Path) -> Release:
    """Render with the rights of the account `user` of this server's. Raises helm_python.HelmError
    with Helm's words."""
    found = _config(server, folder).render(
        chart(), values, name="chat", namespace="llm", is_upgrade=True
    )
    return release_of(found)


def try_install(server: SecretsServer, values: Values, folder: Path) -> str:
    """Return why Helm would not install the chart: it always has a reason, since this server has no
    schema of objects, which Helm asks for once the templates are rendered."""
    try:
        _config(server, folder).install(chart(), "chat", values, namespace="llm", dry_run="server")
    except helm_python.HelmError as error:
        return str(error)
    raise AssertionError("this server has a schema")


def _config(server: SecretsServer, folder: Path) -> helm_python.Config:
    account = server.account_files("user")
    authority = folder / "ca.crt"
    authority.write_bytes(account["ca.crt"])
    return helm_python.Config(
        kubeconfig_content=yaml.safe_dump({"apiVersion": "v1", "kind": "Config"}),
        kube_apiserver=f"https://127.0.0.1:{server.port}",
        kube_token=account["token"].decode(),
        kube_ca_file=authority,
    )
