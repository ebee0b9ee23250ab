"""A test's parameters have types: what a fixture, a case or a builder hands on is named.

Each parameter of a test and of a fixture is annotated and names no `Any`; a helper takes `Any` only
as `*given` or `**fields`, which it hands on to a constructor or to the function that it stands for.
Parsed JSON is `Json`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.code_files import ROOT

Function = ast.FunctionDef | ast.AsyncFunctionDef

# (file, parameter): why its type names `Any`
UNTYPED = {
    ("tests/stories/test_ranked_drafts.py", "asked"): "keywords of `Client.submit`, which has types"
}


def untyped(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each parameter whose type is `Any`; of a test or a fixture,
    also of each whose type names `Any`, or that has none."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            strict = node.name.startswith("test_") or _is_fixture(node)
            for each in _parameters(node, keywords=strict):
                if each.annotation is None:
                    wrong = strict and each.arg != "self"
                else:
                    parts = ast.walk(each.annotation) if strict else [each.annotation]
                    wrong = any(map(_is_any, parts))
                if wrong:
                    yield node.lineno, each.arg


def _is_fixture(node: Function) -> bool:
    return any("pytest.fixture" in ast.unparse(each) for each in node.decorator_list)


def _parameters(node: Function, *, keywords: bool) -> list[ast.arg]:
    given = node.args
    rest = [each for each in (given.vararg, given.kwarg) if each is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *(rest if keywords else ())]


def _is_any(node: ast.AST) -> bool:
    name = getattr(node, "id", getattr(node, "attr", getattr(node, "value", None)))
    return name == "Any"  # itself, as `typing.Any`, or in quotes


def test_each_parameter_of_a_test_has_a_type() -> None:
    read = {
        str(path.relative_to(ROOT)): [*untyped(path.read_text())]
        for path in sorted((ROOT / "tests").rglob("*.py"))
    }
    found = {(name, parameter) for name, each in read.items() for _, parameter in each}
    wrong = [f"{name}:{line} {what}" for name in read for line, what in read[name]
             if (name, what) not in UNTYPED]  # fmt: skip
    assert wrong == [], "name its type, in tests/support where it has no name yet"
    assert set(UNTYPED) - found == set(), "no longer needed"


@pytest.mark.parametrize(
    "sample",
    [
        "def test_it({}: Any): ...",
        "def test_it({}: list[dict[str, Any]]): ...",
        "def test_it({}): ...",
        "@pytest.fixture\ndef it(*, {}=None): ...",
        "async def test_it(*, {}: Callable[..., Any] | None): ...",
        "@pytest.fixture\ndef it({}: 'Any'): ...",
        "@pytest.fixture(scope='module')\nasync def it(**{}: Any): ...",
        "class Stub:\n    def take(self, {}: typing.Any): ...",
        "def helper(other: int, *given: Any, {}: Any = None): ...",
    ],
)
def test_a_parameter_without_a_type_is_found(sample: str) -> None:
    assert [name for _, name in untyped(sample.format("scene"))] == ["scene"]


@pytest.mark.parametrize(
    "sample",
    [
        "def test_it(scene: Scene, cases: dict[str, object]) -> None: ...",
        "class TestIt:\n    def test_it(self) -> None: ...",
        "def helper(*given: Any, **fields: Any) -> Any: ...",
        "def helper(node: Node[Any], work: Coroutine[Any, Any, None]) -> None: ...",
        "def test_it(body: Json) -> None:\n    found: Any = body",
    ],
)
def test_what_has_a_type_or_is_handed_on_passes(sample: str) -> None:
    assert [*untyped(sample)] == []
