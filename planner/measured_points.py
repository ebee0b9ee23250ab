"""Timing samples from published end-to-end measurements, where nothing was recorded.

Reads the CSV of aiconfigurator (ai-dynamo/aiconfigurator, Apache-2.0): each row has a model, a
system, a backend, lengths, a concurrency, and the measured TTFT and TPOT.

    TTFT at the lowest concurrency ─▶ a chunk of `isl` tokens (the queue is short, not empty)
    TPOT                           ─▶ a step of `concurrency` sequences with isl + osl / 2 tokens

Both hold what the server adds, so the coefficients are those of a whole server and not of kernels.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.planner.timing_fit import TimingSample
from baton.runtime.errors import ConfigError
from baton.runtime.worker.attention_pairs import causal_pairs

COLUMNS = ("isl", "osl", "batch_size", "silicon_ttft_ms", "silicon_tpot_ms")
FILTERED = ("model_path", "system", "backend", "tp_size", "mode")
MAX_VALUE = 1e9


@dataclass(frozen=True, slots=True)
class PointFilter:
    """The rows of one server: the values that these columns must have."""

    model: str
    system: str = "h200_sxm"
    backend: str = "vllm"
    tensor_parallel: int = 1

    def matches(self, row: Mapping[str, str]) -> bool:
        wanted = (self.model, self.system, self.backend, str(self.tensor_parallel), "agg")
        return tuple(row[name] for name in FILTERED) == wanted


def read_points(path: Path, chosen: PointFilter) -> list[TimingSample]:
    """Return chunk samples, the rows of the lowest concurrency for each prompt length, and a step
    sample for each row. Raises ConfigError, which names the line, or says that no row matches."""
    rows = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = sorted({*COLUMNS, *FILTERED} - set(reader.fieldnames or ()))
            if missing:
                raise ConfigError(f"{path} lacks the columns {', '.join(missing)}")
            for row in reader:
                if chosen.matches(row):
                    rows.append(_numbers(row, f"{path}:{reader.line_num}"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is not a CSV file: {error}") from error
    if not rows:
        raise ConfigError(f"{path} has no row of {chosen}")
    lowest: dict[float, float] = {}
    for isl, _, concurrency, _, _ in rows:
        lowest[isl] = min(concurrency, lowest.get(isl, concurrency))
    samples = []
    for isl, osl, concurrency, ttft_ms, tpot_ms in rows:
        if concurrency == lowest[isl]:
            pairs = float(causal_pairs(0, int(isl)))
            samples.append(TimingSample("chunk", (isl, pairs), ttft_ms / 1000))
        amounts = (concurrency, concurrency * (isl + osl / 2))
        samples.append(TimingSample("step", amounts, tpot_ms / 1000))
    return samples


def _numbers(row: Mapping[str, str], line: str) -> tuple[float, ...]:
    found = []
    for name in COLUMNS:
        try:
            value = float(row[name])
        except (TypeError, ValueError):
            raise ConfigError(f"{line}: {name} is {row[name]!r}, not a number") from None
        if not 0 < value < MAX_VALUE:
            raise ConfigError(f"{line}: {name} is {value}, not above 0 and below {MAX_VALUE:g}")
        found.append(value)
    return tuple(found)
