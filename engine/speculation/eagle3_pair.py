"""Whether an EAGLE-3 head fits its target: refused at start-up, by name.

A wrong pair proposes tokens that the target never draws, without a word: an EAGLE-3 head that is
computed as an EAGLE head is accepted at no position. Reads configurations and headers; knows no
weights.
"""

from __future__ import annotations

from pathlib import Path

from baton.engine.checkpoint.eagle3_weights import fused_columns
from baton.engine.spec.config_fields import read_fields
from baton.engine.spec.eagle3_spec import STATES, Eagle3Spec, head_kind, read_eagle3_spec
from baton.engine.spec.model_spec import ModelSpec
from baton.runtime.errors import ModelError


def head_spec_for(target: ModelSpec, folder: Path, context: int) -> Eagle3Spec:
    """Read the EAGLE-3 head of `folder` and check that it fits `target`. Raises ModelError, naming
    each difference with both values."""
    kind = head_kind(read_fields(folder / "config.json"))
    columns = fused_columns(folder)
    if kind == "none" and not columns:
        raise ModelError(
            f"{folder} holds no EAGLE-3 head: config.json names none, and no file has fc.weight; "
            "speculate by draft=FOLDER if it is a draft model"
        )
    if kind == "eagle" or columns == 2 * target.hidden_size:
        raise ModelError(
            f"{folder} holds an EAGLE head, whose fc reads {columns} numbers of a token; an "
            f"EAGLE-3 head reads {STATES * target.hidden_size} of this model: give one of those"
        )
    spec = read_eagle3_spec(folder, context)
    wrong = _differences(spec, target, columns)
    if wrong:
        raise ModelError(
            f"the EAGLE-3 head in {folder} does not fit the model: {'; '.join(wrong)}; give a "
            "head that was trained for this model"
        )
    return spec


def refuse_head(folder: Path) -> None:
    """Raise ModelError for a folder that holds a head, where a draft model is expected."""
    kind = head_kind(read_fields(folder / "config.json"))
    if kind == "none" and not fused_columns(folder):
        return
    named = {"eagle": "an EAGLE head", "eagle3": "an EAGLE-3 head", "none": "a head"}[kind]
    raise ModelError(
        f"{folder} holds {named}, which is no draft model; speculate by eagle3=FOLDER where it is "
        "an EAGLE-3 head"
    )


def _differences(spec: Eagle3Spec, target: ModelSpec, columns: int) -> list[str]:
    wrong = []
    if spec.layer.vocab_size != target.vocab_size:
        wrong.append(f"its vocabulary has {spec.layer.vocab_size} tokens, not {target.vocab_size}")
    if spec.target_hidden_size != target.hidden_size:
        wrong.append(
            f"its target's hidden size is {spec.target_hidden_size}, not {target.hidden_size}"
        )
    elif columns != STATES * target.hidden_size:
        wrong.append(
            f"its fc reads {columns} numbers of a token, not {STATES} x {target.hidden_size}"
        )
    layers = spec.layers_of(target.layers)
    if len(set(layers)) != STATES or min(layers) < 0 or max(layers) > target.layers:
        wrong.append(f"it reads the layers {list(layers)} of a model of {target.layers} layers")
    return wrong
