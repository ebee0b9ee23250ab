"""What `baton serve` says and does beside its jobs: certificates, warnings, the ready line."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.deploy.authority import Authority
from baton.deploy.instance import Instance, grpc_address_file, write_private
from baton.deploy.model_source import ModelSource
from baton.deploy.plan import ServeOptions
from baton.deploy.serve import Serving, grpc_address
from baton.runtime.config import Config, SecurityConfig


def prepared(instance: Instance, security: SecurityConfig) -> tuple[Serving, list[str]]:
    """A Serving whose jobs are written, and what it says."""
    said: list[str] = []
    options = ServeOptions(Config(security=security), launcher="process")
    serving = Serving(options, said.append)
    serving._prepare(instance, ModelSource(Path("/m"), "name"))
    return serving, said


def test_tls_that_is_off_is_said_and_makes_no_certificates(instance: Instance) -> None:
    _, said = prepared(instance, SecurityConfig(tls="off"))
    assert "WARNING: security.tls is off" in "".join(said)
    assert not (instance.folder / "tls").exists()


def test_certificates_are_renewed_while_it_serves(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving, said = prepared(instance, SecurityConfig())
    assert "WARNING" not in "".join(said)
    renewals = []

    def renew(authority: Authority) -> None:
        renewals.append(authority)
        if len(renewals) == 2:
            raise OSError(28, "No space left on device")
        if len(renewals) == 4:
            serving.stop()

    class Idle:
        def tend(self) -> None:
            pass

    monkeypatch.setattr(Authority, "renew", renew)
    serving._watch(instance, Idle())
    assert len(renewals) == 4
    assert "No space left" in said[-1] and "cannot be renewed" in said[-1]


@pytest.mark.parametrize("address", ["127.0.0.1:8001", None])
def test_the_ready_line_names_grpc_where_it_is_served(tmp_path: Path, address: str | None) -> None:
    if address is not None:
        write_private(grpc_address_file(tmp_path / "router.address"), address)
    told: list[str] = []
    serving = Serving(ServeOptions(Config()), told.append)
    model = ModelSource(tmp_path, "m")
    serving._announce("http://127.0.0.1:8000", model, grpc_address(tmp_path))
    assert told[0].startswith("Ready at http://127.0.0.1:8000 after ")
    assert ("(gRPC at 127.0.0.1:8001)" in told[0]) is (address is not None)
