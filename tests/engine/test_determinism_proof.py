"""The proof of graphs: by a deterministic runner on a CPU, whose graphs are repeated calls. What
`prove` itself finds is held by test_deterministic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from baton.engine.checkpoint.weights import load_weights
from baton.engine.execution import determinism_proof
from baton.engine.execution.backend_choice import CpuBackend
from baton.engine.execution.cuda_runner import CudaRunner
from baton.engine.execution.decode_graph import DecodeGraphs
from baton.engine.execution.determinism_proof import prove, prove_graphs
from baton.engine.execution.graph_device import HostDevice
from baton.engine.execution.loading import cpu_runner
from baton.engine.memory.kv_pool import KvPool
from baton.engine.spec.model_spec import read_spec
from baton.runtime.errors import ConfigError
from tests.support import torch_kernels
from tests.support.small_models import Reference

CPU = torch.device("cpu")
BUCKETS = (1, 4, 24)


def greedy(logits, rules, tokens, finite):
    tokens.copy_(logits.argmax(dim=-1))
    finite.fill_(1)


class Device(HostDevice):
    """Calls `after` with the number of each replayed step."""

    def __init__(self, after):
        super().__init__()
        self.after, self.replays, self.captured = after, 0, 0

    def capture(self, work):
        self.captured += 1
        draws = self.captured % 2 == 0  # the second graph of a bucket

        def replay():
            work()
            if draws:
                self.replays += 1
                self.after(self.replays)

        work()
        return replay


@pytest.fixture
def reported(
    qwen3: Reference, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[CudaRunner, Device]]:
    monkeypatch.setattr(determinism_proof, "SIZES_TOKENS", 40)
    monkeypatch.setattr(determinism_proof, "GRAPH_TOKENS", 40)
    spec = read_spec(qwen3.folder)
    backend = CpuBackend(deterministic=True)
    weights = load_weights(qwen3.folder, spec, torch.float32, CpuBackend().matrices(torch.float32))
    pool = KvPool(spec, 60, 8, torch.float32, CPU)
    eager = cpu_runner(spec, weights, pool, backend, 0)

    def make(after=lambda replay: None, draw=greedy):
        device = Device(after)
        width = -(-spec.max_context // 8)
        how = {"spare_block": pool.spare_block, "max_rows": 24, "table_width": width}
        how["vocab_size"] = spec.vocab_size
        graphs = DecodeGraphs(eager.decoder, device, torch_kernels.around(draw), **how)
        graphs.capture(BUCKETS)
        return CudaRunner(eager, graphs), device

    return make


def test_graphs_that_do_as_an_eager_step_does_pass(
    reported: Callable[..., tuple[CudaRunner, Device]],
) -> None:
    runner, device = reported()
    assert prove_graphs(runner) == runner.numerics == prove(runner.eager)
    assert device.replays == 8 + 2 + 1  # a block token by token, in fours, and 24 at once
    assert not runner.pool.memory[: runner.pool.blocks].any()


@pytest.mark.parametrize("bad", [3, 9, 11])
def test_one_other_number_in_the_kv_of_one_graph_is_refused(
    reported: Callable[..., tuple[CudaRunner, Device]], bad: int
) -> None:
    runner, _ = reported()

    def spoil(replay):
        if replay == bad:
            used = runner.pool.tensor[5:20]  # where the proof writes, twice
            used[used.ne(0)] *= 1 + 2.0**-22

    runner, _ = reported(spoil)
    with pytest.raises(ConfigError, match=r"worker\.deterministic: on this machine"):
        prove_graphs(runner)
    assert not runner.pool.memory[: runner.pool.blocks].any()


def test_a_draw_that_differs_in_a_graph_is_refused(
    reported: Callable[..., tuple[CudaRunner, Device]],
) -> None:
    def second_best(at, logits, rules, tokens, finite):
        greedy(logits, rules, tokens, finite)
        if len(tokens) == at:
            tokens[2] = logits[2].topk(2).indices[1]

    with pytest.raises(ConfigError, match=r"worker\.deterministic"):
        prove_graphs(reported(draw=partial(second_best, 24))[0])
