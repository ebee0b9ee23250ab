from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.engine.spec.model_spec import ModelSpec
from baton.engine.spec.rope_spec import RopeSpec
from baton.runtime.errors import ModelError
from tests.support.json_values import JsonObject

LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
GEMMA3 = ["Gemma3ForCausalLM"]
FULL, LOCAL = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 9.0, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_theta": 9.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}},
    ],
)
def test_both_forms_of_rope(spec_of: Callable[..., ModelSpec], changes: JsonObject) -> None:
    assert spec_of(**changes).rope == RopeSpec("linear", 9.0, 2.0)


def test_yarn_and_dynamic_reach_beyond_the_trained_length(
    spec_of: Callable[..., ModelSpec],
) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}
    assert spec_of(rope_scaling=yarn).max_context == 800
    assert spec_of(rope_scaling={"rope_type": "dynamic", "factor": 2.0}).max_context == 512
    assert spec_of(rope_scaling={"rope_type": "linear", "factor": 2.0}).max_context == 256


def test_top_level_original_length_wins(spec_of: Callable[..., ModelSpec]) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}
    spec = spec_of(rope_scaling=yarn, original_max_position_embeddings=100)
    assert spec.rope.original_context == 100


def test_rope_scaling_wins_over_rope_parameters(spec_of: Callable[..., ModelSpec]) -> None:
    both = {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 7}}
    assert spec_of(**both).rope == RopeSpec("linear", 5000.0, 2.0)


@pytest.mark.parametrize(
    ("context", "stretch"), [(0, 2.0), (256, 2.0), (101, 2.0), (100, 1.0), (7, 1.0)]
)
def test_longrope_takes_one_set_by_the_context(
    spec_of: Callable[..., ModelSpec], context: int, stretch: float
) -> None:
    rope = {**LONG, "original_max_position_embeddings": 100}
    found = spec_of(context=context, rope_scaling=rope).rope
    assert (found.kind, found.stretch) == ("longrope", (stretch,) * 8)
    assert (found.factor, found.original_context) == (2.56, 100)


def test_phi3_has_its_original_length_and_old_longrope_name(
    spec_of: Callable[..., ModelSpec],
) -> None:
    spec = spec_of(
        architectures=["Phi3ForCausalLM"],
        max_position_embeddings=8192,
        rope_scaling={**LONG, "type": "su", "original_max_position_embeddings": 100},
    )
    assert (spec.rope.kind, spec.rope.original_context) == ("longrope", 4096)


@pytest.mark.parametrize("factor", [None, [1.0] * 7, 3.0, ["x"] * 8, [0.0] * 8])
def test_longrope_needs_a_factor_for_every_pair(
    spec_of: Callable[..., ModelSpec], factor: object
) -> None:
    with pytest.raises(ModelError, match=r"rope_scaling\.long_factor: "):
        spec_of(rope_scaling={**LONG, "long_factor": factor})


@pytest.mark.parametrize(
    ("changes", "full", "local"),
    [
        ({"rope_theta": "absent"}, RopeSpec("default", 1e6), RopeSpec("default", 1e4)),
        (
            {"rope_theta": 7e4, "rope_local_base_freq": 50.0},
            RopeSpec("default", 7e4),
            RopeSpec("default", 50.0),
        ),
        (
            {"rope_theta": "absent", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            RopeSpec("linear", 1e6, 8.0),
            RopeSpec("default", 1e4),
        ),
        (
            {
                "rope_theta": "absent",
                "rope_parameters": {
                    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 9.0},
                    LOCAL: {"rope_type": "default"},
                },
            },
            RopeSpec("linear", 9.0, 8.0),
            RopeSpec("default", 1e4),
        ),
    ],
)
def test_gemma3_has_two_tables(
    spec_of: Callable[..., ModelSpec], changes: JsonObject, full: RopeSpec, local: RopeSpec
) -> None:
    spec = spec_of(architectures=GEMMA3, **changes)
    assert (spec.rope, spec.local_rope) == (full, local)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("rope_parameters.full_attention", {"rope_parameters": {FULL: {"rope_theta": 5.0}}}),
        ("rope_parameters.sliding_attention", {"rope_parameters": {LOCAL: None}}),
        (
            "rope_parameters.rope_theta",
            {"architectures": GEMMA3, "rope_parameters": {"rope_theta": 5.0}},
        ),
        (
            "rope_parameters.full_attention.rope_type",
            {"architectures": GEMMA3, "rope_parameters": {FULL: {"rope_type": "yarn"}}},
        ),
        ("rope_scaling.mrope_section", {"rope_scaling": {"type": "default", "mrope_section": [8]}}),
        ("rope_scaling.long_mscale", {"rope_scaling": {**LONG, "long_mscale": 1.2}}),
        ("rope_scaling.rope_theta", {"rope_theta": 1.0, "rope_scaling": {"type": "default"}}),
        (
            "rope_scaling.high_freq_factor",
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
        ),
        (
            "rope_scaling.original_max_position_embeddings",
            {"rope_scaling": {**LONG, "original_max_position_embeddings": 1}},
        ),
        (
            "rope_scaling",
            {
                "architectures": GEMMA3,
                "rope_parameters": {FULL: {"rope_theta": 5.0}},
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
        ),
        (
            "rope_scaling.rope_type",
            {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"rope_type": "yarn"}},
        ),
    ],
)
def test_refused_by_name(
    spec_of: Callable[..., ModelSpec], field: str, changes: JsonObject
) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {field}: "):
        spec_of(**changes)


@pytest.mark.parametrize(("factor", "dim"), [(0.5, 8), (0.75, 12), (1.0, 16), (0.26, 4)])
def test_phi3_turns_a_part_of_the_head(
    spec_of: Callable[..., ModelSpec], factor: float, dim: int
) -> None:
    changes = {"architectures": ["Phi3ForCausalLM"]}
    assert spec_of(**changes, partial_rotary_factor=factor).rotary_dim == dim
    rope = {"rope_type": "default", "partial_rotary_factor": factor}
    assert spec_of(**changes, rope_parameters=rope).rotary_dim == dim


@pytest.mark.parametrize("factor", [0.2, 0.05, 1.5])
def test_odd_part_of_a_head_is_refused(spec_of: Callable[..., ModelSpec], factor: float) -> None:
    with pytest.raises(ModelError, match=r"partial_rotary_factor: .* even number"):
        spec_of(architectures=["Phi3ForCausalLM"], partial_rotary_factor=factor)


def test_part_of_a_head_is_refused_where_the_family_turns_all(
    spec_of: Callable[..., ModelSpec],
) -> None:
    with pytest.raises(ModelError, match=r"partial_rotary_factor: 0\.5 is not supported"):
        spec_of(rope_parameters={"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5})


def test_fields_beside_yarn_that_transformers_skips_are_ignored(
    spec_of: Callable[..., ModelSpec],
) -> None:
    """As in the files of DeepSeek-R1-0528-Qwen3-8B, and of older Llama fine-tunes."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}
    plain = spec_of(rope_scaling=yarn).rope
    assert spec_of(rope_scaling={**yarn, "attn_factor": 0.8782488562869419}).rope == plain
    assert spec_of(rope_scaling={**yarn, "finetuned": True}).rope == plain
    with pytest.raises(ModelError, match=r"rope_scaling\.attn_factor: is unknown"):
        spec_of(rope_scaling={"rope_type": "linear", "factor": 2.0, "attn_factor": 0.9})
