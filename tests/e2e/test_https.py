"""`baton serve` with a certificate for clients: they and the commands of this host speak TLS."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.client_certificates import ClientCertificates
from tests.support.machine_speed import slowness

COMMAND = [sys.executable, "-P", "-m", "baton.deploy.cli.main"]
QUESTION = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


@pytest.mark.timeout(120)
def test_a_served_chat_is_answered_by_https(tmp_path: Path) -> None:
    certificates = ClientCertificates(tmp_path / "clients")
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    folder = certificates.folder.relative_to(tmp_path)
    process = subprocess.Popen(
        [*COMMAND, "demo", "--launcher", "process", "--port", "0", "--set", f"router.tls={folder}"],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        seen = ""
        while "First token after" not in seen:  # baton asks its own router
            line = process.stdout.readline() if process.stdout else ""
            assert line, seen
            seen += line
        found = re.search(r"Ready at (https://\S+) after", seen)
        assert found is not None and f"curl -kN {found[1]}/v1/chat" in seen, seen
        with httpx.Client(base_url=found[1], verify=certificates.trusting(), timeout=60) as client:
            reply = client.post("/v1/chat/completions", json=QUESTION | {"model": "baton-tiny"})
        assert reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"]
        explained = subprocess.run(
            [*COMMAND, "explain", "-"],
            input=json.dumps(QUESTION | {"model": "baton-tiny"}),
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60 * slowness(),
            check=False,
        )
        assert explained.returncode == 0 and "prompt tokens" in explained.stdout, explained.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(30 * slowness()) == 0
    finally:
        process.kill()
        process.communicate(timeout=10)
