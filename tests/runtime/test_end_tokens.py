"""The end tokens of a folder: the router and the engine read the same ones, or both refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.engine.spec.model_spec import read_spec
from baton.router.templates.model_card import read_card
from baton.runtime.errors import ModelError
from tests.support.json_values import JsonObject

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
    "max_position_embeddings": 256,
}


def folder_with(folder: Path, ends: JsonObject, generation: JsonObject | None) -> Path:
    (folder / "config.json").write_text(json.dumps({**MODEL, **ends}))
    (folder / "tokenizer.json").write_text("{}")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("ends", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, {2}),
        ({"eos_token_id": [2, 7]}, {}, {2, 7}),
        ({"eos_token_id": 2}, {"eos_token_id": [5, 6]}, {5, 6}),
        ({"eos_token_id": 2}, {"eos_token_id": 0}, {0}),
        ({"eos_token_id": 2}, {"eos_token_id": None}, {2}),
        ({"eos_token_id": 2}, {"eos_token_id": []}, set()),
        ({"eos_token_id": None}, None, set()),
        ({}, {"temperature": 0.6}, set()),
    ],
)
def test_router_and_engine_read_the_same_end_tokens(
    tmp_path: Path, ends: JsonObject, generation: JsonObject | None, expected: set[int]
) -> None:
    folder = folder_with(tmp_path, ends, generation)
    assert set(read_spec(folder).eos_ids) == read_card(folder, "m").end_tokens == expected


@pytest.mark.parametrize("value", ["2", -1, True, 2.0, {"id": 2}, [1, "x"], [None]])
@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_router_and_engine_refuse_what_is_no_token_id(
    tmp_path: Path, value: object, where: str
) -> None:
    bad, good = {"eos_token_id": value}, {"eos_token_id": 3}
    ends, generation = (bad, None) if where == "config.json" else (good, bad)
    folder = folder_with(tmp_path, ends, generation)
    message = rf"/{where}: eos_token_id: .* is not a token id"
    with pytest.raises(ModelError, match=message):
        read_spec(folder)
    with pytest.raises(ModelError, match=message):
        read_card(folder, "m")
