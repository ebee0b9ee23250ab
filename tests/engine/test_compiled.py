import numba
import numpy as np
import torch

import baton.engine.compiled as module
from baton.engine.compiled import compiled, take_threads


def _fill(out):
    for place in numba.prange(out.shape[0]):
        out[place] = place + 1


def test_a_parallel_function_does_all_of_its_loop():
    out = np.zeros(100)
    compiled(_fill, parallel=True)(out)
    assert out.tolist() == list(range(1, 101))


def test_without_a_safe_layer_it_is_serial(monkeypatch):
    monkeypatch.setattr(module, "_SAFE_LAYERS", ("numba.no_such_layer",))
    function = compiled(_fill, parallel=True)
    assert not function.targetoptions["parallel"]
    out = np.zeros(3)
    function(out)
    assert out.tolist() == [1, 2, 3]


def test_without_a_cache_folder_it_is_compiled_all_the_same(monkeypatch):
    original = numba.njit

    def refuse(*, cache, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return original(**options)

    monkeypatch.setattr(module.numba, "njit", refuse)
    out = np.zeros(2)
    compiled(_fill)(out)
    assert out.tolist() == [1, 2]


def test_infinities_keep_their_meaning():
    def least(out):
        out[0] = min(out[0], -np.inf)

    out = np.zeros(1)
    compiled(least)(out)
    assert out[0] == -np.inf


def test_threads_are_those_of_torch(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    take_threads()
    assert numba.get_num_threads() == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    take_threads()
    assert numba.get_num_threads() == module._THREADS
