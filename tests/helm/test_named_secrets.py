"""Secrets that the values name: the notes say which are missing, and what command makes each."""

from __future__ import annotations

import json
import shlex
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import helm_python
import pytest

from tests.support.chart import Document, Release, Values, chart, example, merged, render
from tests.support.live_chart import upgraded
from tests.support.pods.secrets_server import SecretsServer

DEMO = example("cpu-demo")
TLS_FILES = {"tls.crt": "CERTIFICATE_FILE", "tls.key": "KEY_FILE", "ca.crt": "AUTHORITY_FILE"}
NAMED: Values = {
    "secrets": {"existing": "own"},
    "image": {"pullSecrets": ["pull"]},
    "tls": {
        "mode": "existing",
        "existingSecrets": {"router": "r", "prefill": "w", "decode": "w", "redis": "s"},
    },
    "router": {"adminPort": 9402, "adminKeySecret": "operator", "tlsSecret": "clients"},
    "ingress": {"enabled": True, "host": "a.example.org", "tlsSecret": "web"},
    "models": {
        "code": {
            "model": {"repository": "owner/code", "tokenSecret": "hub"},
            "router": {"adminKeySecret": "operator-of-code", "tlsSecret": "clients-of-code"},
        }
    },
}
KEYS = {
    "own": ("token", "api-keys", "redis-password"),
    "pull": (),
    "r": tuple(TLS_FILES),
    "w": tuple(TLS_FILES),
    "s": tuple(TLS_FILES),
    "operator": ("admin-key",),
    "operator-of-code": ("admin-key",),
    "web": ("tls.crt", "tls.key"),
    "clients": ("tls.crt", "tls.key"),
    "clients-of-code": ("tls.crt", "tls.key"),
    "hub": ("token",),
}
PURPOSES = {
    "own": "secrets.existing",
    "pull": "image.pullSecrets",
    "r": "tls.existingSecrets.router",
    "w": "tls.existingSecrets.decode, tls.existingSecrets.prefill",
    "s": "tls.existingSecrets.redis",
    "operator": "router.adminKeySecret",
    "operator-of-code": "models.code.router.adminKeySecret",
    "web": "ingress.tlsSecret (no pod needs it)",
    "clients": "router.tlsSecret",
    "clients-of-code": "models.code.router.tlsSecret",
    "hub": "models.code.model.tokenSecret",
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SecretsServer]:
    made = SecretsServer("127.0.0.1", "llm", tmp_path / "api")
    made.roles["user"] = [{"resources": ["secrets"], "verbs": ["get"]}]
    yield made
    made.close()


def named_by(release: Release) -> dict[str, set[str]]:
    """Return the Secrets that pods and routes of a release use, with the keys that they read."""
    found: dict[str, set[str]] = {}

    def visit(node: object) -> None:
        if isinstance(node, list):
            for each in node:
                visit(each)
        if not isinstance(node, dict):
            return
        if isinstance(reference := node.get("secretKeyRef"), dict):
            keys = set() if reference.get("optional") else {reference["key"]}
            found.setdefault(reference["name"], set()).update(keys)
        for each in node.get("imagePullSecrets", ()):
            found.setdefault(each["name"], set())
        if "secretName" in node and not str(node["secretName"]).startswith("chat-baton-"):
            found.setdefault(node["secretName"], set())
        for each in node.values():
            visit(each)

    visit(release.documents)
    return found


def lines_of(release: Release) -> dict[str, tuple[str, str]]:
    """Return the purpose and each command of the notes about Secrets, by the Secret."""
    lines = release.notes.splitlines()
    found = {}
    for above, line in zip(lines, lines[1:], strict=False):
        if above.startswith("  # "):
            words = shlex.split(line)
            name = words[words.index("secret") + (2 if "create" in words else 1)]
            found[name] = above.removeprefix("  # "), line.strip()
    return found


def commands(release: Release) -> dict[str, tuple[str, list[str]]]:
    """Same as `lines_of`, with the words of each command."""
    return {name: (why, shlex.split(line)) for name, (why, line) in lines_of(release).items()}


def put_all(server: SecretsServer) -> None:
    for name, keys in KEYS.items():
        server.put(name, dict.fromkeys(keys, b"a value"))


def test_each_missing_secret_is_named_with_its_command(
    server: SecretsServer, tmp_path: Path
) -> None:
    found = commands(upgraded(server, merged(DEMO, NAMED), tmp_path))
    assert {name: purpose for name, (purpose, _) in found.items()} == PURPOSES
    for name, (_, words) in found.items():
        assert words[:5] == ["kubectl", "-n", "llm", "create", "secret"]
        given = [each.partition("=")[2].split("=", 1) for each in words if "--from-" in each]
        if words[5] == "generic":
            assert {key for key, _ in given} == set(KEYS[name])
            assert all(word == TLS_FILES[key] for key, word in given if key in TLS_FILES)
    for name in ("web", "clients", "clients-of-code"):
        assert found[name][1][5:] == ["tls", name, "--cert=CERTIFICATE_FILE", "--key=KEY_FILE"]
    assert found["pull"][1][5:7] == ["docker-registry", "pull"]


