"""Parts of `make gpu` for speculation, KV in eight bits and experts: their arithmetic, without the
time of a whole dry run."""

from __future__ import annotations

import math

import pytest
import torch

from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.kv_quant import KV_QUANTS
from baton.engine.model.quantized_weight import CodeDtype
from baton.engine.scheduling.batch import Drawn, FinishedStep, StepResult
from baton.engine.scheduling.verification import accepted
from benchmarks.gpu_parts import experts as gpu_experts
from benchmarks.gpu_parts import models as gpu_models
from benchmarks.gpu_parts import speculation as gpu_speculation
from benchmarks.gpu_parts.speed import Given

GIVEN = Given(torch.device("cpu"), True, ceilings={"copy_gb_per_s": 1000.0, "matrix_tflops": 10.0})


class Graph:
    """A running step of a graph."""

    def __init__(self, found):
        self._found = found

    def result(self):
        return self._found


class CountingRunner:
    """Draws the known token plus one, by each row. `kept`: proposals are judged."""

    def __init__(self, captured=True, kept=True):
        self.steps, self._captured, self._kept = 0, captured, kept

    def run(self, batch):
        return self._result(batch)

    def start(self, batch):
        self.steps += 1
        made = self._result(batch)
        return Graph(made) if self._captured else FinishedStep(made)

    def _result(self, batch):
        drawn = []
        for item in batch.slices:
            rows = item.tokens[-len(item.draws) :]
            found = [Drawn(0, token + 1) for token in rows]
            drawn.append(accepted(item, found) if self._kept else tuple(found))
        return StepResult(tuple(drawn))


PROMPTS = ([7, 8], [20])
ANSWERS = [[9, 10, 11, 12, 13, 14], [21, 22, 23, 24, 25, 26]]


def test_verified_tokens_are_those_of_plain_decoding() -> None:
    plain, wrong = CountingRunner(), CountingRunner(kept=False)
    assert gpu_speculation.plain_tokens(plain, PROMPTS, 6) == ANSWERS and plain.steps == 5
    propose = gpu_speculation.oracle_proposals(PROMPTS, ANSWERS)
    runner = CountingRunner()
    found, proposed = gpu_speculation.verified_tokens(runner, PROMPTS, 6, propose)
    assert found == ANSWERS and runner.steps < plain.steps
    assert proposed == 12 - 2 - 2 * runner.steps
    found, _ = gpu_speculation.verified_tokens(wrong, PROMPTS, 6, propose)
    assert found != ANSWERS  # a runner that takes every proposal is noticed


def test_a_verifying_step_without_a_graph_fails() -> None:
    propose = gpu_speculation.oracle_proposals(PROMPTS, ANSWERS)
    with pytest.raises(RuntimeError, match="a step of 8 rows has no graph"):
        gpu_speculation.verified_tokens(CountingRunner(captured=False), PROMPTS, 6, propose)


def test_ngrams_continue_what_was_repeated() -> None:
    propose = gpu_speculation.ngram_proposals([[1, 2, 3, 4, 1, 2]])
    assert propose(0, [1, 2, 3, 4, 1, 2]) == [3, 4, 1]
    assert propose(0, [1, 2, 3, 4, 1, 2, 3])[:2] == [4, 1]


def test_steps_that_verify_have_a_row_for_each_proposal() -> None:
    step = gpu_speculation.batch_with_proposals(gpu_models.decode_step(2, 8, 32, fed=False), 3)
    assert [(len(item.tokens), item.proposed, len(item.draws)) for item in step.slices] == [
        (4, 3, 4)
    ] * 2


@pytest.mark.parametrize("name", ["auto", *KV_QUANTS])
def test_a_filled_pool_has_finite_numbers(name: str) -> None:
    shape = gpu_models.TINY["llama-8b"]
    spec = gpu_models.spec_of(shape, 32)
    pool = KvPool(spec, 3, 16, torch.float32, torch.device("cpu"), KV_QUANTS.get(name))
    gpu_models.fill_pool(pool)
    found = pool.take(0, torch.arange(3))
    assert found.isfinite().all() and 0.05 < found.std() < 0.6 and found.abs().max() < 4


@pytest.mark.parametrize(
    ("read", "flops", "ratio", "cause"),
    [(2e6, 1e6, 5.0, "2 us of bytes"), (1e3, 5e7, 2.0, "5 us of products")],
)
def test_the_floor_is_what_takes_longer(
    read: float, flops: float, ratio: float, cause: str
) -> None:
    figure = gpu_experts.over_floor(GIVEN, "x", 1e-5, read, flops)
    assert (figure.name, figure.beside) == ("x_over_floor", f"{cause} is 1")
    assert figure.value == pytest.approx(ratio)


@pytest.mark.parametrize("code", gpu_experts.FORMATS)
def test_only_chosen_experts_are_counted(code: CodeDtype | None) -> None:
    shape = gpu_experts.TINY_MIXTURE
    layer = gpu_experts.mixture_weights(shape, code, GIVEN.device)
    per_number = {None: 4, "int8": 1, "fp8": 1, "int4": 0.5}[code]
    codes = shape.expert_parameters * per_number
    scales = {None: 0, "int4": 6}.get(code, 4)  # bytes, zero point included
    groups = shape.group if code == "int4" else math.inf
    count = 2 * shape.ffn * max(1, shape.hidden / groups) + shape.hidden * max(
        1, shape.ffn / groups
    )
    one = gpu_experts.expert_bytes_read(torch.randn(1, shape.hidden), layer, shape)
    assert one == pytest.approx(shape.chosen * (codes + scales * count))
    many = gpu_experts.expert_bytes_read(torch.randn(200, shape.hidden), layer, shape)
    assert many == pytest.approx(one * shape.experts / shape.chosen)


def test_shapes_are_those_of_their_models() -> None:
    mixture, latent = gpu_experts.QWEN3_30B, gpu_experts.DEEPSEEK_V2_LITE
    assert mixture.expert_parameters * mixture.experts * 48 == pytest.approx(29e9, rel=0.01)
    assert (latent.width, latent.query_dim) == (576, 192)
