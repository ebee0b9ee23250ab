"""The order in which files of tests begin.

With `--dist=loadfile` each worker of pytest takes one whole file after the other. A long file that
begins last runs alone at the end, so the longest begin first; the others keep the order of their
names."""

from __future__ import annotations

import pytest

LONGEST = (
    "tests/deploy/test_serve_ray_workers.py",
    "tests/deploy/test_serve_lifecycle.py",
    "tests/deploy/test_serve_failures.py",
    "tests/deploy/test_worker_process.py",
    "tests/deploy/test_doctor.py",
    "tests/stories/test_same_answer.py",
    "tests/stories/test_unlike_dtypes.py",
    "tests/stories/test_unlike_sizes.py",
    "tests/kv_transfer/test_nixl_mover.py",
    "tests/router/test_http_protocol.py",
    "tests/router/test_failover.py",
)


def begin_with_longest(items: list[pytest.Item]) -> None:
    """Sort the collected tests so that those of `LONGEST` come first."""
    ranks = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))
