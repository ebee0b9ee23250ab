"""The declaration of one setting: its default, its bounds, its unit and what it means.

`runtime/config.py` declares every setting with `setting(...)`; bounds checks, the default file
and the reference page read the declarations. Pure standard library; holds no state.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

_METADATA = "setting"

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one field of a section that an operator may set. `low` and `high` are
    inclusive; text and flags have no bounds."""

    name: str
    default: Any
    meaning: str
    low: float | None
    high: float | None
    unit: str


def setting(
    default: Value,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    unit: str = "",
) -> Value:
    """Declare a dataclass field that the file, the environment and flags may set. A field that is
    declared otherwise is a constant to operators: only a constructor call changes it."""
    metadata = {_METADATA: (meaning, low, high, unit)}
    return field(default=default, metadata=metadata)


def settings_of(section: Any) -> list[Setting]:
    """Return the settings of a section's dataclass (or of an instance), in declared order."""
    return [_read(each) for each in fields(section) if _METADATA in each.metadata]


def _read(declared: Field[Any]) -> Setting:
    meaning, low, high, unit = declared.metadata[_METADATA]
    return Setting(declared.name, declared.default, meaning, low, high, unit)
