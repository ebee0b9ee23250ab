"""The loss of a training run over its minutes, as a PNG: no plotting library is needed.

Loss on a logarithmic height, a line for each model, ticks with figures. Knows no training.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]  # [height, width, rgb]
Points = Sequence[tuple[float, float]]  # minute, loss

_WIDTH, _HEIGHT = 800, 400
_LEFT, _BOTTOM, _MARGIN = 60, 40, 15
_SCALE = 2  # pixels of a digit's dot
_LOWEST = 1e-4
_LINES = ((20, 90, 200), (210, 90, 20))
_GREY, _DARK = (215, 215, 215), (60, 60, 60)
_GLYPHS = {  # three dots a row, five rows
    "0": "111101101101111", "1": "010110010010111", "2": "111001111100111",
    "3": "111001111001111", "4": "101101111001001", "5": "111100111001111",
    "6": "111100111101111", "7": "111001001001001", "8": "111101111101111",
    "9": "111101111001111", ".": "000000000000010",
}  # fmt: skip


def write_curve(path: Path, runs: Mapping[str, Points]) -> None:
    """One line for each run with at least one point, one after the other in time."""
    path.write_bytes(_png(draw(runs)))


def draw(runs: Mapping[str, Points]) -> Pixels:
    """The picture of `write_curve`. Minutes and losses are marked at the axes."""
    picture = np.full((_HEIGHT, _WIDTH, 3), 255, dtype=np.uint8)
    points = [point for run in runs.values() for point in run]
    if not points:
        return picture
    last = max(minute for minute, _ in points) or 1.0
    low, high = _decades([loss for _, loss in points])
    for decade in range(low, high + 1):
        y = _y(float(decade), low, high)
        picture[y, _LEFT : _WIDTH - _MARGIN] = _GREY
        _write(picture, 4, y - 5, f"{10.0**decade:g}")
    for part in range(5):
        minute = last * part / 4
        x = _x(minute, last)
        picture[_MARGIN : _HEIGHT - _BOTTOM, x] = _GREY
        _write(picture, x - 8, _HEIGHT - _BOTTOM + 8, f"{minute:.1f}")
    for at, run in enumerate(runs.values()):
        places = [
            (_x(minute, last), _y(float(np.log10(max(loss, _LOWEST))), low, high))
            for minute, loss in run
        ]
        for start, end in zip(places, places[1:] or places, strict=False):
            _line(picture, start, end, _LINES[at % len(_LINES)])
    return picture


def _decades(losses: Sequence[float]) -> tuple[int, int]:
    logs = np.log10(np.maximum(losses, _LOWEST))
    low, high = int(np.floor(logs.min())), int(np.ceil(logs.max()))
    return low, max(high, low + 1)


def _x(minute: float, last: float) -> int:
    return round(_LEFT + (_WIDTH - _LEFT - _MARGIN - 1) * minute / last)


def _y(log: float, low: int, high: int) -> int:
    share = (high - log) / (high - low)
    return round(_MARGIN + (_HEIGHT - _BOTTOM - _MARGIN - 1) * share)


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
