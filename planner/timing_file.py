"""Timing models and samples as files.

A model is one JSON object: `name`, `kv_bytes_per_token`, and for each part of timing_model.py an
object of its coefficients; `errors` is what the fit reported. Samples are JSON lines:

    {"kind": "chunk", "tokens": 512, "pairs": 131328, "seconds": 0.021}

Files are read strictly: an unknown or missing field, a wrong type, a negative or infinite number
is an error that names the file and the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from baton.planner.timing_fit import AMOUNTS, Fit, FitError, TimingSample
from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    HostTiming,
    Roofline,
    StepTiming,
    TimingModel,
    TransferTiming,
)
from baton.runtime.errors import ConfigError

PARTS = ("chunk", "step", "attention", "transfer", "host", "roofline")
MAX_FILE_BYTES = 64 << 20
MAX_NUMBER = 1e18
MAX_NAME_CHARACTERS = 200
_Part = TypeVar("_Part")


def write_fit(fit: Fit, path: Path) -> None:
    """Write a fitted model and its errors. Raises ConfigError for a model that `read_fit` would
    refuse."""
    _require_times(fit.model, "the fit")
    path.write_text(json.dumps(fit_to_json(fit), indent=2) + "\n")


def fit_to_json(fit: Fit) -> dict[str, Any]:
    return {**asdict(fit.model), "errors": {kind: asdict(e) for kind, e in fit.errors.items()}}


def read_fit(path: Path) -> Fit:
    """Read a model. Raises ConfigError."""
    try:
        found = json.loads(_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return fit_from_json(found, str(path))


def fit_from_json(found: object, source: str) -> Fit:
    """Return the model of a parsed file. Raises ConfigError, which names `source` and the field."""
    values = _object(found, source, "the timing model")
    known = {"name", "kv_bytes_per_token", "errors", *PARTS}
    _check_fields(values, known, {"name", "kv_bytes_per_token", "chunk", "step"}, source, "")
    name = values["name"]
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARACTERS:
        raise ConfigError(f"{source}: name has to be 1 to {MAX_NAME_CHARACTERS} characters")
    model = TimingModel(
        name,
        _number(values["kv_bytes_per_token"], source, "kv_bytes_per_token"),
        _part(ChunkTiming, values, source, "chunk"),
        _part(StepTiming, values, source, "step"),
        _part(AttentionTiming, values, source, "attention"),
        _part(TransferTiming, values, source, "transfer"),
        _part(HostTiming, values, source, "host"),
        _part(Roofline, values, source, "roofline"),
    )
    _require_times(model, source)
    errors = {}
    for kind, error in _object(values.get("errors", {}), source, "errors").items():
        if kind not in AMOUNTS:
            raise ConfigError(f"{source}: errors.{kind} is not one of {', '.join(AMOUNTS)}")
        errors[kind] = _error(error, source, f"errors.{kind}")
    return Fit(model, errors)


def _require_times(model: TimingModel, source: str) -> None:
    """Raise ConfigError if a chunk or a decode step would take no time."""
    chunk, step, attention = model.chunk, model.step, model.attention
    for kind, terms in (
        ("chunk", (chunk.fixed_s, chunk.per_token_s, attention.per_pair_s)),
        ("step", (step.fixed_s, step.per_sequence_s, attention.per_context_token_s)),
    ):
        if not any(terms):
            raise ConfigError(
                f"{source}: all times of kind {kind!r} are 0, so these steps would take no time: "
                "measure them, or write an estimate"
            )


def read_samples(path: Path) -> list[TimingSample]:
    """Read samples, one JSON object a line. Raises ConfigError, which names line and field."""
    samples = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        source = f"{path}:{number}"
        try:
            values = _object(json.loads(line), source, "a sample")
        except ValueError as error:
            raise ConfigError(f"{source} is not JSON: {error}") from error
        samples.append(_sample(values, source))
    return samples


def _sample(values: Mapping[str, Any], source: str) -> TimingSample:
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in AMOUNTS:
        raise ConfigError(f"{source}: kind is {kind!r}, not one of {', '.join(AMOUNTS)}")
    names = AMOUNTS[kind]
    wanted = {"kind", "seconds", *names}
    _check_fields(values, wanted, wanted, source, "")
    amounts = tuple(_number(values[name], source, name) for name in names)
    seconds = _number(values["seconds"], source, "seconds")
    if not seconds:
        raise ConfigError(f"{source}: seconds is 0: leave samples out that the clock cannot see")
    return TimingSample(kind, amounts, seconds)


def _part(cls: type[_Part], model: Mapping[str, Any], source: str, path: str) -> _Part:
    values = _object(model.get(path, {}), source, path)
    # each caller's cls is a dataclass; no TypeVar can be bound to all dataclasses
    known = {each.name for each in fields(cls)}  # type: ignore[arg-type]
    _check_fields(values, known, set(), source, f"{path}.")
    return cls(**{key: _number(each, source, f"{path}.{key}") for key, each in values.items()})


def _error(found: object, source: str, path: str) -> FitError:
    values = _object(found, source, path)
    known = {"samples", "median", "p90"}
    _check_fields(values, known, known, source, f"{path}.")
    numbers = {key: _number(each, source, f"{path}.{key}") for key, each in values.items()}
    return FitError(int(numbers["samples"]), numbers["median"], numbers["p90"])


def _check_fields(
    values: Mapping[str, Any], known: set[str], wanted: set[str], source: str, prefix: str
) -> None:
    for name in sorted(values.keys() - known):
        raise ConfigError(
            f"{source}: unknown field {prefix}{name}; known are {', '.join(sorted(known))}"
        )
    for name in sorted(wanted - values.keys()):
        raise ConfigError(f"{source}: the field {prefix}{name} is missing")


def _object(found: object, source: str, what: str) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise ConfigError(f"{source}: {what} has to be a JSON object, not {type(found).__name__}")
    return found


def _number(found: object, source: str, path: str) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ConfigError(f"{source}: {path} has to be a number, not {type(found).__name__}")
    if not 0 <= found <= MAX_NUMBER:
        raise ConfigError(
            f"{source}: {path} is {str(found)[:40]}; it has to be finite, at most {MAX_NUMBER:g}, "
            "and not negative"
        )
    return float(found)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB: give fewer samples")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
