"""Names for parsed JSON, so that a test says which of its values are some."""

from __future__ import annotations

from typing import Any

# What `json.loads` returns: tests walk it by keys and indices, and a type of all its forms would
# need a check of the form at each step.
Json = Any
JsonObject = dict[str, Json]
