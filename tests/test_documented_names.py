"""Environment variables, paths and flags that documents, the chart and the files of deploy/ name
exist. Settings, metrics, files and whole commands: tests/test_docs.py."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from baton.router.http_frontend.routes import ROUTES
from baton.runtime.settings import loading as settings
from tests.support.command_parsers import commands, flags_of

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = (
    "decode_worker", "deploy", "engine", "kv_transfer", "models", "planner", "prefill_worker",
    "router", "runtime", "simulation",
)  # fmt: skip
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "helm").rglob("*.md")]
FILES = [
    ROOT / "Makefile",
    *(path for path in (ROOT / "helm").rglob("*") if path.suffix in (".tpl", ".yaml", ".txt")),
    *(path for path in (ROOT / "deploy").rglob("*") if path.suffix in (".yaml", ".service")),
    *(ROOT / "deploy" / "docker").glob("*.Dockerfile"),
]
SPAN = re.compile(r"`([^`\n]+)`")
VARIABLE = re.compile(r"\bBATON_[A-Z]+(?:_+[A-Z]+)*\b")
PATH = re.compile(r"(?:(?:GET|POST) |(?:HOST|PORT|ADMIN)|^)(/[a-z][\w/-]*)(?![\w./:-])")
PLACEHOLDER = re.compile(r"/(?:\{.*|[A-Z]+)?$")  # at a path's end
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
CHATS_COMMAND = "/help"  # of `baton chat`
OF_THE_SYSTEM = ("/dev/", "/etc/", "/opt/")
OF_MODELS = "/no_think"  # a word that some templates cut out of messages
FOREIGN_FLAGS = {  # by page: of the program that the sentence is about
    "docs/benchmarks.md": {"--vllm"},  # benchmarks.engine_cpu has one for each peer
    "docs/kubernetes.md": {"--build-arg", "--previous"},  # docker, kubectl
    "docs/operations.md": {"--previous"},  # kubectl
    "docs/ray.md": {"--resources"},  # ray
    "docs/security.md": {"--redis-password"},  # ray
    "docs/decisions/0068-time-in-tests.md": {"--hypothesis-profile"},  # pytest
    "docs/decisions/0070-own-model-training.md": {"--minutes"},  # baton.models.training
    "docs/decisions/0138-images-by-hash.md": {"--no-deps", "--require-hashes"},  # pip
    "docs/decisions/0146-named-secrets.md": {
        "--dry-run", "--wait", "--atomic"  # helm
    },
    "helm/baton/README.md": {"--wait", "--atomic"},  # helm
}  # fmt: skip


@cache
def sources(*folders: str) -> str:
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return "\n".join(path.read_text() for path in paths)


@cache
def baton_flags() -> frozenset[str]:
    return frozenset().union(*(flags_of(each) for each in commands().values()))


def test_environment_variables_that_are_named_exist() -> None:
    """A setting's variable, one that code reads by name, or one that the file itself takes from its
    user (`${NAME}` of compose and systemd)."""
    known = set(re.findall(r"\"(BATON_[A-Z_]+)\"", sources(*PRODUCT, "benchmarks", "tests/engine")))
    known |= {f"BATON_{name.replace('.', '__').upper()}" for name in settings.names()}
    wrong, seen = [], set()
    for path in (*PAGES, *FILES):
        text = path.read_text()
        named = set(VARIABLE.findall(text))
        seen |= named
        own = set(re.findall(r"\$\{(BATON_[A-Z]+)\b", text))
        wrong += [(path.name, name) for name in named - known - own]
    assert wrong == []
    assert {"BATON_TOPOLOGY", "BATON_TOKEN_ALSO", "BATON_REGISTRY__PASSWORD"} <= seen


def test_paths_of_http_that_are_named_exist() -> None:
    """Of the API, of admin ports and of the console."""
    code = sources("router", "deploy/processes")
    routes = {PLACEHOLDER.sub("", route) for route in ROUTES}
    wrong, seen = [], set()
    for page in PAGES:
        for span in SPAN.findall(page.read_text()):
            for named in PATH.findall(span):
                if named in (CHATS_COMMAND, OF_MODELS) or named.startswith(OF_THE_SYSTEM):
                    continue
                path = PLACEHOLDER.sub("", named)
                seen.add(path)
                if path not in routes and f'"{path}"' not in code:
                    wrong.append((page.name, named))
    assert wrong == []
    assert {"/readyz", "/healthz", "/audit", "/v1/chat/completions", "/console/stream"} <= seen


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_that_are_named_alone_exist(page: Path) -> None:
    """Flags of `baton` and of the benchmarks; those behind a command are test_docs.py's."""
    known = set(re.findall(r'"(--[a-z][a-z0-9-]+)"', sources("benchmarks", "chaos")))
    known |= baton_flags() | FOREIGN_FLAGS.get(str(page.relative_to(ROOT)), set())
    spans = [span for span in SPAN.findall(page.read_text()) if span.startswith("--")]
    named = {flag for span in spans for flag in FLAG.findall(span)}
    assert named - known == set()
