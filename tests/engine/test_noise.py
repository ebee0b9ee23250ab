from __future__ import annotations

import math

import pytest
import torch

from baton.engine.sampling.noise import gumbel, gumbel_bound, noise_bits, stream_key, stream_start

EULER = 0.5772156649
FIXED_KEY = (3087379262, 2466249467)
FIXED_NOISE = [0.090944672203, 0.864364587727, -0.203706356279]


def noise(key, count):
    return gumbel(noise_bits(key, torch.arange(count)))


def test_key_is_two_halves_and_differs_by_each_part() -> None:
    base = (5, 0, 10)
    others = [(6, 0, 10), (5, 1, 10), (5, 0, 11), (0, 5, 10), (10, 0, 5), (5 + 2**63, 0, 10)]
    keys = {stream_key(*parts) for parts in (base, *others)}
    assert len(keys) == len(others) + 1
    assert all(0 <= half < 2**32 for key in keys for half in key)


def test_any_integer_is_a_seed() -> None:
    assert stream_key(-1, 0, 0) == stream_key(2**64 - 1, 0, 0)
    assert stream_key(2**64, 0, 0) == stream_key(0, 0, 0)


def test_values_are_fixed_for_ever() -> None:
    """A rolling upgrade must not change what a migrated request draws."""
    assert stream_key(42, 0, 100) == FIXED_KEY
    found = noise(FIXED_KEY, 3).tolist()
    assert found == pytest.approx(FIXED_NOISE, abs=1e-9)


def test_a_token_has_the_same_noise_wherever_it_stands() -> None:
    key = stream_key(1, 2, 3)
    alone = gumbel(noise_bits(key, torch.tensor([777])))
    assert torch.equal(noise(key, 1000)[777:778], alone)


def test_every_token_may_have_a_key_of_its_own() -> None:
    keys = [stream_key(seed, 1, 2) for seed in range(50)]
    tokens = torch.arange(50) * 37
    halves = torch.tensor(keys)
    together = noise_bits((halves[:, 0], halves[:, 1]), tokens)
    alone = [noise_bits(key, tokens[n : n + 1]) for n, key in enumerate(keys)]
    assert torch.equal(together, torch.cat(alone))


def test_tokens_are_not_overwritten() -> None:
    tokens = torch.arange(5)
    noise_bits((1, 2), tokens)
    assert tokens.tolist() == [0, 1, 2, 3, 4]


def test_bound_is_above_and_near_where_it_matters() -> None:
    edges = torch.tensor([0, 1, 2, 2**31, 2**32 - 2, 2**32 - 1])
    bits = torch.cat((edges, noise_bits(stream_key(3, 0, 0), torch.arange(100_000))))
    exact, bound = gumbel(bits), gumbel_bound(bits).double()
    assert (bound >= exact).all()
    high = exact > 5
    assert (bound - exact)[high].max() < 0.01
    assert bound.isfinite().all()


def test_distribution_is_gumbel() -> None:
    found = noise(stream_key(7, 0, 0), 200_000)
    assert found.mean().item() == pytest.approx(EULER, abs=0.02)
    assert found.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    assert found.isfinite().all()


def test_neighbours_are_not_correlated() -> None:
    one = noise(stream_key(7, 0, 0), 100_000)
    for other in (stream_key(7, 0, 1), stream_key(8, 0, 0), stream_key(7, 1, 0)):
        both = torch.stack((one, noise(other, 100_000)))
        assert abs(torch.corrcoef(both)[0, 1].item()) < 0.015
    shifted = torch.stack((one[1:], one[:-1]))
    assert abs(torch.corrcoef(shifted)[0, 1].item()) < 0.015


def test_a_stream_start_serves_all_positions_of_one_choice() -> None:
    """What a GPU relies on, which goes on from it by itself."""
    start = stream_start(11, 3)
    assert 0 <= start < 1 << 64
    assert len({stream_start(seed, choice) for seed in range(20) for choice in range(20)}) == 400
    for position in (0, 1, 1 << 40):
        high, low = stream_key(11, 3, position)
        state = ((start ^ position) + 0x9E3779B97F4A7C15) % (1 << 64)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % (1 << 64)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % (1 << 64)
        assert (high << 32) + low == state ^ (state >> 31)
