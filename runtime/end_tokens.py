"""The ids that end an answer, as a model folder names them. Keeps no state.

The router stops at them and the engine reports them, so both read them with this function.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from baton.runtime.errors import ModelError

_FIELD = "eos_token_id"


def end_tokens(
    folder: Path, config: Mapping[str, object], generation_config: Mapping[str, object]
) -> tuple[int, ...]:
    """Return the ids at `eos_token_id` of generation_config.json, which wins, or of config.json
    where the former has none; empty where neither has. Raises ModelError naming file and field
    for what is no token id."""
    name, values = "generation_config.json", generation_config
    if values.get(_FIELD) is None:
        name, values = "config.json", config
    found = values.get(_FIELD)
    ids = found if isinstance(found, list) else [] if found is None else [found]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ModelError(
                f"{folder / name}: {_FIELD}: {token!r} is not a token id; give a whole number "
                "from zero on, or a list of them"
            )
    return tuple(ids)
