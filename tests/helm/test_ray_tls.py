"""Ray's own gRPC uses TLS in pods of a RayCluster, as is rendered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509

from baton.deploy.cli.main import main, parser
from baton.deploy.host.release_secrets import create_certificates
from baton.deploy.host.secrets_api import Secret
from tests.support.chart import Document, Release, Values, example, merged, render

DEMO = merged(example("cpu-demo"), {"orchestrator": "kuberay"})
GIVEN = {name: name[:3] for name in ("router", "prefill", "decode", "redis", "ray")}
MODES: dict[str, Values] = {
    "hook": {"tls": {"mode": "hook"}},
    "certManager": {"tls": {"mode": "certManager"}},
    "corporate": {"tls": {"mode": "certManager", "issuer": {"name": "c", "kind": "ClusterIssuer"}}},
    "existing": {"tls": {"mode": "existing", "existingSecrets": GIVEN}},
    "models": {"models": {"code": {"model": {"repository": "owner/code"}}}},
}
USED = {
    "RAY_USE_TLS": "1",
    "RAY_TLS_CA_CERT": "/etc/baton/ray/tls/authority.pem",
    "RAY_TLS_SERVER_CERT": "/etc/baton/ray/tls/node.pem",
    "RAY_TLS_SERVER_KEY": "/etc/baton/ray/tls/node.key",
}
POD, OTHER = "10.0.0.7", "10.0.0.8"


def templates(release: Release) -> Iterator[Document]:
    (cluster,) = release.of_kind("RayCluster")
    for group in [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]:
        yield group["template"]["spec"]


def variables(container: Document) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container.get("env", [])}


def mounts(container: Document) -> dict[str, bool]:
    return {each["name"]: each.get("readOnly", False) for each in container["volumeMounts"]}


@pytest.mark.parametrize("mode", MODES)
def test_each_process_of_ray_has_its_pods_certificate(mode: str) -> None:
    found = [*templates(render(merged(DEMO, MODES[mode])))]
    assert len(found) == (5 if mode == "models" else 3)
    for number, pod in enumerate(found):
        issuing = pod["initContainers"][0]
        asked = parser().parse_args([*issuing["command"][1:], *issuing["args"]])
        called = [] if number else ["chat-baton-ray-head-svc.llm.svc.cluster.local"]  # the head
        assert (asked.host, asked.name) == (["$(POD_IP)", "127.0.0.1", *called], "node")
        assert variables(issuing).keys() == {"POD_IP"}
        for container in pod["containers"]:  # `ray start`, drivers
            assert variables(container).items() >= USED.items()
            assert mounts(container)["ray-tls"] is True


@pytest.mark.parametrize("mode", MODES)
def test_only_the_init_container_has_the_authoritys_key(mode: str) -> None:
    release = render(merged(DEMO, MODES[mode]))
    secret = GIVEN["ray"] if mode == "existing" else "chat-baton-ray-tls"
    for _, pod in release.pods():
        named = {
            each["name"]
            for each in pod.get("volumes", [])
            if each.get("secret", {}).get("secretName") == secret
        }
        having = [
            container["name"]
            for container in [*pod.get("initContainers", []), *pod["containers"]]
            if named & mounts(container).keys()
        ]
        assert having == (["ray-certificate"] if named else [])
    managed = [each["spec"] for each in release.of_kind("Certificate") if each["spec"].get("isCA")]
    rays = [each for each in managed if each["secretName"] == secret]
    assert len(rays) == (mode in ("certManager", "corporate"))
    for spec in rays:  # a user's issuer may sign no authority
        assert spec["issuerRef"] == {"name": "chat-baton-self-signed", "kind": "Issuer"}
        assert release.named("Issuer", "baton-self-signed")["spec"] == {"selfSigned": {}}
        assert spec["privateKey"]["rotationPolicy"] == "Never"


def test_without_tls_no_certificate_is_made_for_ray() -> None:
    for pod in templates(render(merged(DEMO, {"tls": {"mode": "off"}}))):
        assert pod.get("initContainers", []) == []
        for container in pod["containers"]:
            assert not USED.keys() & variables(container).keys()


class Store:
    """Secrets as the hook leaves them."""

    def __init__(self) -> None:
        self.secrets: dict[str, Secret] = {}

    def read(self, name: str) -> Secret | None:
        return self.secrets.get(name)

    def create(self, secret: Secret) -> bool:
        return self.secrets.setdefault(secret.name, secret) is secret

    def replace(self, secret: Secret) -> bool:
        self.secrets[secret.name] = secret
        return True


def test_a_pods_certificate_is_of_the_hooks_authority(tmp_path: Path) -> None:
    store = Store()
    assert "r-ray-tls" in create_certificates(store, "r", "worker.llm", ray=True)
    assert create_certificates(store, "r", "worker.llm", ray=True) == []
    assert create_certificates(Store(), "r", "worker.llm") == [
        f"r-{role}-tls" for role in ("router", "prefill", "decode")
    ]
    data = store.secrets["r-ray-tls"].data
    assert data["tls.key"] != store.secrets["r-authority-key"].data["tls.key"]
    folder = tmp_path / "ray-authority"
    folder.mkdir()
    pod = next(templates(render(DEMO)))
    (volume,) = [each for each in pod["volumes"] if each["name"] == "ray-authority"]
    for item in volume["secret"]["items"]:
        (folder / item["path"]).write_bytes(data[item["key"]])
    issuing = pod["initContainers"][0]
    given = [
        word.replace("/etc/baton", str(tmp_path)).replace("$(POD_IP)", POD)
        for word in [*issuing["command"][1:], *issuing["args"]]
    ]
    assert main(given) == 0
    (written,) = (tmp_path / "ray" / "tls").glob("node.pem")
    certificate = x509.load_pem_x509_certificate(written.read_bytes())
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(data["tls.crt"]))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = [str(each) for each in names.get_values_for_type(x509.IPAddress)]
    assert POD in addresses and OTHER not in addresses
    assert (tmp_path / "ray" / "tls" / "authority.pem").read_bytes() == data["tls.crt"]
