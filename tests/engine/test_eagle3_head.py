"""An EAGLE-3 head against a plain PyTorch reference, in both published layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.model.eagle3_head import OUTSIDE
from baton.engine.model.step_layout import Bounds, lay_out
from baton.engine.scheduling.batch import DraftWork, Slice, StepBatch
from baton.engine.speculation.eagle3_drafter import Eagle3Drafter
from tests.support.eagle3_heads import HeadShape, Layout, ReferenceHead, save_head, states_of
from tests.support.model_story import random_prompt
from tests.support.small_models import Reference

LAYERS = (1, 2, 3)  # 3: the output of the last layer
SHAPE = HeadShape(199, 64, LAYERS)
VARIANTS: list[tuple[Layout, HeadShape]] = [
    ("midlayer", replace(SHAPE, draft_vocab=60)),
    ("midlayer", replace(SHAPE, own_embedding=False)),
    ("speculators", replace(SHAPE, draft_vocab=97, norm_before_residual=True)),
    ("speculators", replace(SHAPE, hidden=48, kv_heads=4, theta=500.0)),
]


def runner_of(target: Path, head: Path) -> ModelRunner:
    options = EngineOptions(
        blocks=40,
        block_size=8,
        dtype="float32",
        backend="torch",
        draft_folder=head,
        draft_kind="eagle3",
    )
    runner = build_runner(target, options)
    assert runner.pool.draft is not None and runner.pool.draft.features is not None
    for tensor in (runner.pool.tensor, runner.pool.draft.tensor, runner.pool.draft.features):
        tensor.fill_(float("nan"))
    return runner


@pytest.mark.parametrize(("layout", "shape"), VARIANTS)
def test_logits_equal_the_reference_in_each_layout(
    qwen3: Reference, tmp_path: Path, layout: Layout, shape: HeadShape
) -> None:
    """The prompt in two chunks; then passes by the target's features, and by the head's own."""
    torch.manual_seed(3)
    table = None if shape.own_embedding else qwen3.model.model.embed_tokens.weight
    head = ReferenceHead(shape, table)
    runner = runner_of(qwen3.folder, save_head(head, tmp_path / "head", layout))
    drafter = runner.draft
    assert isinstance(drafter, Eagle3Drafter)
    tokens, blocks = random_prompt(30), [5, 9, 2, 30, 11]
    for start, end in ((0, 8), (8, 24)):
        item = Slice(tokens[start:end], start, blocks, draft=DraftWork())
        runner.run(StepBatch((item,)))
    for index in range(24, 29):  # a decode step each, without draft work
        runner.run(StepBatch((Slice(tokens[index : index + 1], index, blocks),)))
    states, _ = states_of(qwen3.model, tokens[:29], LAYERS)
    with torch.inference_mode():
        features = head.features(states)
        drafter.follow([Slice(tokens[28:29], 28, blocks, draft=DraftWork(tokens[24:28]))])
        found, y = passed(runner, tokens[29], 29, blocks, None)
        wanted, own = head(torch.tensor(tokens[1:30]), features)
        compare(found, wanted[-1], head)
        found, _ = passed(runner, 77, 30, blocks, y)
        wanted, _ = head(torch.tensor([*tokens[1:30], 77]), torch.cat((features, own[-1:])))
        compare(found, wanted[-1], head)


def passed(
    runner: ModelRunner, token: int, start: int, blocks: list[int], y: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and state of one row of the head; by the stored features where `y` is None."""
    drafter = runner.draft
    assert isinstance(drafter, Eagle3Drafter)
    bounds = Bounds(40, 8, 199, 512)
    layout = lay_out(StepBatch((Slice([token], start, blocks),)), bounds)
    hidden = drafter.head.hidden(layout, drafter.stored(layout) if y is None else y)
    return drafter.head.logits(hidden)[0], hidden


def compare(found: torch.Tensor, wanted: torch.Tensor, head: ReferenceHead) -> None:
    ids = head.get_buffer("ids")
    torch.testing.assert_close(found[ids], wanted, rtol=1e-4, atol=1e-4)
    outside = torch.ones(len(found), dtype=torch.bool)
    outside[ids] = False
    assert bool((found[outside] == OUTSIDE).all())
