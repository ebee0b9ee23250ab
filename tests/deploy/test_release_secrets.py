"""The hook of the chart: Secrets through an API over TLS, created once, replaced near their end."""

from __future__ import annotations

import json
import ssl
import threading
from base64 import b64decode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from baton.deploy.cli.main import main
from baton.deploy.host.authority import Authority
from baton.deploy.host.kubernetes_api import api_server
from baton.deploy.host.release_secrets import LIFE, create_certificates, create_credentials
from baton.deploy.host.secrets_api import Secret, SecretsApi
from baton.runtime.errors import BatonError, ConfigError, Unavailable
from tests.support.json_values import JsonObject

TOKEN = "account-token"
SERVER = "chat-baton-worker.llm"
NAMES = [f"chat-baton-{pod}-tls" for pod in ("router", "prefill", "decode")]
REDIS = ("chat-baton-redis.llm", "chat-baton-ray-redis.llm")


class FakeApi(HTTPServer):
    """The part of the API server that keeps Secrets of the namespace llm."""

    secrets: dict[str, JsonObject]
    version = 0
    refuses = 0


class Handler(BaseHTTPRequestHandler):
    server: FakeApi

    def do_GET(self) -> None:
        found = self.server.secrets.get(self._name())
        self._send(200 if found else 404, found or {"message": "not found"})

    def do_POST(self) -> None:
        body = self._body()
        taken = body["metadata"]["name"] in self.server.secrets
        self._send(409 if taken else 201, body if taken else self._stored(body))

    def do_PUT(self) -> None:
        body = self._body()
        old = self.server.secrets[self._name()]["metadata"]["resourceVersion"]
        same = body["metadata"]["resourceVersion"] == old
        self._send(200 if same else 409, self._stored(body) if same else {})

    def _name(self) -> str:
        prefix = "/api/v1/namespaces/llm/secrets/"
        assert self.path.startswith(prefix)
        return self.path.removeprefix(prefix)

    def _body(self) -> JsonObject:
        return dict(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _stored(self, body: JsonObject) -> JsonObject:
        self.server.version += 1
        body["metadata"]["resourceVersion"] = str(self.server.version)
        self.server.secrets[body["metadata"]["name"]] = body
        return body

    def _send(self, status: int, body: JsonObject) -> None:
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            status, body = 401, {"message": "Unauthorized"}
        elif self.server.refuses:
            status, body = self.server.refuses, {"message": "the account may not do this"}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def account(tmp_path: Path) -> Path:
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    (folder / "token").write_text(f"{TOKEN}\n")
    return folder


@pytest.fixture
def server(tmp_path: Path, account: Path) -> Iterator[FakeApi]:
    authority = Authority(tmp_path / "tls")
    files = authority.issue("api", "127.0.0.1")
    (account / "ca.crt").write_text(files.authority.read_text())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    fake = FakeApi(("127.0.0.1", 0), Handler)
    fake.secrets = {}
    fake.socket = context.wrap_socket(fake.socket, server_side=True)
    thread = threading.Thread(target=fake.serve_forever)
    thread.start()
    yield fake
    fake.shutdown()
    thread.join()
    fake.server_close()


@pytest.fixture
def api(server: FakeApi, account: Path) -> SecretsApi:
    return SecretsApi("llm", "127.0.0.1", server.server_port, account)


def certificate_of(api: SecretsApi, name: str) -> x509.Certificate:
    found = api.read(name)
    assert found is not None
    return x509.load_pem_x509_certificate(found.data["tls.crt"])


def test_credentials_are_created_once(api: SecretsApi, server: FakeApi) -> None:
    assert create_credentials(api, "chat-baton")
    first = dict(server.secrets["chat-baton-secrets"]["data"])
    assert set(first) == {"token", "api-keys", "redis-password"}
    assert all(len(b64decode(value)) >= 43 for value in first.values())
    assert len(set(first.values())) == 3
    assert not create_credentials(api, "chat-baton")
    assert server.secrets["chat-baton-secrets"]["data"] == first


def test_certificates_are_of_one_authority_and_stay(api: SecretsApi, server: FakeApi) -> None:
    assert create_certificates(api, "chat-baton", SERVER) == NAMES
    authority = certificate_of(api, "chat-baton-authority-key")
    for name in NAMES:
        certificate = certificate_of(api, name)
        certificate.verify_directly_issued_by(authority)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        named = SERVER in names.value.get_values_for_type(x509.DNSName)
        assert named == ("router" not in name)
        assert set(server.secrets[name]["data"]) == {"tls.crt", "tls.key", "ca.crt"}
        assert server.secrets[name]["type"] == "kubernetes.io/tls"
    before = json.dumps(server.secrets)
    assert create_certificates(api, "chat-baton", SERVER) == []
    assert json.dumps(server.secrets) == before


def test_certificates_are_replaced_after_half_their_life(api: SecretsApi) -> None:
    create_certificates(api, "chat-baton", SERVER)
    first = [certificate_of(api, name).serial_number for name in NAMES]
    later = datetime.now(UTC) + LIFE / 2 + timedelta(days=2)
    assert create_certificates(api, "chat-baton", SERVER, lambda: later) == NAMES
    assert not set(first) & {certificate_of(api, name).serial_number for name in NAMES}


def test_redis_has_a_certificate_of_its_names_where_it_is_ours(api: SecretsApi) -> None:
    create_certificates(api, "chat-baton", SERVER)
    assert create_certificates(api, "chat-baton", SERVER, redis_names=REDIS[:1]) == [
        "chat-baton-redis-tls"
    ]
    assert create_certificates(api, "chat-baton", SERVER, redis_names=REDIS) == [
        "chat-baton-redis-tls"
    ]
    certificate = certificate_of(api, "chat-baton-redis-tls")
    certificate.verify_directly_issued_by(certificate_of(api, "chat-baton-authority-key"))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(REDIS) <= set(names.get_values_for_type(x509.DNSName))
    uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(uses) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert create_certificates(api, "chat-baton", SERVER, redis_names=REDIS) == []


def test_a_name_that_no_certificate_bears_creates_nothing(api: SecretsApi, server: FakeApi) -> None:
    with pytest.raises(ConfigError, match="--redis is 'r\u00e4dis'"):
        create_certificates(api, "chat-baton", SERVER, redis_names=["r\u00e4dis"])
    assert server.secrets == {}


@pytest.mark.parametrize("name", ["other-worker.llm"])
def test_another_name_needs_other_certificates_of_workers(api: SecretsApi, name: str) -> None:
    create_certificates(api, "chat-baton", SERVER)
    assert create_certificates(api, "chat-baton", name) == NAMES[1:]


def test_a_foreign_authority_is_not_trusted(api: SecretsApi, server: FakeApi) -> None:
    create_certificates(api, "chat-baton", SERVER)
    del server.secrets["chat-baton-authority-key"]
    assert create_certificates(api, "chat-baton", SERVER) == NAMES


def test_an_unreadable_authority_is_named(api: SecretsApi, server: FakeApi) -> None:
    api.create(Secret("chat-baton-authority-key", {"tls.crt": b"x", "tls.key": b"y"}))
    with pytest.raises(BatonError, match="chat-baton-authority-key holds no authority"):
        create_certificates(api, "chat-baton", SERVER)
    assert set(server.secrets) == {"chat-baton-authority-key"}


def test_a_secret_that_another_process_changed_stays(
    api: SecretsApi, server: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_certificates(api, "chat-baton", SERVER)
    monkeypatch.setattr(SecretsApi, "replace", lambda *_: False)
    later = datetime.now(UTC) + LIFE
    with pytest.raises(BatonError, match="another process changed the Secret"):
        create_certificates(api, "chat-baton", SERVER, lambda: later)


def test_a_refusal_has_the_api_s_words(api: SecretsApi, server: FakeApi) -> None:
    server.refuses = 403
    with pytest.raises(BatonError, match="with 403: the account may not do this"):
        create_credentials(api, "chat-baton")


def test_outside_a_pod_the_remedy_is_named(tmp_path: Path, account: Path) -> None:
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST"):
        api_server({})
    with pytest.raises(ConfigError, match="automountServiceAccountToken"):
        SecretsApi("llm", "127.0.0.1", 1, tmp_path / "none")


def test_an_api_that_does_not_answer(api: SecretsApi, server: FakeApi, account: Path) -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        SecretsApi("llm", "127.0.0.1", 1, account).read("x")


def test_the_command_of_the_hook(
    server: FakeApi,
    account: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(SecretsApi.__init__, "__defaults__", (account,))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_port))
    command = ["release", "secrets", "--namespace=llm", "--name=chat-baton", "--credentials"]
    redis = [f"--redis={name}" for name in REDIS]
    assert main([*command, *redis]) != 0
    assert "--redis is given without --certificates" in capsys.readouterr().err
    assert main([*command, "--ray"]) != 0
    assert "--ray is given without --certificates" in capsys.readouterr().err
    assert main([*command, f"--certificates={SERVER}", *redis, "--ray"]) == 0
    made = {"chat-baton-secrets", "chat-baton-authority-key", "chat-baton-redis-tls", *NAMES}
    assert set(server.secrets) == {*made, "chat-baton-ray-tls"}
    printed = capsys.readouterr().out
    assert "chat-baton-secrets: created" in printed
    secret = b64decode(server.secrets["chat-baton-secrets"]["data"]["token"]).decode()
    assert secret not in printed
