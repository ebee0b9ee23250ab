"""What a fleet of real processes says of one that does not answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from chaos.cluster import Cluster, ClusterError


def test_a_refused_connection_shows_logs_and_exit_codes(tmp_path: Path) -> None:
    """A worker that ends closes its port before the registry forgets it."""
    cluster = Cluster(tmp_path)
    said = "print('too much is in quarantine', flush=True); raise SystemExit(70)"
    cluster.start_worker("decode", "decode-0", command=(sys.executable, "-c", said))
    cluster.wait_end("decode-0")
    cluster.urls["router"] = "http://127.0.0.1:1"
    with pytest.raises(ClusterError) as caught:
        cluster.metrics("router")
    text = str(caught.value)
    assert text.startswith("router: ") and "refused" in text and "127.0.0.1:1" in text
    assert "decode-0.log (ended with code 70)\ntoo much is in quarantine" in text
