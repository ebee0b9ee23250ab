"""The norm kernel's parity, and that it is the norm that torch computes."""

from __future__ import annotations

import pytest

from tests.support.json_values import JsonObject

KINDS = ["add_rms_norm fp32", "add_rms_norm bf16", "add_rms_norm one plus weight"]


OTHERS = ["rms_norm of heads inside a wider row", "rms_norm bits do not depend on the rows"]


@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_parity(product_checks: dict[str, JsonObject], name: str) -> None:
    assert product_checks[name]["good"], product_checks[name]["said"]
