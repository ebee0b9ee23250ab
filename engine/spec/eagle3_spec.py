"""An EAGLE-3 head as its `config.json` states it, in both published layouts (arXiv:2503.01840).

    SafeAILab, SpecForge   one flat object; `eagle_config` names layers by their output
    speculators            `transformer_layer_config`; the top names layers by their input

A head is one layer that reads three of the target's hidden states, of the inputs of some layers.
Knows no tensors; whether a head fits its target is decided by `eagle3_drafter`. Immutable.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from baton.engine.spec.config_fields import ConfigFields, read_fields
from baton.engine.spec.model_spec import ModelSpec, read_decoder

STATES = 3  # hidden states of the target that a head reads for each token
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Variants that compute something else, and the values with which they do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "fc_norm": (False,),
    "norm_before_fc": (False,),
    "norm_output": (False,),
    "parallel_drafting": (False,),
    "tie_word_embeddings": (False,),
}

HeadKind = Literal["eagle3", "eagle", "none"]


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """`layer` is the head's one layer: its `vocab_size` is the target's, its `features` the
    numbers that a token keeps of the target's hidden states."""

    layer: ModelSpec
    draft_vocab_size: int
    target_hidden_size: int
    norm_before_residual: bool
    state_layers: tuple[int, ...] = ()  # whose inputs are read; none: `default_layers`

    def layers_of(self, target_layers: int) -> tuple[int, ...]:
        """Return the layers of a target of so many whose inputs the head reads; the number of
        layers itself stands for the output of the last."""
        return self.state_layers or default_layers(target_layers)


def default_layers(target_layers: int) -> tuple[int, ...]:
    """Return the low, middle and high layer of heads whose configuration names none."""
    return 2, target_layers // 2, target_layers - 3


def head_kind(fields: ConfigFields) -> HeadKind:
    """Return which head a `config.json` describes, if it says so."""
    speculator = fields.get("speculators_model_type")
    if speculator is not None:
        return "eagle3" if speculator == "eagle3" else "eagle"
    names = fields.get("architectures")
    spelled = " ".join(map(str, names)).lower() if isinstance(names, list) else ""
    if "eagle3" in spelled or fields.get("draft_vocab_size") is not None:
        return "eagle3"
    return "eagle" if "eagle" in spelled else "none"


def describes_eagle3(folder: Path) -> bool:
    """Return whether a folder's `config.json` is that of an EAGLE-3 head. Raises ModelError."""
    return head_kind(read_fields(folder / "config.json")) == "eagle3"


def read_eagle3_spec(folder: Path, context: int = 0) -> Eagle3Spec:
    """Read a head's `config.json`; `context` as in `read_spec`. Raises ModelError naming the
    field for what is missing, malformed or not computed here."""
    top = read_fields(folder / "config.json")
    section = top.section("transformer_layer_config")
    fields = section if section.values else top
    _refuse_variants(top, fields)
    renamed = {**fields.values, "architectures": ["LlamaForCausalLM"]}
    layer = read_decoder(ConfigFields(fields.path, renamed, fields.prefix), context, ())
    if layer.layers != 1:
        raise fields.error("num_hidden_layers", f"{layer.layers}: an EAGLE-3 head has one layer")
    return Eagle3Spec(
        layer=replace(layer, features=layer.hidden_size),
        draft_vocab_size=top.integer("draft_vocab_size", layer.vocab_size, layer.vocab_size),
        target_hidden_size=top.integer("target_hidden_size", layer.hidden_size),
        norm_before_residual=top.flag("norm_before_residual", False),
        state_layers=_state_layers(top),
    )


def _refuse_variants(top: ConfigFields, fields: ConfigFields) -> None:
    for part in (top, fields):
        for name, values in _NEUTRAL.items():
            value = part.get(name)
            if value is not None and value not in values:
                raise part.error(name, f"{value!r} is not supported for an EAGLE-3 head")
        if part.get("sliding_window") is not None and part.flag("use_sliding_window", True):
            raise part.error("sliding_window", "is not supported for an EAGLE-3 head")


def _state_layers(top: ConfigFields) -> tuple[int, ...]:
    """Return the layers whose inputs are read: `eagle_config` names those whose outputs are."""
    nested = top.section("eagle_config")
    if not nested.flag("use_aux_hidden_state", True):
        raise nested.error("use_aux_hidden_state", "false: an EAGLE-3 head reads hidden states")
    if top.get(_LAYER_IDS) is not None:
        return _ids(top)
    return tuple(layer + 1 for layer in _ids(nested))


def _ids(fields: ConfigFields) -> tuple[int, ...]:
    value = fields.get(_LAYER_IDS)
    if value is None:
        return ()
    valid = isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
    if not valid or not isinstance(value, list) or len(set(value)) != STATES:
        raise fields.error(_LAYER_IDS, f"{value!r} is not a list of {STATES} layers")
    return tuple(value)
