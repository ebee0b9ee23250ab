"""Figures over minutes as a PNG, no plotting library needed: the loss of a training run, or what
a process holds.

Losses on a logarithmic height, other figures on an even one; a line for each run, ticks with
figures. Knows no training.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]  # [height, width, rgb]
Points = Sequence[tuple[float, float]]  # minute, figure

_WIDTH, _HEIGHT = 800, 400
_LEFT, _BOTTOM, _MARGIN = 60, 40, 15
_SCALE = 2  # pixels of a digit's dot
_LOWEST = 1e-4
COLOURS = {  # of the lines, in their order
    "blue": (20, 90, 200), "orange": (210, 90, 20), "green": (20, 140, 60), "red": (200, 30, 60),
    "violet": (130, 60, 180), "teal": (0, 140, 150), "brown": (120, 80, 40), "black": (20, 20, 20),
}  # fmt: skip
_TICKS = 4
_GREY, _DARK = (215, 215, 215), (60, 60, 60)
_GLYPHS = {  # three dots a row, five rows
    "0": "111101101101111", "1": "010110010010111", "2": "111001111100111",
    "3": "111001111001111", "4": "101101111001001", "5": "111100111001111",
    "6": "111100111101111", "7": "111001001001001", "8": "111101111101111",
    "9": "111101111001111", ".": "000000000000010",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Heights:
    """The scale of the height: figures, or their decimal logarithms."""

    low: float
    high: float
    ticks: list[tuple[float, str]]
    logarithmic: bool

    def y(self, figure: float) -> int:
        height = float(np.log10(max(figure, _LOWEST))) if self.logarithmic else figure
        share = (self.high - height) / (self.high - self.low)
        return round(_MARGIN + (_HEIGHT - _BOTTOM - _MARGIN - 1) * share)


def write_curve(path: Path, runs: Mapping[str, Points], *, logarithmic: bool = True) -> None:
    """One line for each run with at least one point, one after the other in time."""
    path.write_bytes(_png(draw(runs, logarithmic=logarithmic)))


def draw(runs: Mapping[str, Points], *, logarithmic: bool = True) -> Pixels:
    """The picture of `write_curve`. Minutes and figures are marked at the axes."""
    picture = np.full((_HEIGHT, _WIDTH, 3), 255, dtype=np.uint8)
    points = [point for run in runs.values() for point in run]
    if not points:
        return picture
    last = max(minute for minute, _ in points) or 1.0
    heights = (_decades if logarithmic else _even)([figure for _, figure in points])
    for figure, text in heights.ticks:
        y = heights.y(figure)
        picture[y, _LEFT : _WIDTH - _MARGIN] = _GREY
        _write(picture, 4, y - 5, text)
    for part in range(5):
        minute = last * part / 4
        x = _x(minute, last)
        picture[_MARGIN : _HEIGHT - _BOTTOM, x] = _GREY
        _write(picture, x - 8, _HEIGHT - _BOTTOM + 8, f"{minute:.1f}")
    colours = list(COLOURS.values())
    for at, run in enumerate(runs.values()):
        corners = [(_x(minute, last), heights.y(figure)) for minute, figure in run]
        for start, end in zip(corners, corners[1:] or corners, strict=False):
            _line(picture, start, end, colours[at % len(colours)])
    return picture


def _decades(losses: Sequence[float]) -> _Heights:
    logs = np.log10(np.maximum(losses, _LOWEST))
    low, high = int(np.floor(logs.min())), int(np.ceil(logs.max()))
    high = max(high, low + 1)
    ticks = [(10.0**decade, f"{10.0**decade:g}") for decade in range(low, high + 1)]
    return _Heights(low, high, ticks, True)


def _even(figures: Sequence[float]) -> _Heights:
    low = float(np.floor(min(figures)))
    high = max(float(np.ceil(max(figures))), low + 1.0)
    points = [low + (high - low) * part / _TICKS for part in range(_TICKS + 1)]
    return _Heights(low, high, [(figure, f"{figure:.1f}") for figure in points], False)


def _x(minute: float, last: float) -> int:
    return round(_LEFT + (_WIDTH - _LEFT - _MARGIN - 1) * minute / last)


def _line(
    picture: Pixels, start: tuple[int, int], end: tuple[int, int], colour: tuple[int, ...]
) -> None:
    count = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1) + 1
    xs = np.linspace(start[0], end[0], count).round().astype(int)
    ys = np.linspace(start[1], end[1], count).round().astype(int)
    picture[ys, xs] = colour
    picture[ys + 1, xs] = colour


def _write(picture: Pixels, x: int, y: int, text: str) -> None:
    for sign in text:
        for at, dot in enumerate(_GLYPHS[sign]):
            if dot == "1":
                top, left = y + at // 3 * _SCALE, x + at % 3 * _SCALE
                picture[top : top + _SCALE, left : left + _SCALE] = _DARK
        x += 4 * _SCALE


def _png(picture: Pixels) -> bytes:
    """Eight bits a channel, rows unfiltered (the PNG specification, W3C, section 5)."""
    height, width, _ = picture.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), picture.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
