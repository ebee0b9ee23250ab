"""Each `type: ignore`, broad `except`, pause and skip has its reason beside it: over all code.

A reason is a comment of three words or more, on the lines of the statement or directly above it;
above a loop or a block if it does nothing else. The reason of a skip is its text. Pauses on virtual
time take none and need no reason: those of a function that is `on_virtual_time` or calls
`virtual_loop.run`, and of a module whose docstring says "on virtual time".
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cached_property

import pytest

from tests.support.code_files import ROOT, all_code

SUBJECTS = re.compile(r"type: ignore|except:|Exception\b|sleep\(|pytest\.\S*skip|xfail")
VIRTUAL = re.compile(r"@on_virtual_time\b|\bvirtual_loop\.run\(")
DIRECTIVES = ("type:", "noqa", "pragma:", "fmt:")
LEAST_WORDS = 3
PAUSES = {"sleep", "time.sleep", "asyncio.sleep"}
SKIPS = ("pytest.skip", "pytest.mark.skip", "pytest.mark.xfail", "pytest.importorskip")
NAMES = {"sleep", "skip", "skipif", "xfail", "importorskip"}
BROAD = {"Exception", "BaseException"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class _Module:
    """One file: its tree, the parent of each node, and its comments."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tree = ast.parse(source)
        self.nodes = list(ast.walk(self.tree))

    @cached_property
    def comments(self) -> dict[int, tokenize.TokenInfo]:
        tokens = tokenize.generate_tokens(io.StringIO(self.source).readline)
        return {each.start[0]: each for each in tokens if each.type == tokenize.COMMENT}

    @cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    def is_explained(self, first: int, last: int) -> bool:
        """Return whether a comment on these lines, or directly above them, is a reason."""
        while (above := self.comments.get(first - 1)) and above.line.lstrip().startswith("#"):
            first -= 1
        texts = [self.comments[n].string for n in range(first, last + 1) if n in self.comments]
        parts = [part.strip() for text in texts for part in text.split("#")]
        words = [part.split() for part in parts if not part.startswith(DIRECTIVES)]
        return sum(map(len, words)) >= LEAST_WORDS

    def is_statement_explained(self, node: ast.AST) -> bool:
        while not isinstance(node, ast.stmt):
            node = self._parents[node]
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        if self.is_explained(node.lineno, last):
            return True
        parent = self._parents[node]
        if isinstance(parent, Function | ast.ClassDef) or not isinstance(parent, ast.stmt):
            return False
        return getattr(parent, "body", None) == [node] and self.is_statement_explained(parent)

    def is_pause_explained(self, node: ast.AST) -> bool:
        """Return whether a pause here is on virtual time, or has its reason."""
        if "on virtual time" in " ".join((ast.get_docstring(self.tree) or "").lower().split()):
            return True
        above = node
        while (above := self._parents.get(above, self.tree)) is not self.tree:
            if isinstance(above, Function) and VIRTUAL.search(ast.unparse(above)):
                return True
        return self.is_statement_explained(node)


def unexplained(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each subject without a reason, and what it is."""
    if SUBJECTS.search(source) is None:
        return
    module, last = _Module(source), -1
    for number, comment in module.comments.items() if "type: ignore" in source else ():
        if comment.string.startswith("# type: ignore"):
            if last == number - 1 or module.is_explained(number, number):
                last = number  # adjacent ones share a reason
            else:
                yield number, "type: ignore"
    for node in module.nodes:
        if isinstance(node, ast.ExceptHandler) and _is_broad(node):
            if not module.is_explained(node.lineno, node.body[0].lineno - 1):
                yield node.lineno, "broad except"
        elif isinstance(node, ast.Call) and _last_name(node.func) in NAMES:
            name = ast.unparse(node.func)
            takes_time = name in PAUSES and [*map(ast.unparse, node.args)] != ["0"]
            if takes_time and not module.is_pause_explained(node):
                yield node.lineno, "pause"
            elif name.startswith(SKIPS) and not _says_why(name, node):
                yield node.lineno, "skip"


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(each is None or _last_name(each) in BROAD for each in kinds)


def _says_why(name: str, call: ast.Call) -> bool:
    """Return whether a skip's text names what is missing; pytest's own text names a module."""
    given = {each.arg: each.value for each in call.keywords}
    text = given.get("reason") or (call.args[0] if name == "pytest.skip" and call.args else None)
    if isinstance(text, ast.Constant):
        return len(str(text.value).split()) >= LEAST_WORDS
    return text is not None or name == "pytest.importorskip"


def test_everything_doubtful_has_its_reason_beside_it() -> None:
    read = {path.relative_to(ROOT): unexplained(path.read_text()) for path in all_code()}
    assert [f"{path}:{line} {what}" for path in read for line, what in read[path]] == []


@pytest.mark.parametrize(
    "sample",
    [
        "x = 1  # type: ignore[misc]{}", "while f():{}\n    await asyncio.sleep(pause_s)",
        "try:\n    f()\nexcept (OSError, Exception):{}\n    g()", "if f():\n    sleep(0.1){}",
    ],
)  # fmt: skip
def test_a_subject_is_found_unless_its_reason_is_there(sample: str) -> None:
    assert len(list(unexplained(sample.format("  # noqa: X1")))) == 1
    assert not list(unexplained(sample.format("  # g calls nothing back")))


def test_a_skip_is_found_unless_it_names_what_is_missing() -> None:
    assert len(list(unexplained("pytest.skip()\npytest.mark.xfail(reason='bad')"))) == 2
    assert not list(unexplained("pytest.importorskip('nixl')\npytest.skip(f'no {x} is here')"))


def test_a_pause_on_virtual_time_or_below_a_comment_passes() -> None:
    for before in ("@on_virtual_time\nasync def f():\n    ", "# it asks\n# often\n"):
        assert not list(unexplained(f"{before}await asyncio.sleep(1)"))
