"""The sampling parameters of requests that leave them out, from a model's generation_config.json.

The fields mean what they mean to Hugging Face: `do_sample` false is greedy. Read once at start.
With `router.model_sampling` false the defaults are OpenAI's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.runtime.errors import ModelError


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults of the request fields with these names; the values here are OpenAI's."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


OPENAI = SamplingDefaults()
_RANGES = {  # as requests have them
    "temperature": (0.0, 2.0),
    "top_k": (0, (1 << 31) - 1),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 10.0),
}


def sampling_defaults(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """Read the content of a generation_config.json. Raises ModelError naming the field."""
    found: dict[str, Any] = {}
    for name, (least, most) in _RANGES.items():
        value = generation_config.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        whole = isinstance(getattr(OPENAI, name), int)
        if not number or not least <= value <= most or (whole and value != int(value)):
            raise ModelError(
                f"generation_config.json: {name} is {value!r}: set it from {least:g} to {most:g}, "
                "or set router.model_sampling to false"
            )
        found[name] = int(value) if whole else float(value)
    if generation_config.get("do_sample") is False:
        found["temperature"] = 0.0
    return SamplingDefaults(**found)
