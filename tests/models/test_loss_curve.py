"""The loss curve: a PNG that any reader takes, and a line where the losses are."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

from baton.models.training.loss_curve import draw, write_curve

FALLING = [(float(minute), 8.0 * 0.9**minute) for minute in range(60)]


def columns_of(picture: np.ndarray, colour: tuple[int, int, int]) -> dict[int, int]:
    """The highest pixel of that colour in each column."""
    ys, xs = np.nonzero((picture == colour).all(axis=2))
    found: dict[int, int] = {}
    for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
        found[x] = min(y, found.get(x, y))
    return found


def test_a_falling_loss_is_a_falling_line() -> None:
    line = columns_of(draw({"one": FALLING}), (20, 90, 200))
    assert len(line) > 600
    heights = [line[x] for x in sorted(line)]
    assert heights == sorted(heights)
    assert heights[-1] - heights[0] > 150


def test_every_run_has_a_line_of_its_own() -> None:
    picture = draw({"one": FALLING, "two": [(m, loss * 2) for m, loss in FALLING[:30]]})
    one, two = columns_of(picture, (20, 90, 200)), columns_of(picture, (210, 90, 20))
    assert max(two) < max(one)
    assert two[min(two)] < one[min(one)]


def test_on_an_even_height_equal_steps_are_equally_high() -> None:
    rising = [(float(minute), 600.0 + minute) for minute in range(61)]
    level = [(0.0, 660.0), (60.0, 660.0)]
    picture = draw({"one": rising, "two": level}, logarithmic=False)
    one, two = columns_of(picture, (20, 90, 200)), columns_of(picture, (210, 90, 20))
    columns = sorted(one)
    quarters = [one[columns[len(columns) * part // 4]] for part in range(4)]
    steps = [a - b for a, b in zip(quarters, quarters[1:], strict=False)]
    assert min(steps) > 50 and max(steps) - min(steps) <= 3
    assert len(set(two.values())) == 1 and abs(two[columns[-20]] - one[columns[-1]]) <= 2
    assert columns_of(draw({"flat": [(0.0, 0.0)]}, logarithmic=False), (20, 90, 200))


def test_few_points_and_odd_losses_are_drawn_too() -> None:
    assert (draw({}) == 255).all()
    assert (draw({"one": []}) == 255).all()
    assert columns_of(draw({"one": [(0.0, 1.0)]}), (20, 90, 200))
    assert columns_of(draw({"one": [(0.0, 5.0), (1.0, 0.0)]}), (20, 90, 200))


def test_the_file_is_a_png_with_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "loss.png"
    write_curve(path, {"one": FALLING})
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, parts = 8, {}
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", data, at + 8 + length)[0] == zlib.crc32(kind + body)
        parts[kind] = body
        at += 12 + length
    width, height, depth, colour = struct.unpack_from(">IIBB", parts[b"IHDR"])
    assert (width, height, depth, colour) == (800, 400, 8, 2)
    rows = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, -1)
    assert (rows[:, 0] == 0).all()
    assert (rows[:, 1:].reshape(height, width, 3) == draw({"one": FALLING})).all()
