"""The Makefile keeps its head's word: which targets make the virtual environment by themselves;
and what it installs is pinned, and is all that is installed."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.file_order import LONGEST

MAKEFILE = Path(__file__).resolve().parent.parent / "Makefile"
REQUIREMENTS = MAKEFILE.parent / "requirements"
NEED_NONE = {"help", "clean"}


def prerequisites() -> dict[str, str]:
    """Of each target that `make help` lists."""
    found = re.findall(r"^([a-z]+):(.*?)##", MAKEFILE.read_text(), re.MULTILINE)
    return dict(found)


def test_targets_that_need_the_environment_make_it() -> None:
    without = {name for name, needs in prerequisites().items() if "$(STAMP)" not in needs}
    head = MAKEFILE.read_text().partition("\nSHELL")[0]
    named = set(re.findall(r"`([a-z]+)` alone", head))
    assert without - NEED_NONE == named == {"clients", "gpu"}


def test_the_targets_that_are_listed_are_those_that_are_no_files() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE.read_text(), re.MULTILINE)
    assert set(phony.split()) == set(prerequisites())


def test_every_version_is_pinned_and_none_is_resolved() -> None:
    """torch alone brings what it needs, and of that the versions are the pinned ones too."""
    for file in REQUIREMENTS.rglob("*.txt"):
        lines = [line for line in file.read_text().splitlines() if line and line[0] != "#"]
        wrong = [x for x in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+|-r cpu\.txt", x)]
        assert lines and wrong == [], file.name
    recipe = MAKEFILE.read_text().replace("\\\n", " ")
    installs = [line for line in recipe.splitlines() if "pip install" in line]
    assert len(installs) == 4
    for line in installs:
        assert "--no-deps" in line or "--constraint requirements/cpu.txt" in line
        assert "index" not in line, "which index is the user's own choice"


def test_every_folder_marked_nightly_is_run_by_make_nightly() -> None:
    tests = MAKEFILE.parent / "tests"
    marked = {
        str(path.parent.relative_to(MAKEFILE.parent))
        for path in tests.rglob("conftest.py")
        if "pytest.mark.nightly" in path.read_text()
    }
    (named,) = re.findall(r"^NIGHTLY_FOLDERS := (.*)$", MAKEFILE.read_text(), re.MULTILINE)
    assert set(named.split()) == marked


def test_tests_that_run_pods_run_one_after_the_other() -> None:
    """Beside tests that fill all cores their processes would not answer in time."""
    starts = re.compile(
        r"^from tests\.support\.(?:rendered_pods|pods\.cluster|kind_cluster) import", re.M
    )
    tests = (MAKEFILE.parent / "tests" / "helm").glob("test_*.py")
    found = {path.stem.removeprefix("test_") for path in tests if starts.search(path.read_text())}
    (named,) = re.findall(r"^PODS := .*,(.*)\)$", MAKEFILE.read_text(), re.MULTILINE)
    assert set(named.split()) == found


def test_nightly_folders_keep_a_smoke_test_in_make_test() -> None:
    for conftest in MAKEFILE.parent.glob("tests/*/conftest.py"):
        if names := re.findall(r"^SMOKE = \{(.*)\}$", conftest.read_text(), re.MULTILINE):
            files = re.findall(r'"(.*?)"', names[0])
            assert files and all((conftest.parent / name).exists() for name in files)


def value_of(variable: str) -> str:
    """What the Makefile gives a variable, on one line."""
    text = MAKEFILE.read_text().replace("\\\n", " ")
    (value,) = re.findall(rf"^{variable} := (.*)$", text, re.MULTILINE)
    return str(value)


def test_files_that_run_in_pairs_exist_and_are_of_fleets() -> None:
    lists = re.findall(r"\$\(patsubst %,(\S+)%(\S+),([a-z_ ]+)\)", value_of("IN_PAIRS"))
    files = [f"{before}{name}{after}" for before, after, names in lists for name in names.split()]
    assert len(files) == len(set(files)) > 3
    for file in files:
        assert (MAKEFILE.parent / file).is_file()
        assert file.rpartition("/")[0] in value_of("FLEETS").split()


def test_files_that_begin_first_exist() -> None:
    assert len(LONGEST) == len(set(LONGEST)) > 0
    assert all((MAKEFILE.parent / name).is_file() for name in LONGEST)


def test_make_nightly_lists_what_its_tests_skipped() -> None:
    (recipe,) = re.findall(r"^nightly:.*\n((?:\t.*\n)+)", MAKEFILE.read_text(), re.MULTILINE)
    runs = [line for line in recipe.replace("\\\n", " ").splitlines() if "pytest" in line.lower()]
    (joined,) = runs
    assert joined.count("$(PYTEST)") == joined.count("$(PYTEST) -rs") > 0
