"""What a spec says is what is computed: each feature, taken away, changes the logits.

That the features are computed rightly is held by test_against_transformers.py; this file holds
that its models depend on every one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from baton.engine.scheduling.batch import Slice
from baton.engine.spec.model_spec import AttentionSpec, read_spec
from tests.support.model_story import ModelStory, random_prompt
from tests.support.small_models import Reference

TOKENS = 60


def without(spec, feature):
    attention = spec.attention
    plain = AttentionSpec(spec.head_dim**-0.5, (0,) * spec.layers)
    changes = {
        "window": {"attention": replace(attention, windows=plain.windows)},
        "last token of the window": {
            "attention": replace(attention, windows=tuple(max(0, w - 1) for w in attention.windows))
        },
        "window of one layer": {
            "attention": replace(attention, windows=(*attention.windows[:2], 0))
        },
        "soft cap": {"attention": replace(attention, soft_cap=0.0)},
        "scale": {"attention": replace(attention, scale=plain.scale)},
        "logit soft cap": {"logit_soft_cap": 0.0},
        "activation": {"activation": "silu"},
        "one in the norms": {"norm_adds_one": False},
        "embedding scale": {"embedding_scale": 1.0},
        "local rope": {"local_rope": None},
        "rope of the full layers": {"rope": spec.local_rope},
        "part of the head": {"rotary_dim": spec.head_dim},
    }
    return replace(spec, **changes[feature])


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("mistral-window", ["window", "last token of the window", "window of one layer"]),
        ("qwen2-window", ["window", "last token of the window", "window of one layer"]),
        ("qwen3-window", ["window", "last token of the window", "window of one layer"]),
        ("phi3", ["part of the head"]),
        (
            "gemma2",
            [
                "window",
                "soft cap",
                "scale",
                "logit soft cap",
                "activation",
                "one in the norms",
                "embedding scale",
            ],
        ),
        (
            "gemma3",
            [
                "window",
                "last token of the window",
                "window of one layer",
                "scale",
                "logit soft cap",
                "activation",
                "one in the norms",
                "embedding scale",
                "local rope",
                "rope of the full layers",
            ],
        ),
    ],
)
def test_every_feature_counts(
    references: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    features: list[str],
) -> None:
    folder, tokens = references(name).folder, random_prompt(TOKENS, seed=5)
    spec = read_spec(folder)

    def logits():
        reported = ModelStory(folder)
        return reported.logits(Slice(tokens, 0, reported.blocks(TOKENS)))[0]

    right = logits()
    for feature in features:
        changed = without(spec, feature)
        assert changed != spec
        monkeypatch.setattr("baton.engine.execution.loading.read_spec", lambda *_, it=changed: it)
        assert (logits() - right).abs().max() > 0.02, feature
        monkeypatch.undo()


@pytest.mark.parametrize("name", ["mistral-window", "phi3", "gemma3"])
def test_float16_is_nearer_than_bfloat16(references: Callable[[str], Reference], name: str) -> None:
    """Chunks and decodes; the pool holds the same kind of number."""
    reference, tokens = references(name), random_prompt(30, seed=8)
    exact = reference.logits(tokens)
    worst = {}
    for dtype in ("bfloat16", "float16"):
        reported = ModelStory(reference.folder, dtype=dtype)
        blocks, found = reported.blocks(30), []
        for first, end in ((0, 11), (11, 28), (28, 29), (29, 30)):
            found += reported.logits(Slice(tokens[first:end], first, blocks))
        assert reported.runner.pool.tensor.dtype == getattr(torch, dtype)
        worst[dtype] = (torch.cat(found) - exact).abs().max().item()
    assert worst["float16"] < 0.5 * worst["bfloat16"]
    assert worst["float16"] < 0.02 * exact.abs().max()


def test_the_embedding_scale_is_rounded_like_the_weights(
    references: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma was trained so: in bfloat16 a scale of 8.03 is 8."""
    folder = references("gemma3").folder
    spec = read_spec(folder)
    found = []
    for scale in (8.0, 8.03):
        changed = replace(spec, embedding_scale=scale)
        monkeypatch.setattr("baton.engine.execution.loading.read_spec", lambda *_, it=changed: it)
        reported = ModelStory(folder, dtype="bfloat16")
        found += reported.logits(Slice([5, 6, 7], 0, reported.blocks(3)))
    assert torch.equal(found[0], found[1])
