"""Small random models of each family, made with transformers once per test session."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from baton.engine.batch import Draw, SamplingParams, Slice, StepBatch
from baton.engine.loading import build_runner
from baton.engine.runner import ModelRunner
from baton.engine.spec import ModelSpec, read_spec

GREEDY = SamplingParams(temperature=0.0)
_SHAPE = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "eos_token_id": 2,
}
_GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": False,  # tied, the scaled embedding alone would decide the tokens
}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,  # with what follows, 22 tokens behind a prefix of 68 are expanded
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_MSCALE = {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 8.0}


_TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.2, 3.0, 7.0, 20.0],
}
# name -> (class prefix in transformers, what differs from _SHAPE)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biased": ("Llama", {"attention_bias": True, "num_key_value_heads": 4}),
    "llama-mlp-biased": ("Llama", {"mlp_bias": True, "head_dim": 20}),
    "llama-llama3-rope": ("Llama", {"rope_scaling": _LLAMA3, "tie_word_embeddings": True}),
    "llama-linear-rope": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "llama-dynamic-rope": ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama-yarn-rope": ("Llama", {"rope_scaling": _YARN, "rope_theta": 20000.0}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("Mistral", {"sliding_window": 20}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "layer_types": _LAYERS},
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "rope_theta": 1000000.0}),
    "qwen3-window": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.5, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0, "sliding_window": 16}),
    "gemma3": (
        "Gemma3",
        {**_GEMMA, "sliding_window": 11, "layer_types": _LAYERS, "rope_parameters": _TWO_ROPES},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 30}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**_EXPERTS, "num_experts": 6, "norm_topk_prob": True, "head_dim": 24},
    ),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {
            **_EXPERTS,
            "num_experts": 4,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **_LATENT,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "q_lora_rank": None,
            "rope_scaling": _MSCALE,
        },
    ),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {
            **_LATENT,
            "n_routed_experts": 8,
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **_LATENT,
            "n_routed_experts": 8,
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "rope_scaling": _MSCALE,
        },
    ),
    "deepseek-v3-plain": (
        "DeepseekV3",
        {
            **_LATENT,
            "n_routed_experts": 4,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
        },
    ),
}
_WIDE = {"head_dim": 64, "max_position_embeddings": 1100}
# Held by tests of their own.
SPECIAL: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3-longrope": (
        "Phi3",
        {
            "rope_scaling": _LONGROPE,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 128,
        },
    ),
    # Of sizes that the bfloat16 kernels take.
    "qwen3-wide": ("Qwen3", {**_WIDE, "num_attention_heads": 6}),
    "gemma2-wide": (
        "Gemma2",
        {**_GEMMA, **_WIDE, "attn_logit_softcapping": 2.0, "sliding_window": 70},
    ),
    "mixtral-wide": ("Mixtral", {**_WIDE, "num_local_experts": 4, "sliding_window": 30}),
}


@dataclass(frozen=True)
class Reference:
    """A model by transformers, and the folder that it was saved to."""

    name: str
    folder: Path
    model: Any

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[tokens, vocab]"""
        with torch.inference_mode():
            return self.model(torch.tensor([list(tokens)])).logits[0]

    def greedy(self, prompt: Sequence[int], steps: int) -> list[int]:
        with torch.inference_mode():
            out = self.model(torch.tensor([list(prompt)]), use_cache=True)
            tokens = [int(out.logits[0, -1].argmax())]
            while len(tokens) < steps:
                last = torch.tensor([[tokens[-1]]])
                out = self.model(last, past_key_values=out.past_key_values, use_cache=True)
                tokens.append(int(out.logits[0, -1].argmax()))
        return tokens


def make_model(name: str, folder: Path, **save: Any) -> Reference:
    prefix, changes = {**MODELS, **SPECIAL}[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        kind = "Gemma3Text" if prefix == "Gemma3" else prefix
        config = getattr(transformers, f"{kind}Config")(**{**_SHAPE, **changes})
        config._attn_implementation = "eager"  # the others have no soft caps
        torch.manual_seed(len(name) * 7 + 1)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
        with torch.no_grad():  # biases and norms start as zeros and ones: make them count
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.randn_like(buffer) * 0.2)
        model.save_pretrained(folder, **save)
    return Reference(name, folder, model)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in made:
            made[name] = make_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="session", params=list(MODELS))
def reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    return references(request.param)


