"""Checks of what comes from outside stay under `python -O`, and secrets are compared in constant
time: over the syntax trees of all folders that are reached from a network."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
REACHED = ("router", "runtime", "kv_transfer", "prefill_worker", "decode_worker", "deploy")

# `-O` drops asserts. Here one may tell the type checker what other lines guarantee, and no more.
# (file, its condition): what guarantees it
NARROWING = {
    (
        "decode_worker/scheduler.py",
        "self._speculator is not None",
    ): "a step verifies only where the scheduler has a speculator, which plans it",
    (
        "decode_worker/sequences.py",
        "self.draft_kv is not None",
    ): "the speculator gives a sequence draft work only where a draft model is loaded",
    (
        "decode_worker/speculator.py",
        "self._proposer is not None",
    ): "its callers ask whether there is a host proposer first",
    ("deploy/bench/http_client.py", "self._transport is not None"): "the loop connects it first",
    (
        "deploy/bench/http_client.py",
        "isinstance(transport, asyncio.Transport)",
    ): "a TCP or TLS connection's, which the client asks for",
    (
        "deploy/cli/planning_commands.py",
        "model is not None",
    ): "`find_model` returns None only where it is given what stops a download",
    (
        "deploy/cli/size_command.py",
        "model is not None",
    ): "nothing but Ctrl-C, which raises, stops a download",
    ("deploy/serve/hub.py", "child.stdout is not None"): "the child was started with a pipe",
    ("kv_transfer/preflight.py", "child.stdout is not None"): "the child was started with a pipe",
    (
        "kv_transfer/nixl_mover.py",
        "checksums is not None and seeds is not None",
    ): "the callback is given to no READ without seeds",
    (
        "router/answers/request_handler.py",
        "self._active_request is not None",
    ): "set by `start`, before",
    (
        "router/http_frontend/app.py",
        "isinstance(error, BatonError)",
    ): "what the handler is registered for",
    (
        "router/http_frontend/app.py",
        "isinstance(error, HTTPException)",
    ): "what the handler is registered for",
    ("router/answers/choice_text.py", "output.token is not None"): "its one caller has looked",
    ("router/requests/chat_prompt.py", "self._template is not None"): "`plain` has refused else",
    ("router/fleet/fleet.py", "hello is not None"): "a link is up after its handshake",
    ("router/fleet/linked_view.py", "hello is not None"): "a link is up after its handshake",
    (
        "router/text/tokenizer.py",
        "self._plain is not None",
    ): "pieces come where control tokens are text",
    ("router/text/call_form.py", "found is not None"): "the pattern matches the empty text",
    ("router/text/json_call.py", "found is not None"): "both patterns match the empty text",
    ("router/text/json_call.py", "self._json is not None"): "`calls` comes after a known end",
    ("router/text/named_call.py", "self._json is not None"): "`calls` comes after a known end",
    (
        "router/grammars/grammar_validator.py",
        "process.stdin is not None",
    ): "the process was started with pipes",
    (
        "router/grammars/grammar_validator.py",
        "process.stdin is not None and process.stdout is not None",
    ): "the process was started with pipes",
    ("runtime/grammar/choice_masks.py", "self._bits is not None"): "set by `compute`, before",
    (
        "runtime/grammar/grammar_compiler.py",
        "self._vocabulary is not None",
    ): "`check` has refused the message, else",
}

# Names of what no caller may guess bit by bit; in files that handle secrets, other names too.
SECRET = {"secret", "proof", "digest", "digests", "password", "bearer", "authorization"}
SECRET_THERE = {"token", "key", "keys", "given", "known"}
HANDLES_SECRETS = (
    "compare_digest", "BATON_TOKEN", "TOKEN_KEY", "api_keys", "cluster_key", "authorization",
    "credentials(",
)  # fmt: skip
# (file, comparison): why what is compared is no secret
PUBLIC = {
    (
        "runtime/grammar/grammar_compiler.py",
        "message.vocabulary != self._vocabulary.digest",
    ): "it names the tokenizer, which routers and workers know",
}


def trees() -> Iterator[tuple[str, str, ast.Module]]:
    for folder in REACHED:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            yield str(path.relative_to(ROOT)), text, ast.parse(text)


def test_an_assert_only_narrows_a_type() -> None:
    found = {
        (name, ast.unparse(node.test))
        for name, _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    }
    assert found - set(NARROWING) == set(), "raise an error, or say here what guarantees it"
    assert set(NARROWING) - found == set(), "no longer needed"


@pytest.mark.nightly
def test_checks_hold_without_asserts() -> None:
    """`-O` reaches the code under test; these tests themselves use `pytest.raises`."""
    tests = (
        "kv_transfer/test_lying_granters.py::test_what_cannot_be_true_ends_the_handoff",
        "kv_transfer/test_handshake.py::test_what_cannot_be_a_pool_is_refused",
        "runtime/test_wire.py::test_what_is_out_of_range_is_named",
    )
    command = [sys.executable, "-O", "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-W", "ignore:assertions not in test modules"]
    command += [str(ROOT / "tests" / test) for test in tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr


def compared(tree: ast.Module, names: set[str]) -> list[str]:
    """Comparisons by `==`, `!=`, `in` or `not in` of anything called by one of the names."""
    by_value = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and any(isinstance(sign, by_value) for sign in node.ops)
        if any(_words(part) & names for part in ast.walk(node))
    ]


def _words(node: ast.AST) -> set[str]:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    if not isinstance(name, str) or name.isupper():  # constants are no secrets
        return set()
    return set(name.split("_")) | ({"secret"} if "api_key" in name else set())


def test_no_secret_is_compared_by_time() -> None:
    """`==` and `in` end at the first byte that differs."""
    handling = [name for name, text, _ in trees() if any(word in text for word in HANDLES_SECRETS)]
    assert {
        "router/client_access/client_identity.py",
        "runtime/grpc_links.py",
    } <= set(handling)
    found = [
        (name, comparison)
        for name, _, tree in trees()
        for comparison in compared(tree, SECRET | (SECRET_THERE if name in handling else set()))
    ]
    assert sorted(found) == sorted(PUBLIC)


@pytest.mark.parametrize(
    "sample",
    ["token == given", "self._token != x", "given in self._digests", "proof(record) == text"]
    + ["x not in settings.api_keys", "head['authorization'] == bearer", "a < b == self.secret"],
)
def test_each_comparison_by_time_is_found(sample: str) -> None:
    assert compared(ast.parse(sample), SECRET | SECRET_THERE)


@pytest.mark.parametrize(
    "sample",
    ["hmac.compare_digest(given, token)", "if token is None: pass", "TOKEN_KEY in environ"]
    + ["len(name) == 3", "not token", "path in self._orders"],
)
def test_what_compares_no_secret_is_let_through(sample: str) -> None:
    assert compared(ast.parse(sample), SECRET | SECRET_THERE) == []
