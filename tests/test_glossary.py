"""The words of the house, read from the syntax tree: a class name occurs once in a package, and
no banned word stands in a name, a docstring, a comment or any other text of the code, nor in a
document. Of tests, names and docstrings are read: names are short too."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.code_files import tracked_pages
from tests.test_architecture import MAY_IMPORT, sources

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (*MAY_IMPORT, "chaos", "benchmarks", "tests/support")
TEST_NAME_CHARACTERS = 60

WORDS = (
    "who", "whoever", "whom", "nobody", "somebody", "everybody", "anybody",
    "told", "anew", "likewise", "meanwhile", "stumbles?", "stumbled", "of no use", "sounds?",
    "in its turn", "hopes?", "hoped", "(?:get|gets|got|getting) on",
    "(?:give|gives|gave|given|giving) back", "keepers?",
)  # fmt: skip
BANNED_WORD = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
MAYBE_COMMENT = re.compile(rf"#.*{BANNED_WORD.pattern}", re.IGNORECASE)
FRAGMENT = re.compile(
    r"(?:After|Also|As|At|Before|By|For|From|In|Of|On|Only|So|To|Until|What|Who|With)\b"
)
BANNED_NAMES = {
    "Answering", "Bearer", "GenerationRequest", "HOPE", "Holdings", "LOOK_S", "MOST", "Moves",
    "Numbers", "PATIENCE_S", "Places", "Shape", "Size", "Submission", "absent", "announced",
    "breaks", "first_contact", "fixed_weights", "generation", "greeting", "intake", "misfits",
    "move_budget", "move_turns", "peer_calls", "rolls", "sum_cache", "welcome", "whole_vectors",
}  # fmt: skip
# A place is that of a request or a worker on a worker or a node, and only these files choose one;
# elsewhere it is an index, an offset, a position. In a training text it is a place.
PLACEMENT = tuple(
    str(ROOT / name)
    for name in (
        "router/dispatch/", "router/fleet/", "deploy/serve/ray_driver.py", "simulation/capacity/",
        "simulation/invariants/", "benchmarks/placement/", "benchmarks/fleets/chat_replay.py",
        "tests/support/placement_scene.py", "tests/support/dispatch_scene.py", "models/corpus/",
    )
)  # fmt: skip
PLACE = re.compile(r"\bplaces?\b", re.IGNORECASE)
# Of people "who" is right, and training texts have the words of people.
PEOPLE_WHO = re.compile(r"\b(?:anyone|attacker|author|operator|those|users?) who\b", re.IGNORECASE)
TEXTS_OF_PEOPLE = ROOT / "models" / "corpus"
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def names(node: ast.AST) -> Iterator[str]:
    """Identifiers that the node declares: what it defines, takes or assigns."""
    if isinstance(node, Definition):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr


def words_of(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_+", " ", name)


def offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each breach of the words of the house, but for texts."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.Module | Definition) and FRAGMENT.match(
            text := ast.get_docstring(node) or ""
        ):
            yield line, f"fragment: {text.splitlines()[0]}"
        for name in names(node):
            if BANNED_WORD.search(words_of(name)) or name.strip("_") in BANNED_NAMES:
                yield line, f"name: {name}"


def misplaced(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each position that is called a place."""
    for node in ast.walk(tree):
        for name in names(node):
            if PLACE.search(words_of(name)):
                yield getattr(node, "lineno", 1), f"name of a position: {name}"


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and banned words of docstrings and of all other texts of code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (
                (node.lineno, f"text: {found}") for found in BANNED_WORD.findall(node.value)
            )


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Line and banned words of comments. Tokens take long: most files have no such line at all."""
    if MAYBE_COMMENT.search(text):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                words = BANNED_WORD.findall(token.string)
                yield from ((token.start[0], f"comment: {found}") for found in words)


def of_file(path: Path) -> list[str]:
    relative, text = path.relative_to(ROOT), path.read_text()
    tree = ast.parse(text)
    breaches = [*offences(tree), *comments(text)]
    if not path.is_relative_to(TEXTS_OF_PEOPLE):
        breaches += texts(tree)
    if not str(path).startswith(PLACEMENT):
        breaches += misplaced(tree)
    found = [f"{relative}:{line} {what}" for line, what in breaches]
    if path.stem in BANNED_NAMES or BANNED_WORD.search(words_of(path.stem)):
        found.append(f"{relative} name of a module")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_texts_use_the_words_of_the_house(package: str) -> None:
    wrong = [offence for path in sources(package) for offence in of_file(path)]
    assert wrong == []


def in_document(text: str) -> list[str]:
    lines = enumerate(text.splitlines(), 1)
    return [f"{n} {w}" for n, line in lines for w in BANNED_WORD.findall(PEOPLE_WHO.sub("", line))]


@pytest.mark.parametrize("page", tracked_pages())
def test_documents_use_the_words_of_the_house(page: str) -> None:
    assert in_document((ROOT / page).read_text()) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("What waits is\nreported meanwhile.", ["2 meanwhile"]),
        ("A worker who waits", ["1 who"]),
        ("An attacker who waits, and those who ask", []),
    ],
)
def test_a_breach_of_a_document_is_found(text: str, wrong: list[str]) -> None:
    assert in_document(text) == wrong


def wrong_test_names(tree: ast.AST) -> Iterator[str]:
    """Names of tests that are too long, or have a banned word."""
    for node in ast.walk(tree):
        if not isinstance(node, Definition) or not node.name.startswith("test_"):
            continue
        if len(node.name) > TEST_NAME_CHARACTERS or BANNED_WORD.search(words_of(node.name)):
            yield node.name


def banned_in_docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and banned words of docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | Definition) and (text := ast.get_docstring(node)):
            yield from ((node.body[0].lineno, found) for found in BANNED_WORD.findall(text))


def test_names_and_docstrings_of_tests_use_these_words() -> None:
    wrong = []
    for path in sources("tests"):
        relative, tree = path.relative_to(ROOT), ast.parse(path.read_text())
        wrong += [f"{relative} {name}" for name in wrong_test_names(tree)]
        wrong += [f"{relative}:{line} {found}" for line, found in banned_in_docstrings(tree)]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("test_a_worker_is_told", True),
        ("test_who_waits", True),
        ("test_" + "a" * 55, False),
        ("test_" + "a" * 56, True),
        ("told", False),
    ],
)
def test_a_wrong_name_of_a_test_is_found(name: str, wrong: bool) -> None:
    assert list(wrong_test_names(ast.parse(f"async def {name}(): ..."))) == [name] * wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_class_names_are_unique_within_a_package(package: str) -> None:
    files: dict[str, list[str]] = {}
    for path in sources(package):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


@pytest.mark.parametrize(
    "code",
    [
        'def f():\n    """What a worker holds."""',
        'class A:\n    """The worker that was told to drain."""',
        '"""A module that a worker gives back."""',
        "NOBODY_S = 3",
        "def f(who): ...",
        "self.told_at = 1",
        "self._generation = 1",
        "def spawn_keepers(): ...",
        "class WhoAsks: ...",
        "class Moves: ...",
        "log.warning('the announcement is of no use', worker=3)",
        "self._log.info(f'{worker} is sound')",
        "raise ValueError(f'{n} blocks are given back')",
        "print('meanwhile')",
        "wait(3)  # nobody waits",
        "reason = f'{n} blocks are given back'",
        "log.warning('worker drained', worker='nobody')",
    ],
)
def test_a_breach_is_found(code: str) -> None:
    assert [*offences(ast.parse(code)), *texts(ast.parse(code)), *comments(code)]


@pytest.mark.parametrize(
    "code", ["for place in order: ...", "class Places: ...", "a.tile_place = 1"]
)
def test_a_position_called_a_place_is_found(code: str) -> None:
    assert [*misplaced(ast.parse(code))]


def test_a_replaced_name_is_no_place() -> None:
    assert not [*misplaced(ast.parse("replaced = placement = workplace = 1"))]


@pytest.mark.parametrize(
    "code",
    [
        'def f():\n    """Return the blocks. As before, of a worker."""',
        "whole = Soft = attempt = 1",
        "x = '# somewhat'  # the loop waits",
        "raise ValueError(f'{n} blocks were returned')",
    ],
)
def test_plain_words_are_no_breach(code: str) -> None:
    assert not [*offences(ast.parse(code)), *texts(ast.parse(code)), *comments(code)]
