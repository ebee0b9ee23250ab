"""Every family held against transformers: whole, chunked, prefix-cached and batched.

The pool is filled with NaN and block tables are random, so that reading one token too many,
or from the wrong block, cannot pass.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.engine.checkpoint.fingerprint import model_fingerprint
from baton.engine.scheduling.batch import Slice
from tests.support.model_story import ModelStory, greedy_slice, random_prompt
from tests.support.small_models import Reference

STEPS = 64
TOLERANCE = 1e-4


def assert_close(ours, theirs):
    scale = max(1.0, theirs.abs().max().item() / 10)
    assert (ours - theirs).abs().max().item() < TOLERANCE * scale


@pytest.fixture(scope="module")
def expected(reference: Reference) -> dict[int, tuple[list[int], list[int]]]:
    """Greedy tokens of transformers for prompts of three lengths, computed once."""
    import random

    found = {}
    for length in (1, 13, 70):
        chooser = random.Random(length)
        prompt = [chooser.randrange(199) for _ in range(length)]
        found[length] = prompt, reference.greedy(prompt, STEPS)
    return found


@pytest.fixture
def reported(reference: Reference) -> ModelStory:
    return ModelStory(reference.folder)


def test_logits_of_a_whole_prompt(reference: Reference, reported: ModelStory) -> None:
    tokens = random_prompt(90)
    (ours,) = reported.logits(Slice(tokens, 0, reported.blocks(90)))
    assert_close(ours, reference.logits(tokens))


def test_logits_of_chunks_of_odd_lengths(reference: Reference, reported: ModelStory) -> None:
    tokens, blocks = random_prompt(90, seed=1), reported.blocks(90)
    parts, start = [], 0
    for length in (1, 16, 9, 1, 1, 40, 22):
        parts += reported.logits(Slice(tokens[start : start + length], start, blocks))
        start += length
    assert_close(torch.cat(parts), reference.logits(tokens))


@pytest.mark.parametrize("length", [1, 13, 70])
def test_greedy_tokens(
    expected: dict[int, tuple[list[int], list[int]]], reported: ModelStory, length: int
) -> None:
    prompt, tokens = expected[length]
    assert reported.greedy(prompt, reported.blocks(length + STEPS), STEPS) == tokens


def test_prefix_computed_by_another_sequence(
    expected: dict[int, tuple[list[int], list[int]]], reported: ModelStory
) -> None:
    """The second sequence shares the first one's full blocks and computes only the rest."""
    prompt, tokens = expected[70]
    first = reported.blocks(70)
    reported.logits(Slice([*prompt[:67], 3, 4, 5], 0, first))  # differs after the prefix
    shared = first[: 64 // reported.block_size]
    blocks = [*shared, *reported.blocks(70 + STEPS - 64)]
    assert reported.greedy(prompt, blocks, STEPS, start=64) == tokens


def test_batch_of_chunks_and_decodes(
    expected: dict[int, tuple[list[int], list[int]]], reported: ModelStory
) -> None:
    """Three sequences; each step mixes decode tokens with a chunk of the one that is prefilling."""
    state = {n: [0, reported.blocks(n + STEPS), list(expected[n][0]), []] for n in (1, 13, 70)}
    chunk = {1: 1, 13: 5, 70: 9}
    while any(len(out) < STEPS for _, _, _, out in state.values()):
        slices, drawing = [], []
        for n, (start, blocks, tokens, out) in state.items():
            if len(out) == STEPS:
                continue
            part = tokens[start : start + chunk[n]]
            if start + len(part) == len(tokens):
                slices.append(greedy_slice(part, start, blocks))
                drawing.append(n)
            else:
                slices.append(Slice(part, start, blocks))
            state[n][0] += len(part)
        for n, token in zip(drawing, reported.draw(*slices), strict=True):
            state[n][2].append(token)
            state[n][3].append(token)
    for n, (_, _, _, out) in state.items():
        assert out == expected[n][1], f"prompt of {n}"


def test_a_wrong_block_changes_the_tokens(
    expected: dict[int, tuple[list[int], list[int]]], reported: ModelStory
) -> None:
    """The models depend on their KV: with another prefix's blocks the tokens differ."""
    prompt, tokens = expected[70]
    other = reported.blocks(70)
    reported.logits(Slice(random_prompt(70, seed=99), 0, other))
    blocks = [*other[:8], *reported.blocks(70 + STEPS - 64)]
    assert reported.greedy(prompt, blocks, STEPS, start=64) != tokens


def test_dynamic_rope_grows_token_by_token_as_transformers_does(
    references: Callable[[str], Reference],
) -> None:
    """Across `max_position_embeddings` (512), with transformers' own cache growing."""
    reference, prompt = references("llama-dynamic-rope"), random_prompt(500)
    reported = ModelStory(reference.folder, block_size=16)
    assert reported.greedy(prompt, reported.blocks(530), 30) == reference.greedy(prompt, 30)


@pytest.mark.parametrize(
    ("context", "length"), [(128, 40), (0, 150)], ids=["short-factors", "long-factors"]
)
def test_longrope_is_decided_by_the_context_served(
    references: Callable[[str], Reference], context: int, length: int
) -> None:
    """Up to the original context (128), and for prompts beyond it, as transformers does."""
    reference, tokens = references("phi3-longrope"), random_prompt(length)
    reported = ModelStory(reference.folder, max_context=context)
    (ours,) = reported.logits(Slice(tokens, 0, reported.blocks(length)))
    assert_close(ours, reference.logits(tokens))
    blocks = reported.blocks(length + STEPS)
    reported.logits(
        Slice(tokens[: length // 2], 0, blocks)
    )  # a prefix, for the other to go on from
    assert reported.greedy(tokens, blocks, STEPS, start=length // 2) == reference.greedy(
        tokens, STEPS
    )


def test_longrope_of_another_context_is_not_the_same_model(
    references: Callable[[str], Reference],
) -> None:
    reference, tokens = references("phi3-longrope"), random_prompt(40)
    reported = ModelStory(reference.folder)
    (ours,) = reported.logits(Slice(tokens, 0, reported.blocks(40)))
    assert (ours - reference.logits(tokens)).abs().max() > 0.1
    assert model_fingerprint(reference.folder) != model_fingerprint(reference.folder, 128)
    assert model_fingerprint(reference.folder, 127) == model_fingerprint(reference.folder, 128)


def test_text_part_of_a_model_for_images(
    references: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Gemma 3 with a vision tower: its files, under other names, hold the same decoder."""
    import transformers

    reference, tokens = references("gemma3"), random_prompt(40)
    vision = {"model_type": "siglip_vision_model", "hidden_size": 8, "intermediate_size": 8}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28}
    config = transformers.Gemma3Config(
        text_config=reference.model.config.to_dict(),
        vision_config={**vision, "patch_size": 14},
        tie_word_embeddings=False,
        image_token_index=3,
    )
    whole = transformers.Gemma3ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(reference.model.model.state_dict())
    whole.lm_head.load_state_dict(reference.model.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    reported = ModelStory(tmp_path)
    (ours,) = reported.logits(Slice(tokens, 0, reported.blocks(40)))
    assert_close(ours, reference.logits(tokens))
