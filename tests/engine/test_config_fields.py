from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.engine.spec.config_fields import ConfigFields, read_fields
from baton.runtime.errors import ModelError


@pytest.fixture
def fields(tmp_path: Path) -> Callable[..., ConfigFields]:
    def make(**values):
        return ConfigFields(tmp_path / "config.json", values)

    return make


def test_a_default_stands_for_what_is_absent_or_null(fields: Callable[..., ConfigFields]) -> None:
    for found in (fields(), fields(a=None)):
        assert (found.integer("a", 3), found.number("a", 0.5), found.flag("a", True)) == (3, 0.5, 1)
        assert found.optional_number("a") is None
        assert found.section("a").values == {}


def test_defaults_of_a_class_leave_a_null_alone(fields: Callable[..., ConfigFields]) -> None:
    found = fields(a=None, b=1).with_defaults({"a": 5, "b": 6, "c": 7})
    assert found.values == {"a": None, "b": 1, "c": 7}


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", [1], 1 << 61])
def test_what_is_no_count(fields: Callable[..., ConfigFields], value: object) -> None:
    with pytest.raises(ModelError, match=r"config\.json: a: "):
        fields(a=value).integer("a")


@pytest.mark.parametrize("value", [0, -0.5, True, "1", float("nan"), float("inf"), 1e300, 10**400])
def test_what_is_no_positive_number(fields: Callable[..., ConfigFields], value: object) -> None:
    with pytest.raises(ModelError, match=r"config\.json: a: "):
        fields(a=value).number("a")


def test_zero_may_be_counted(fields: Callable[..., ConfigFields]) -> None:
    assert fields(a=0).count("a", 5) == 0
    assert (fields().count("a", 5), fields(a=7).count("a", 5)) == (5, 7)
    for wrong in (-1, "0", 0.5):
        with pytest.raises(ModelError, match="not a positive integer"):
            fields(a=wrong).count("a", 5)


def test_a_list_of_numbers_has_its_length(fields: Callable[..., ConfigFields]) -> None:
    assert fields(a=[1, 2.5]).numbers("a", 2) == (1.0, 2.5)
    for wrong in ([1.0], [1, 2, 3], None, 2.0, [1, -2], [1, "2"], [1, None]):
        with pytest.raises(ModelError, match=r"config\.json: a: "):
            fields(a=wrong).numbers("a", 2)


def test_a_section_names_its_place(fields: Callable[..., ConfigFields]) -> None:
    inner = fields(a={"b": {"c": -1}}).section("a").section("b")
    with pytest.raises(ModelError, match=r"config\.json: a\.b\.c: -1 is not"):
        inner.integer("c")
    with pytest.raises(ModelError, match=r"a: 3 is not an object"):
        fields(a=3).section("a")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(ModelError, match="larger than 16777216 bytes"):
        read_fields(path)
