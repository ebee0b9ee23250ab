"""The Makefile keeps its head's word: which targets make the virtual environment by themselves."""

from __future__ import annotations

import re
from pathlib import Path

MAKEFILE = Path(__file__).resolve().parent.parent / "Makefile"
NEED_NONE = {"help", "clean"}


def prerequisites() -> dict[str, str]:
    """Of each target that `make help` lists."""
    found = re.findall(r"^([a-z]+):(.*?)##", MAKEFILE.read_text(), re.MULTILINE)
    return dict(found)


def test_every_target_that_needs_the_environment_makes_it_and_the_head_names_the_other() -> None:
    without = {name for name, needs in prerequisites().items() if "$(STAMP)" not in needs}
    head = MAKEFILE.read_text().partition("\nSHELL")[0]
    named = set(re.findall(r"`([a-z]+)` alone", head))
    assert without - NEED_NONE == named == {"gpu"}


def test_the_targets_that_are_listed_are_those_that_are_no_files() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE.read_text(), re.MULTILINE)
    assert set(phony.split()) == set(prerequisites())
