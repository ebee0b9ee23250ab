"""Products that keep rows apart: right, and bit by bit the same, under Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.support.json_values import JsonObject


@pytest.mark.parametrize(
    "name",
    [
        "linear, float32",
        "linear, float32, bits",
        "linear, bfloat16",
        "linear, bfloat16, bits",
        "linear, float16, whole tiles, bits",
        "products of heads",
    ],
)
def test_parity(product_checks: dict[str, JsonObject], name: str) -> None:
    assert product_checks[name]["good"], product_checks[name]["said"]
