"""Which chunks the kernel of Hopper computes; its parity is held by `attention_parity.py` there."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from baton.engine.triton import hopper_prefill
from baton.engine.triton.hopper_prefill import TILE_ROWS, is_supported
from baton.engine.triton.prefill import prefill_tiles


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Stands for a GPU of the given capability."""

    def use(capability):
        target = SimpleNamespace(arch=capability)
        active = SimpleNamespace(get_current_target=lambda: target)
        monkeypatch.setattr(hopper_prefill, "driver", SimpleNamespace(active=active))
        monkeypatch.setattr(hopper_prefill, "INTERPRETED", False)

    return use


def supported(
    dtype=torch.bfloat16, stored=None, dim=128, size=16, window=0, soft_cap=0.0, rows=TILE_ROWS
):
    queries = torch.empty(5, 8, dim, dtype=dtype)
    kv = torch.empty(3, 2, 4, 2, size, dim, dtype=stored or dtype)[:, :, 1]
    return is_supported(queries, kv, window, soft_cap, rows)


@pytest.mark.parametrize(
    "chunk", [{}, {"dtype": torch.float16}, {"dim": 64}, {"size": 64}, {"size": 48}]
)
def test_plain_chunks_are_supported_on_hopper(
    on_gpu: Callable[[int], None], chunk: dict[str, object]
) -> None:
    on_gpu(90)
    assert supported(**chunk)


@pytest.mark.parametrize(
    "chunk",
    [
        {"dtype": torch.float32},
        {"stored": torch.int8},
        {"dim": 96},
        {"dim": 256},
        {"size": 8},
        {"size": 24},
        {"window": 4096},
        {"soft_cap": 30.0},
        {"rows": 256},
    ],
)
def test_other_chunks_are_left_to_the_other_kernel(
    on_gpu: Callable[[int], None], chunk: dict[str, object]
) -> None:
    on_gpu(90)
    assert not supported(**chunk)


@pytest.mark.parametrize("capability", [80, 89, 100])
def test_other_gpus_are_left_to_the_other_kernel(
    on_gpu: Callable[[int], None], capability: int
) -> None:
    on_gpu(capability)
    assert not supported()


@pytest.mark.parametrize("group", [1, 4, 7, 16, 128])
@pytest.mark.parametrize("dim", [64, 128])
def test_plans_on_hopper_have_the_rows_of_the_kernel(group: int, dim: int) -> None:
    assert prefill_tiles(group, dim, torch.bfloat16, capability=90).rows == TILE_ROWS


def test_programs_share_a_multiprocessor_on_hopper_alone() -> None:
    plain = [prefill_tiles(4, 128, torch.bfloat16, capability) for capability in (80, 90, 100)]
    assert [tiles.registers for tiles in plain] == [0, 128, 0]
    assert prefill_tiles(4, 128, torch.bfloat16, 90, quantised=True).tokens == 32
