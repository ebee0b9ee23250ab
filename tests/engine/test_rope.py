"""Angles held against transformers' own rotary modules, at positions near and far."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from baton.engine.model.rope import Rotary, rotate
from baton.engine.spec.model_spec import ModelSpec, read_spec
from baton.engine.spec.rope_spec import RopeSpec
from tests.support.json_values import JsonObject
from tests.support.small_models import Reference

NAMES = ["llama", "llama-llama3-rope", "llama-linear-rope", "llama-yarn-rope", "qwen3"]


def rotary_of(reference):
    spec = read_spec(reference.folder)
    return Rotary(spec.rope, spec.rotary_dim)


def theirs(reference, positions):
    rotary = type(reference.model.model.rotary_emb)(reference.model.config)  # fresh: it grows
    return rotary(torch.zeros(1, dtype=torch.float32), positions[None])


@pytest.mark.parametrize("name", [*NAMES, "llama-dynamic-rope"])
def test_angles_are_those_of_transformers(
    references: Callable[[str], Reference], name: str
) -> None:
    reference = references(name)
    positions = torch.tensor([0, 1, 2, 63, 64, 100, 511])
    cos, sin = rotary_of(reference).angles(positions, torch.float32)
    their_cos, their_sin = theirs(reference, positions)
    half = cos.shape[-1] // 2
    torch.testing.assert_close(cos[:, 0], their_cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[:, 0, half:], their_sin[0, :, half:], rtol=0, atol=1e-6)
    torch.testing.assert_close(-sin[:, 0, :half], their_sin[0, :, :half], rtol=0, atol=1e-6)


def test_dynamic_is_what_transformers_has_for_the_last_token(
    references: Callable[[str], Reference],
) -> None:
    """Beyond the trained length the angle is the last one of a sequence that ends there."""
    reference = references("llama-dynamic-rope")
    rotary = rotary_of(reference)
    for last in (512, 513, 700, 1000):
        cos, _ = rotary.angles(torch.tensor([last]), torch.float32)
        their_cos, _ = theirs(reference, torch.arange(last + 1))
        torch.testing.assert_close(cos[0, 0], their_cos[0, -1], rtol=0, atol=2e-4)


def test_dynamic_does_not_depend_on_the_other_rows(references: Callable[[str], Reference]) -> None:
    rotary = rotary_of(references("llama-dynamic-rope"))
    together, _ = rotary.angles(torch.tensor([3, 900, 600]), torch.float32)
    for row, position in enumerate((3, 900, 600)):
        alone, _ = rotary.angles(torch.tensor([position]), torch.float32)
        assert torch.equal(together[row], alone[0])
    everywhere = torch.arange(1024)
    cos, sin = rotary.angles(everywhere, torch.float32)
    for first, end in ((511, 1024), (900, 905), (512, 513), (700, 733)):
        some = rotary.angles(everywhere[first:end], torch.float32)
        assert torch.equal(some[0], cos[first:end]) and torch.equal(some[1], sin[first:end])


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 0.7}, 0.7),
        (
            {"mscale": 2.0, "mscale_all_dim": 0.5},
            (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
        ),
    ],
)
def test_yarn_attention_factor(changes: dict[str, float], factor: float) -> None:
    rotary = Rotary(RopeSpec("yarn", 10_000.0, 4.0, 128, **changes), 16)
    assert rotary.attention_factor == pytest.approx(factor)
    cos, _ = rotary.angles(torch.tensor([0]), torch.float32)
    torch.testing.assert_close(cos, torch.full_like(cos, factor))


def test_rotation_turns_pairs_and_keeps_length(references: Callable[[str], Reference]) -> None:
    rotary = rotary_of(references("llama"))
    x = torch.randn(5, 4, 16)
    turned = rotate(x, *rotary.angles(torch.arange(5), torch.float32))
    torch.testing.assert_close(turned[0], x[0])
    assert not torch.allclose(turned[1], x[1])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    pairs, before = turned.view(5, 4, 2, 8), x.view(5, 4, 2, 8)
    torch.testing.assert_close(pairs.norm(dim=2), before.norm(dim=2))


def test_scores_depend_on_distance_alone(references: Callable[[str], Reference]) -> None:
    rotary = rotary_of(references("llama"))
    query, key = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(at, other):
        one = rotate(query, *rotary.angles(torch.tensor([at]), torch.float32))
        two = rotate(key, *rotary.angles(torch.tensor([other]), torch.float32))
        return (one * two).sum().item()

    assert score(17, 5) == pytest.approx(score(212, 200), abs=1e-4)
    assert score(17, 5) != pytest.approx(score(17, 6), abs=1e-3)


LONG = [1.0 + pair**1.7 / 9 for pair in range(48)]
THEIRS = [
    ({"rope_type": "default"}, 10_000.0),
    ({"rope_type": "linear", "factor": 3.0}, 10_000.0),
    (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        500_000.0,
    ),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 1e6),
    (
        {
            "rope_type": "longrope",
            "long_factor": LONG,
            "short_factor": [1.0] * 48,
            "original_max_position_embeddings": 4096,
        },
        10_000.0,
    ),
]


@pytest.mark.parametrize(("scaling", "theta"), THEIRS, ids=lambda each: str(each)[:30])
def test_frequencies_are_those_of_transformers_bit_for_bit(
    spec_of: Callable[..., ModelSpec], scaling: JsonObject, theta: float
) -> None:
    """At late positions an angle shows every rounding of its frequency."""
    kind = scaling["rope_type"]
    shape = {"head_dim": 96, "hidden_size": 96, "num_attention_heads": 1, "num_key_value_heads": 1}
    shape |= {"max_position_embeddings": 131_072}
    spec = spec_of(**shape, rope_theta=theta, rope_scaling=scaling)
    rotary = Rotary(spec.rope, spec.rotary_dim)
    config = LlamaConfig(**shape, rope_parameters={**scaling, "rope_theta": theta})
    if kind == "default":
        wanted, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        wanted, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=131_072)
    positions = torch.tensor([0, 1, 4095, 70_001, 131_071])
    cos, _ = rotary.angles(positions, torch.float32)
    assert rotary.attention_factor == factor
    assert torch.equal(cos[:, 0, :48], (positions.float()[:, None] * wanted).cos() * factor)