def test_secrets_that_pods_use_are_those_that_are_looked_up() -> None:
    """A value that names a Secret and is forgotten here would never be reported."""
    ray: Values = {"orchestrator": "kuberay", "tls": {"existingSecrets": {"ray": "y"}}}
    release = render(merged(DEMO, NAMED, ray))
    used = named_by(release)
    used.pop("chat-baton-ray")  # KubeRay makes it
    keys_of = {**KEYS, "y": ("tls.crt", "tls.key")}
    assert used.keys() == keys_of.keys()
    for name, keys in used.items():
        assert keys <= set(keys_of[name])
    purpose, words = commands(release)["y"]
    assert purpose == "tls.existingSecrets.ray"
    given = [each for each in words if each.startswith("--from-")]
    assert given == ["--from-file=tls.crt=CERTIFICATE_FILE", "--from-file=tls.key=KEY_FILE"]


def test_secrets_that_exist_are_not_named(server: SecretsServer, tmp_path: Path) -> None:
    put_all(server)
    release = upgraded(server, merged(DEMO, NAMED), tmp_path)
    assert commands(release) == {} and "did not find" not in release.notes
    del server.secrets["hub"]
    assert commands(upgraded(server, merged(DEMO, NAMED), tmp_path)).keys() == {"hub"}


def test_a_secret_without_a_key_is_named(server: SecretsServer, tmp_path: Path) -> None:
    put_all(server)
    server.put("own", {"token": b"a value", "redis-password": b"a value"})
    found = commands(upgraded(server, merged(DEMO, NAMED), tmp_path))
    purpose, words = found.pop("own")
    assert found == {}
    assert purpose == "secrets.existing: the Secret is there, its key api-keys is not"
    assert words[3:7] == ["patch", "secret", "own", "-p"]
    assert json.loads(words[7]) == {"stringData": {"api-keys": "VALUE"}}


KUBECTL = """#!/bin/bash
printf '%s' "${!#}" > GIVEN
"""


@pytest.mark.parametrize("key", TLS_FILES)
def test_a_files_key_is_added_by_its_command(
    key: str, server: SecretsServer, tmp_path: Path
) -> None:
    """Bash runs the command as printed; the last argument of `kubectl` is the patch."""
    put_all(server)
    server.put("r", {each: b"a value" for each in TLS_FILES if each != key})
    purpose, line = lines_of(upgraded(server, merged(DEMO, NAMED), tmp_path))["r"]
    assert purpose == f"tls.existingSecrets.router: the Secret is there, its key {key} is not"
    content = (tmp_path / "ca.crt").read_bytes() * 3  # certificates, with line breaks
    assert content.count(b"\n") > 20
    file, given, kubectl = (tmp_path / name for name in ("a file", "given", "kubectl"))
    file.write_bytes(content)
    kubectl.write_text(KUBECTL.replace("GIVEN", shlex.quote(str(given))))
    kubectl.chmod(0o755)
    assert TLS_FILES[key] in line
    typed = line.replace(TLS_FILES[key], shlex.quote(str(file)))
    typed = f"PATH={shlex.quote(str(tmp_path))}:$PATH; {typed}"
    subprocess.run(["bash", "-ec", typed], check=True, timeout=60)
    patch = json.loads(given.read_text())
    assert b64decode(patch["data"].pop(key), validate=True) == content
    assert patch == {"data": {}}


def test_a_release_that_names_no_secret_asks_for_none(
    server: SecretsServer, tmp_path: Path
) -> None:
    """The user may then have no right to read them."""
    server.roles["user"] = []
    assert commands(upgraded(server, DEMO, tmp_path)) == {}
    assert server.refused == []


def test_no_content_of_a_secret_is_shown(server: SecretsServer, tmp_path: Path) -> None:
    put_all(server)
    server.put("own", {"token": b"the-token-itself"})
    release = upgraded(server, merged(DEMO, NAMED), tmp_path)
    text = release.notes + json.dumps(release.documents)
    assert commands(release).keys() == {"own"}
    assert "the-token-itself" not in text and "dGhlLXRva2VuLWl0c2VsZg" not in text


def test_renders_without_a_cluster_are_equal_and_say_so() -> None:
    values = merged(DEMO, NAMED)
    first = chart().render(values, name="chat", namespace="llm")
    assert first == chart().render(values, name="chat", namespace="llm")
    release = render(values)
    assert commands(release).keys() == KEYS.keys()
    assert "without a cluster, as with --dry-run=client, it finds none" in release.notes


def test_a_live_release_has_the_same_objects(server: SecretsServer, tmp_path: Path) -> None:
    """Only the notes depend on the cluster."""
    values = merged(DEMO, NAMED)

    def objects(release: Release) -> list[Document]:
        return release.documents

    assert objects(upgraded(server, values, tmp_path)) == objects(render(values))


def test_a_user_without_the_right_is_refused_by_helm(server: SecretsServer, tmp_path: Path) -> None:
    server.roles["user"] = []
    with pytest.raises(helm_python.HelmError, match="may not get"):
        upgraded(server, merged(DEMO, NAMED), tmp_path)