@pytest.fixture(scope="session")
def qwen3(references: Callable[[str], Reference]) -> Reference:
    return references("qwen3")


class Story:
    """Runs sequences on a runner, with blocks taken from the pool at random."""

    def __init__(self, folder: Path, *, seed: int = 0, block_size: int = 8, **how: Any) -> None:
        self.runner: ModelRunner = build_runner(
            folder, blocks=160, block_size=block_size, dtype=how.pop("dtype", "float32"), **how
        )
        pool = self.runner.pool  # whoever reads an unwritten token shows it
        (pool.tensor if pool.scales is None else pool.scales).fill_(float("nan"))
        self.block_size = block_size
        self._free = list(range(160))
        random.Random(seed).shuffle(self._free)

    def blocks(self, tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-tokens // self.block_size))]

    def give_back(self, *slices: Slice) -> None:
        """The blocks of `slices` may be taken again, once the step to come is over."""
        for item in slices:
            self._free[:0] = item.blocks

    def logits(self, *slices: Slice) -> list[torch.Tensor]:
        return self.runner.all_logits(StepBatch(slices))

    def draw(self, *slices: Slice) -> list[int]:
        """The first drawn token of every slice that draws."""
        result = self.runner.run(StepBatch(slices))
        assert not result.broken
        return [drawn[0].token for drawn in result.drawn if drawn]

    def greedy(
        self, tokens: Sequence[int], blocks: Sequence[int], steps: int, start: int = 0
    ) -> list[int]:
        """Compute `tokens` from `start` in one slice, then decode alone."""
        known, out = len(tokens), []
        todo = list(tokens[start:])
        for _ in range(steps):
            out += self.draw(greedy_slice(todo, start, blocks))
            start, todo = known, [out[-1]]
            known += 1
        return out


def greedy_slice(tokens: Sequence[int], start: int, blocks: Sequence[int]) -> Slice:
    return Slice(tokens, start, blocks, (Draw(0, start + len(tokens), GREEDY),))


@pytest.fixture
def story() -> type[Story]:
    return Story


@pytest.fixture
def as_greedy() -> Callable[[Sequence[int], int, Sequence[int]], Slice]:
    return greedy_slice


@pytest.fixture
def prompts() -> Callable[..., list[int]]:
    def make(length: int, seed: int = 0, vocab: int = 199) -> list[int]:
        chooser = random.Random(seed)
        return [chooser.randrange(vocab) for _ in range(length)]

    return make


PARITY = Path(__file__).with_name("triton_parity.py")


@pytest.fixture(scope="session")
def triton_parity() -> ModuleType:
    """The module of that name, in this process: its checks, not its kernels, can be tested."""
    spec = importlib.util.spec_from_file_location(PARITY.stem, PARITY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checked_by_interpreter(script: Path, file: Path) -> dict[str, dict[str, Any]]:
    """Every check of `script` by name, run under Triton's interpreter: in a process of its own,
    since that is chosen when Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-P", script, "--device=cpu", f"--json={file}"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert file.exists(), done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return {each["name"]: each for each in found}


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[..., ModelSpec]:
    """Reads a `config.json` that differs from a small Llama's; "absent" leaves a field out."""

    def read(generation: Any = None, context: int = 0, **changes: Any) -> ModelSpec:
        values = {**_CONFIG, **changes}
        values = {name: value for name, value in values.items() if value != "absent"}
        (tmp_path / "config.json").write_text(json.dumps(values))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_spec(tmp_path, context)

    return read


@pytest.fixture(scope="session")
def triton_checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of `triton_parity`."""
    return checked_by_interpreter(PARITY, tmp_path_factory.mktemp("triton") / "checks.json")


@pytest.fixture(scope="session")
def attention_checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of `attention_parity`."""
    script = PARITY.with_name("attention_parity.py")
    return checked_by_interpreter(script, tmp_path_factory.mktemp("triton") / "attention.json")


@pytest.fixture(scope="session")
def codes_checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of `codes_parity`."""
    script = PARITY.with_name("codes_parity.py")
    return checked_by_interpreter(script, tmp_path_factory.mktemp("triton") / "codes.json")


@pytest.fixture(scope="session")
def latent_checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of `latent_parity`."""
    script = PARITY.with_name("latent_parity.py")
    return checked_by_interpreter(script, tmp_path_factory.mktemp("triton") / "latent.json")
