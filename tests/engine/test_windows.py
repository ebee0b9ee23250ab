from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.engine.spec.model_spec import ModelSpec
from baton.runtime.errors import ModelError
from tests.support.json_values import JsonObject

FULL, LOCAL = "full_attention", "sliding_attention"
MISTRAL, QWEN2, QWEN3, PHI3, GEMMA2, GEMMA3 = (
    {"architectures": [f"{name}ForCausalLM"]}
    for name in ("Mistral", "Qwen2", "Qwen3", "Phi3", "Gemma2", "Gemma3")
)
FOUR = {"num_hidden_layers": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (0, 0)),
        ({"sliding_window": 7}, (0, 0)),  # not a field of Llama
        ({"layer_types": [FULL, FULL]}, (0, 0)),
        ({**MISTRAL, "sliding_window": 100}, (100, 100)),
        ({**MISTRAL, "sliding_window": 100, "layer_types": [LOCAL, LOCAL]}, (100, 100)),
        ({**MISTRAL, "sliding_window": None}, (0, 0)),
        ({**MISTRAL, "sliding_window": 256}, (0, 0)),  # hides nothing of the context
        # A scaled rotary embedding reaches further than that field says.
        ({**MISTRAL, "sliding_window": 256, "rope_scaling": YARN}, (256, 256)),
        ({**MISTRAL, "sliding_window": 256, "rope_scaling": DYNAMIC}, (256, 256)),
        ({**MISTRAL, "sliding_window": 1024, "rope_scaling": YARN}, (0, 0)),
        ({**MISTRAL, "max_position_embeddings": 8192}, (4096, 4096)),  # the class's own
        ({**PHI3, "sliding_window": 100}, (100, 100)),
        (PHI3, (0, 0)),
        ({**QWEN2, "sliding_window": 16}, (0, 0)),  # switched off
        ({**QWEN2, "sliding_window": 16, "use_sliding_window": False}, (0, 0)),
        ({**QWEN2, "sliding_window": 16, "use_sliding_window": True}, (0, 0)),  # 28 full first
        ({**QWEN3, "sliding_window": None, "use_sliding_window": True}, (0, 0)),
        (
            {**QWEN3, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0},
            (9, 9),
        ),
        (
            {**QWEN3, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
            (0, 9),
        ),
        (
            {
                **QWEN3,
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": [LOCAL, FULL],
            },
            (9, 0),
        ),
        ({**GEMMA2, **FOUR, "sliding_window": 9}, (9, 0, 9, 0)),
        ({**GEMMA2, **FOUR, "max_position_embeddings": "absent"}, (4096, 0, 4096, 0)),
        ({**GEMMA2, "sliding_window": 9, "layer_types": [FULL, LOCAL]}, (0, 9)),
        ({**GEMMA2, "sliding_window": None, "layer_types": [FULL, FULL]}, (0, 0)),
        ({**GEMMA3, "num_hidden_layers": 7, "sliding_window": 9}, (9, 9, 9, 9, 9, 0, 9)),
        ({**GEMMA3, **FOUR, "sliding_window": 9, "sliding_window_pattern": 3}, (9, 9, 0, 9)),
        # The window also decides the rotary embedding, so it counts though it hides nothing.
        ({**GEMMA3, "sliding_window": 512}, (512, 512)),
    ],
)
def test_windows(
    spec_of: Callable[..., ModelSpec], changes: JsonObject, windows: tuple[int, ...]
) -> None:
    assert spec_of(**changes).attention.windows == windows


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("layer_types", {"layer_types": [FULL, LOCAL]}),
        ("layer_types", {"layer_types": [FULL]}),
        ("layer_types", {"layer_types": FULL}),
        ("layer_types", {"layer_types": [FULL, "chunked_attention"]}),
        ("layer_types", {**MISTRAL, "sliding_window": 9, "layer_types": [FULL, LOCAL]}),
        ("layer_types", {**MISTRAL, "sliding_window": None, "layer_types": [LOCAL, LOCAL]}),
        ("layer_types", {**QWEN2, "sliding_window": 9, "layer_types": [FULL, LOCAL]}),
        ("layer_types", {**GEMMA2, "sliding_window": None, "layer_types": [FULL, LOCAL]}),
        ("sliding_window", {**MISTRAL, "sliding_window": 0}),
        ("sliding_window", {**GEMMA3, "sliding_window": -1}),
        ("sliding_window_pattern", {**GEMMA3, "sliding_window_pattern": 0}),
        (
            "max_window_layers",
            {
                **QWEN2,
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": -1,
            },
        ),
    ],
)
def test_refused_by_name(
    spec_of: Callable[..., ModelSpec], field: str, changes: JsonObject
) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {field}: "):
        spec_of(**changes)
