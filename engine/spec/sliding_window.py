"""The sliding window of each layer, by the rule of its family.

A window counts the token itself, as in transformers. The module knows no tensors and keeps no
state.
"""

from __future__ import annotations

from baton.engine.spec.config_fields import ConfigFields
from baton.engine.spec.families import Family

_FULL, _WINDOW = "full_attention", "sliding_attention"


def read_windows(
    fields: ConfigFields, family: Family, layers: int, context: int
) -> tuple[int, ...]:
    """Return the window of each layer in tokens; 0: full attention. Raises ModelError.

    A window as long as `context`, the model's maximum, hides nothing and counts as none, unless it
    decides which rotary embedding a layer has.
    """
    kinds = _kinds(fields, family, layers)
    if _WINDOW not in kinds:
        return (0,) * layers
    if _window_is_off(fields, family):
        raise fields.error("layer_types", f"{_WINDOW} is named, but no sliding_window is in use")
    window = fields.integer("sliding_window")
    if window >= context and not family.two_ropes:
        return (0,) * layers
    return tuple(window if kind == _WINDOW else 0 for kind in kinds)


def _kinds(fields: ConfigFields, family: Family, layers: int) -> list[str]:
    """Return the attention type of every layer, from `layer_types` if the family reads it."""
    computed = _computed_kinds(fields, family, layers)
    given = fields.get("layer_types")
    if given is None:
        return computed
    if not isinstance(given, list) or len(given) != layers:
        raise fields.error("layer_types", f"is not a list of {layers} names, one per layer")
    for kind in given:
        if kind not in (_FULL, _WINDOW):
            raise fields.error(
                "layer_types", f"{kind!r} is not supported; only {_FULL} and {_WINDOW} are"
            )
    if family.windows in ("none", "all") and given != computed:
        raise fields.error("layer_types", f"{family.name} supports only {computed[0]}")
    return given


def _computed_kinds(fields: ConfigFields, family: Family, layers: int) -> list[str]:
    """Return the attention types of a configuration without `layer_types`."""
    if family.windows == "alternating":
        every = fields.integer("sliding_window_pattern")
        return [_FULL if (layer + 1) % every == 0 else _WINDOW for layer in range(layers)]
    if family.windows == "none" or _window_is_off(fields, family):
        return [_FULL] * layers
    first = fields.count("max_window_layers", 28) if family.windows == "switched" else 0
    return [_FULL if layer < first else _WINDOW for layer in range(layers)]


def _window_is_off(fields: ConfigFields, family: Family) -> bool:
    if family.windows == "switched" and not fields.flag("use_sliding_window", False):
        return True
    return fields.get("sliding_window") is None
