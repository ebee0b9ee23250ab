"""How many parameters a function takes by position: so many that none is mistaken for another."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.test_architecture import MAY_IMPORT, ROOT, room_of, sources

MOST = 6
KERNELS = {("engine", "cpu"), ("engine", "cpu_draws"), ("engine", "triton")}  # bound by compilers


def positional_parameters(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Yield name, line and number of positional parameters of each function, without `self`."""
    for outer in ast.walk(tree):
        for node in ast.iter_child_nodes(outer):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
                bound = isinstance(outer, ast.ClassDef) and names[:1] in (["self"], ["cls"])
                yield node.name, node.lineno, len(names) - bound


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("def f(a, b, /, c, *rest, d, **more): ...", 3),
        ("async def f(self): ...", 1),
        ("class A:\n def f(self, a, b): ...", 2),
        ("class A:\n @staticmethod\n def f(a): ...", 1),
        ("if True:\n def f(a): ...", 1),
    ],
)
def test_parameters_by_position_are_counted(source: str, number: int) -> None:
    assert [count for _, _, count in positional_parameters(ast.parse(source))] == [number]


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_functions_take_at_most_six_by_position(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name} takes {number} parameters by position"
        for path in sources(folder)
        if (folder, room_of(path, folder)) not in KERNELS
        for name, line, number in positional_parameters(ast.parse(path.read_text()))
        if number > MOST
    ]
    assert wrong == [], "group them in a dataclass, or take them by name"
