"""What a graph reads: the packed inputs, the block tables, the tokens drawn last."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from baton.engine.execution.decode_graph import BUCKETS, DecodeGraphs
from baton.engine.execution.graph_device import HostDevice
from baton.engine.model.step_layout import Bounds, lay_out
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.runtime.sampling import SamplingParams
from tests.support import torch_kernels
from tests.support.graph_buffers import drawn_tokens, send_tables, sent_tables, tables_of

SPARE, WIDTH, VOCAB = 50, 6, 9


class Echo:
    """Stands for a decoder: keeps what it was given; its logits favour token + 1."""

    def hidden(self, layout):
        self.layout = layout
        return layout.tokens

    def logits(self, hidden):
        return torch.nn.functional.one_hot((hidden + 1) % VOCAB, VOCAB).float()


class Rules:
    """Stands for the draw: greedy, and keeps the rules."""

    def __call__(self, logits, rules, tokens, finite):
        self.seen = [tensor.clone() for tensor in rules.tensors()]
        tokens.copy_(logits.argmax(-1))
        finite.fill_(1)


@pytest.fixture
def decoder() -> Echo:
    return Echo()


@pytest.fixture
def rules() -> Rules:
    return Rules()


@pytest.fixture
def graphs(decoder: Echo, rules: Rules) -> DecodeGraphs:
    made = DecodeGraphs(
        decoder,
        HostDevice(),
        torch_kernels.around(rules),
        vocab_size=VOCAB,
        spare_block=SPARE,
        max_rows=20,
        table_width=WIDTH,
    )
    made.capture()
    return made


def started(graphs, *slices, draws=None, feeds=None):
    layout = lay_out(StepBatch(slices), Bounds(SPARE, 4, VOCAB, 4 * WIDTH))
    count = len(slices)
    return graphs.start(layout, draws or [None] * count, feeds or [None] * count)


def test_buckets_reach_the_rows_asked_for(graphs: DecodeGraphs) -> None:
    assert graphs.buckets == tuple(b for b in BUCKETS if b <= 24)
    assert graphs.bucket(25) is None


def test_rows_are_where_the_layout_says(graphs: DecodeGraphs, decoder: Echo) -> None:
    slices = [Slice([n], 5 * n, range(n, n + 5)) for n in range(3)]
    tokens, finite, seconds = started(graphs, *slices).wait()
    assert tokens == [1, 2, 3] and finite == [True] * 3 and seconds >= 0
    seen = decoder.layout
    assert seen.tokens.tolist() == [0, 1, 2, 0]  # the fourth is padding
    assert seen.positions.tolist() == [0, 5, 10, 0]
    assert seen.write_blocks.tolist() == [0, 2, 4, SPARE]
    assert seen.write_slots.tolist() == [0, 1, 2, 0]
    assert seen.decode_lengths.tolist() == [1, 6, 11, 1]
    assert seen.decode_lengths.dtype == seen.decode_tables.dtype == torch.int32
    assert seen.decode_tables[2, :3].tolist() == [2, 3, 4]
    assert seen.decode_tables[3, 0] == SPARE
    assert seen.chunks == ()


def test_padding_of_a_larger_batch_before_does_not_stay(
    graphs: DecodeGraphs, decoder: Echo
) -> None:
    started(graphs, *(Slice([n], 0, [n]) for n in range(8))).wait()
    started(graphs, *(Slice([7], 0, [30 + n]) for n in range(5))).wait()
    assert decoder.layout.tokens.tolist() == [7] * 5 + [0] * 3
    assert decoder.layout.write_blocks.tolist() == [30, 31, 32, 33, 34] + [SPARE] * 3
    assert decoder.layout.decode_tables[:, 0].tolist() == [30, 31, 32, 33, 34] + [SPARE] * 3


def test_rules_come_through_bit_for_bit(graphs: DecodeGraphs, rules: Rules) -> None:
    warm = SamplingParams(0.3, top_k=5, top_p=0.123456789, min_p=0.01, seed=-(2**62))
    started(graphs, Slice([1], 0, [1]), draws=[Draw(2, 1 << 41, warm)]).wait()
    from baton.engine.sampling.draw_rules import DrawRules

    wanted = DrawRules.of([Draw(2, 1 << 41, warm)]).tensors()
    for seen, mine in zip(rules.seen, wanted, strict=True):
        assert torch.equal(seen.to(mine.dtype), mine)


def test_fed_rows_take_the_tokens_drawn_last(graphs: DecodeGraphs) -> None:
    slices = [Slice([n], 0, [n]) for n in range(3)]
    started(graphs, *slices)
    fed = started(graphs, *slices, feeds=[2, None, 0])
    assert fed.wait()[0] == [4, 2, 2]  # drawn were 1, 2, 3; the second row has its own token 1
    assert started(graphs, slices[0], feeds=[0]).wait()[0] == [5]


def test_tables_are_sent_only_when_they_changed(
    graphs: DecodeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = [Slice([1], 5, [3, 4]), Slice([1], 9, [5, 6, 7])]
    started(graphs, *slices)
    tables_of(graphs).fill_(1)
    started(graphs, *slices)
    assert (tables_of(graphs) == 1).all()
    started(graphs, Slice([1], 5, [3, 8]), slices[1])
    assert tables_of(graphs)[:2, :3].tolist() == [[3, 8, 0], [5, 6, 7]]
    assert np.array_equal(sent_tables(graphs), tables_of(graphs)[:2, :3].numpy())


def test_a_change_of_tables_takes_no_memory_of_the_device() -> None:
    """A full device would fail every request of the step."""
    away = HostDevice()
    away.torch_device = torch.device("meta")  # where a copy cannot be the host's own memory
    graphs = DecodeGraphs(
        Echo(),
        away,
        torch_kernels.around(Rules()),
        vocab_size=VOCAB,
        spare_block=SPARE,
        max_rows=4,
        table_width=WIDTH,
    )
    with Operations() as seen:
        send_tables(graphs, 2, np.ones((2, 3), dtype=np.int32))
    assert seen.names.count("copy_") == 3  # inputs, tables, and tables into wider rows
    assert set(seen.names) == {"copy_", "slice", "view"}


class Operations(TorchDispatchMode):
    """Names of torch's operations whose result lies there."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if made.is_meta:
            self.names.append(function.overloadpacket.__name__)
        return made


def test_a_replay_for_measuring_repeats_the_step(graphs: DecodeGraphs) -> None:
    """It feeds on what was drawn last, as the step itself would again."""
    slices = [Slice([n], 0, [n]) for n in range(2)]
    started(graphs, *slices)
    started(graphs, *slices, feeds=[0, 1])
    graphs.replay(2)
    assert drawn_tokens(graphs, 2) == [3, 4]
