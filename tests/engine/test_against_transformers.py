"""Every family held against transformers: whole, chunked, prefix-cached and batched.

The pool is filled with NaN and block tables are random, so that reading one token too many,
or from the wrong block, cannot pass.
"""

from __future__ import annotations

import pytest
import torch

from baton.engine.batch import Slice

STEPS = 64
TOLERANCE = 1e-4


def assert_close(ours, theirs):
    scale = max(1.0, theirs.abs().max().item() / 10)
    assert (ours - theirs).abs().max().item() < TOLERANCE * scale


@pytest.fixture(scope="module")
def expected(reference):
    """Greedy tokens of transformers for prompts of three lengths, computed once."""
    import random

    found = {}
    for length in (1, 13, 70):
        chooser = random.Random(length)
        prompt = [chooser.randrange(199) for _ in range(length)]
        found[length] = prompt, reference.greedy(prompt, STEPS)
    return found


@pytest.fixture
def told(reference, story):
    return story(reference.folder)


def test_logits_of_a_whole_prompt(reference, told, prompts):
    tokens = prompts(90)
    (ours,) = told.logits(Slice(tokens, 0, told.blocks(90)))
    assert_close(ours, reference.logits(tokens))


def test_logits_of_chunks_of_odd_lengths(reference, told, prompts):
    tokens, blocks = prompts(90, seed=1), told.blocks(90)
    parts, start = [], 0
    for length in (1, 16, 9, 1, 1, 40, 22):
        parts += told.logits(Slice(tokens[start : start + length], start, blocks))
        start += length
    assert_close(torch.cat(parts), reference.logits(tokens))


@pytest.mark.parametrize("length", [1, 13, 70])
def test_greedy_tokens(expected, told, length):
    prompt, tokens = expected[length]
    assert told.greedy(prompt, told.blocks(length + STEPS), STEPS) == tokens


def test_prefix_computed_by_another_sequence(expected, told):
    """The second sequence shares the first one's full blocks and computes only the rest."""
    prompt, tokens = expected[70]
    first = told.blocks(70)
    told.logits(Slice([*prompt[:67], 3, 4, 5], 0, first))  # differs after the prefix
    shared = first[: 64 // told.block_size]
    blocks = [*shared, *told.blocks(70 + STEPS - 64)]
    assert told.greedy(prompt, blocks, STEPS, start=64) == tokens


def test_batch_of_chunks_and_decodes(expected, told, as_greedy):
    """Three sequences; each step mixes decode tokens with a chunk of whoever is prefilling."""
    state = {n: [0, told.blocks(n + STEPS), list(expected[n][0]), []] for n in (1, 13, 70)}
    chunk = {1: 1, 13: 5, 70: 9}
    while any(len(out) < STEPS for _, _, _, out in state.values()):
        slices, drawing = [], []
        for n, (start, blocks, tokens, out) in state.items():
            if len(out) == STEPS:
                continue
            part = tokens[start : start + chunk[n]]
            if start + len(part) == len(tokens):
                slices.append(as_greedy(part, start, blocks))
                drawing.append(n)
            else:
                slices.append(Slice(part, start, blocks))
            state[n][0] += len(part)
        for n, token in zip(drawing, told.draw(*slices), strict=True):
            state[n][2].append(token)
            state[n][3].append(token)
    for n, (_, _, _, out) in state.items():
        assert out == expected[n][1], f"prompt of {n}"


def test_a_wrong_block_changes_the_tokens(expected, told, prompts):
    """The models depend on their KV: with another prefix's blocks the tokens differ."""
    prompt, tokens = expected[70]
    other = told.blocks(70)
    told.logits(Slice(prompts(70, seed=99), 0, other))
    blocks = [*other[:8], *told.blocks(70 + STEPS - 64)]
    assert told.greedy(prompt, blocks, STEPS, start=64) != tokens


def test_dynamic_rope_grows_token_by_token_as_transformers_does(references, story, prompts):
    """Across `max_position_embeddings` (512), with transformers' own cache growing."""
    reference, prompt = references("llama-dynamic-rope"), prompts(500)
    told = story(reference.folder, block_size=16)
    assert told.greedy(prompt, told.blocks(530), 30) == reference.greedy(prompt, 30)
