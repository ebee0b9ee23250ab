"""Names are imported from the module that defines them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.test_architecture import ROOT, all_sources, imports, sources, unpackaged_sources


def test_a_name_is_imported_from_where_it_is_defined() -> None:
    tests = sorted((ROOT / "tests").rglob("*.py"))
    found = [
        each for path in [*all_sources(), *unpackaged_sources(), *tests] for each in lent(path)
    ]
    assert found == []


def lent(path: Path) -> list[str]:
    """Return the names that a file imports from a module that imports them itself."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno} imports {alias.name} from {node.module}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.name in borrowed(node.module)
    ]


@cache
def borrowed(module: str) -> frozenset[str]:
    """Return the names that a module of ours imports from others."""
    path = ROOT.joinpath(*module.removeprefix("baton.").split(".")).with_suffix(".py")
    if not path.is_file():
        return frozenset()  # a package, or another's
    return frozenset(
        alias.asname or alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )


def test_borrowed_names_are_found() -> None:
    assert "cache" in borrowed("tests.test_import_homes")
    assert "borrowed" not in borrowed("tests.test_import_homes")


def test_the_fleet_knows_limits_of_prompts_and_no_validator() -> None:
    known = {
        name
        for path in sources("router/fleet")
        for name, _ in imports(path)
        if name.startswith("baton.router.requests")
    }
    assert known == {"baton.router.requests.prompt_limits.ContextLimits"}
