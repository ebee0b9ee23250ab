"""Reads a file, the environment and flags into a checked `Config`.

A flag beats the environment, the environment beats the file, the file beats the defaults of
runtime/config.py. Names are `section.key` in flags and BATON_SECTION__KEY in the environment
(BATON_ROUTER__PORT). Unknown names are refused with the nearest known one, and every wrong
value is reported with the source that it came from. Holds no state.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from baton.runtime.config import Config, section_names
from baton.runtime.errors import ConfigError
from baton.runtime.settings.checks import (
    SECRET_SETTINGS,
    check_setting,
    declared_settings,
    validate,
)

DEFAULT_FILE = Path(__file__).parent.with_name("baton.toml")
ENVIRONMENT_PREFIX = "BATON_"
_YES = ("true", "yes", "on", "1")
_NO = ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class _Given:
    """A value and where it stands; `text` if it is still a string to be read."""

    section: str
    key: str
    value: Any
    source: str
    text: bool


def load(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]) -> Config:
    """The settings of this process. `flags` maps "section.key" to text.

    Environment variables without "__" after the prefix are not settings and are left alone.
    Raises ConfigError for an unreadable file, an unknown name, a wrong type, a value out of
    bounds or a contradiction.
    """
    config = Config()
    for given in _all_given(file, environ, flags):
        config = _with(config, given)
    validate(config)
    return config


def given_names(
    file: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]
) -> frozenset[str]:
    """The settings that `load` would not leave at their defaults, as "section.key". Raises
    ConfigError for an unreadable file."""
    given = _all_given(file, environ, flags)
    return frozenset(f"{each.section}.{each.key}" for each in given)


def _all_given(
    file: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]
) -> Iterator[_Given]:
    """The weakest first."""
    yield from _from_file(file)
    yield from _from_environment(environ)
    yield from _from_flags(flags)


def check(name: str, text: str) -> None:
    """Raise ConfigError unless there is a setting `name` that may be `text`, by itself."""
    section, _, key = name.partition(".")
    check_setting(_with(Config(), _Given(section, key, text, "", text=True)), name)


def names() -> list[str]:
    """Every setting as "section.key"."""
    return list(declared_settings())


def _from_file(file: Path | None) -> Iterator[_Given]:
    if file is None:
        return
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also of numbers and of lists without end
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    for section, keys in content.items():
        if not isinstance(keys, dict):
            raise ConfigError(f"{file}: put `{section}` under a section such as [router]")
        if section not in section_names():
            raise ConfigError(_unknown(section, "", str(file)))
        for key, value in keys.items():
            yield _Given(section, key, value, str(file), text=False)


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Given]:
    for name in sorted(environ):
        section, separator, key = name.removeprefix(ENVIRONMENT_PREFIX).partition("__")
        if name.startswith(ENVIRONMENT_PREFIX) and separator:
            yield _Given(section.lower(), key.lower(), environ[name], name, text=True)


def _from_flags(flags: Mapping[str, str]) -> Iterator[_Given]:
    for name, value in flags.items():
        section, _, key = name.partition(".")
        yield _Given(section, key, value, f"--set {name}", text=True)


def _with(config: Config, given: _Given) -> Config:
    if f"{given.section}.{given.key}" not in names():
        raise ConfigError(_unknown(given.section, given.key, given.source))
    section = getattr(config, given.section)
    kind = get_type_hints(type(section))[given.key]
    value = _read(given.value, kind) if given.text else _convert(given.value, kind)
    if value is None:
        name = f"{given.section}.{given.key}"
        found = "of another type" if name in SECRET_SETTINGS else repr(given.value)
        raise ConfigError(f"{_at(given.source)}{name} is {found}: give {_describe(kind)}")
    return replace(config, **{given.section: replace(section, **{given.key: value})})


def _unknown(section: str, key: str, source: str) -> str:
    name = f"{section}.{key}".rstrip(".")
    near = difflib.get_close_matches(name, [*names(), *section_names()], n=1, cutoff=0.75)
    if near:
        hint = f"did you mean {near[0]}?"
    elif section in section_names():
        hint = f"{section} has {', '.join(n for n in names() if n.startswith(section + '.'))}"
    else:
        hint = f"the sections are {', '.join(section_names())}"
    return f"{_at(source)}there is no setting {name}; {hint}"


def _at(source: str) -> str:
    return f"{source}: " if source else ""


def _read(text: str, kind: Any) -> Any:
    """A value from text, or None if it is not one of `kind`."""
    if kind is bool:
        lowered = text.strip().lower()
        return True if lowered in _YES else False if lowered in _NO else None
    if kind in (int, float):
        try:
            return kind(text.strip().replace("_", ""))
        except ValueError:
            return None
    if get_origin(kind) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return _convert(text, kind)


def _convert(value: Any, kind: Any) -> Any:
    """A TOML value as `kind`, or None if it is of another type."""
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) and isinstance(value, str) else None
    if get_origin(kind) is tuple:
        fits = isinstance(value, list) and all(isinstance(part, str) for part in value)
        return tuple(value) if fits else None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value if type(value) is kind else None


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is tuple:
        return "a list of strings (in the environment and in flags: separated by commas)"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
