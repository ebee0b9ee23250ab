"""A selector of pods by their group of Ray names their cluster too: other clusters of the namespace
have groups of the same names, whose pods a command would delete with them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SELECTOR = re.compile(r"(?:[\w./-]+|\{[\w.]+\})(?:=|==|!=| in )[^\s\"'`]*")
OF_GROUP, OF_CLUSTER = (
    re.compile(rf"(?:ray\.io/{word}|\{{{word.upper()}_LABEL\}})(?:=| in )")
    for word in ("group", "cluster")
)


def selectors_without_a_cluster(text: str) -> list[str]:
    """Return the selectors by a group alone; the label's name may be a constant in braces."""
    found = [each for each in SELECTOR.findall(text) if OF_GROUP.search(each)]
    return [each for each in found if not OF_CLUSTER.search(each)]


def test_each_selector_of_a_group_names_its_cluster() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found, seen = [], 0
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path == Path(__file__) or path.suffix in (".png", ".safetensors", ".gz"):
            continue
        text = path.read_text(errors="replace")
        seen += len(OF_GROUP.findall(text))
        found += [f"{name}: {each}" for each in selectors_without_a_cluster(text)]
    assert seen >= 2 and found == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`kubectl delete pod -l ray.io/group=prefill`", ["ray.io/group=prefill"]),
        ("-l app=baton,ray.io/group=prefill", ["app=baton,ray.io/group=prefill"]),
        ('f"{GROUP_LABEL}={group}"', ["{GROUP_LABEL}={group}"]),
        ("-l ray.io/cluster=a,ray.io/group=prefill", []),
        ("-l ray.io/group=prefill,ray.io/cluster=a", []),
        ('f"{CLUSTER_LABEL}={name},{GROUP_LABEL}={group}"', []),
        ('{"ray.io/group": group}', []),
    ],
)
def test_a_selector_of_a_group_alone_is_found(text: str, found: list[str]) -> None:
    assert selectors_without_a_cluster(text) == found
