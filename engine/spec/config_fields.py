"""Typed access to a JSON object of a model folder, with errors that name the file and the field.

It knows no model. A field that is absent or null takes its default; without a default it is
required.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from baton.runtime.errors import ModelError

_MAX_FILE_BYTES = 16 << 20
_MAX_COUNT = 1 << 60
_MAX_NUMBER = 1e15


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """One JSON object. `prefix` is its path in the file, with a final dot (`rope_scaling.`)."""

    path: Path
    values: dict[str, object]
    prefix: str = ""

    def error(self, field: str, reason: str) -> ModelError:
        return ModelError(f"{self.path}: {self.prefix}{field}: {reason}")

    def get(self, field: str, default: object = None) -> object:
        value = self.values.get(field)
        return default if value is None else value

    def integer(self, field: str, default: int | None = None, maximum: int = _MAX_COUNT) -> int:
        """Return a positive count of at most `maximum`. Raises ModelError."""
        value = self.get(field, default)
        if value is None:
            raise self.error(field, "is missing; give a positive integer")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.error(field, f"{value!r} is not a positive integer")
        if value > maximum:
            raise self.error(field, f"{value} exceeds the maximum of {maximum}")
        return value

    def count(self, field: str, default: int) -> int:
        """Same as `integer`, but zero is allowed. Raises ModelError."""
        return 0 if self.get(field, default) == 0 else self.integer(field, default)

    def number(self, field: str, default: float | None = None) -> float:
        """Return a positive finite number. Raises ModelError."""
        value = self.get(field, default)
        if value is None:
            raise self.error(field, "is missing; give a positive number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(field, f"{value!r} is not a number")
        if not 0 < value <= _MAX_NUMBER:
            raise self.error(
                field, f"{value!r} is not a positive number of at most {_MAX_NUMBER:g}"
            )
        return float(value)

    def optional_number(self, field: str) -> float | None:
        return None if self.get(field) is None else self.number(field)

    def numbers(self, field: str, length: int) -> tuple[float, ...]:
        """Return a list of `length` positive finite numbers. Raises ModelError."""
        found = self.get(field)
        if not isinstance(found, list) or len(found) != length:
            raise self.error(field, f"is not a list of {length} numbers")
        return tuple(replace(self, values={field: value}).number(field) for value in found)

    def flag(self, field: str, default: bool) -> bool:
        value = self.get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"{value!r} is neither true nor false")
        return value

    def with_defaults(self, defaults: Mapping[str, object]) -> ConfigFields:
        """Return the object with `defaults` for the fields that it lacks. A null stays null."""
        return ConfigFields(self.path, {**defaults, **self.values}, self.prefix)

    def section(self, field: str) -> ConfigFields:
        """Return the object at `field`; an empty object if the field is absent or null."""
        value = self.get(field, {})
        if not isinstance(value, dict):
            raise self.error(field, f"{value!r} is not an object")
        return ConfigFields(self.path, value, f"{self.prefix}{field}.")


def read_fields(path: Path) -> ConfigFields:
    """Read a JSON file that contains one object. Raises ModelError."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ModelError(
                f"{path}: larger than {_MAX_FILE_BYTES} bytes; check that it is the right file"
            )
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(
            f"{path}: not found; give a folder with config.json and *.safetensors"
        ) from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}; download the file again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: contains a {type(values).__name__}; a JSON object is needed")
    return ConfigFields(path, values)
