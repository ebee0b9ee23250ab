"""The random model loads in transformers, speaks, and depends on every KV block it has."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from baton.models.corpus.sentences import sentences
from baton.models.embedded import embedded_model
from baton.models.random_model import CONTEXT_TOKENS, make_shaped_model
from baton.models.training import tiny_tokenizer
from baton.runtime.errors import ConfigError

ENTRIES = Tokenizer.from_file(str(embedded_model() / "tokenizer.json")).get_vocab_size()

BLOCK = 16
SMALL = dict(
    layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32, ffn=768, vocab=4096, dtype="float32",
    seed=0,
)  # fmt: skip
TINY = dict(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, dtype="float32", seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shaped_model(tmp_path_factory.mktemp("model"), **SMALL)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, tokens: int) -> torch.Tensor:
    text = " ".join(sentences(tokens // 4, seed=9))
    ids: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    assert ids.shape == (1, tokens)
    return ids


@torch.no_grad()
def greedy(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache, count: int) -> list[int]:
    """`count` tokens after `ids`, of which all but the last are in the cache."""
    out: list[int] = []
    token = ids[:, -1:]
    for _ in range(count):
        token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        out.append(int(token))
    return out


@pytest.fixture(scope="module")
def filled(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[torch.Tensor, DynamicCache]:
    ids = prompt_ids(tokenizer, 6 * BLOCK)
    cache = DynamicCache()
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
    return ids, cache


def _zero(keys: torch.Tensor, values: torch.Tensor) -> None:
    keys.zero_()
    values.zero_()


def _noise(keys: torch.Tensor, values: torch.Tensor) -> None:
    keys.normal_(generator=torch.Generator().manual_seed(1))
    values.normal_(generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("layer", "damage"),
    [
        (0, _noise),
        (3, _noise),
        (0, _zero),
        *(
            pytest.param(layer, damage, marks=pytest.mark.nightly)
            for layer, damage in ((1, _noise), (2, _noise), (1, _zero), (2, _zero), (3, _zero))
        ),
    ],
)
def test_a_wrong_block_of_any_layer_changes_the_continuation(
    model: PreTrainedModel,
    filled: tuple[torch.Tensor, DynamicCache],
    layer: int,
    damage: Callable[..., None],
) -> None:
    ids, cache = filled
    right = greedy(model, ids, copy.deepcopy(cache), 32)
    assert right == greedy(model, ids, copy.deepcopy(cache), 32)
    changed = 0
    for block in range(5):
        wrong = copy.deepcopy(cache)
        span = slice(block * BLOCK, (block + 1) * BLOCK)
        held = wrong.layers[layer]
        damage(held.keys[:, :, span], held.values[:, :, span])
        changed += greedy(model, ids, wrong, 32) != right
    assert changed == 5


def test_a_block_in_anothers_place_changes_the_continuation(
    model: PreTrainedModel, filled: tuple[torch.Tensor, DynamicCache]
) -> None:
    """(Two blocks that change places do not: keys carry their positions.)"""
    ids, cache = filled
    right = greedy(model, ids, copy.deepcopy(cache), 32)
    wrong = copy.deepcopy(cache)
    for held in wrong.layers:
        for part in (held.keys, held.values):
            part[:, :, :BLOCK] = part[:, :, BLOCK : 2 * BLOCK]
    assert greedy(model, ids, wrong, 32) != right


@pytest.mark.parametrize(
    "question",
    [
        "Why is the sky blue?",
        *(pytest.param(text, marks=pytest.mark.nightly) for text in ("Hello", "2 + 2 = ?")),
    ],
)
def test_greedy_output_does_not_repeat_itself(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str
) -> None:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**ids, max_new_tokens=128, do_sample=False)[0, ids.input_ids.shape[1] :]
    assert len(out) == 128  # the end token is never drawn
    assert len(set(out.tolist())) >= 64
    assert "\ufffd" not in tokenizer.decode(out)


@torch.no_grad()
def test_attention_adds_about_as_much_as_the_mlp(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    added: dict[str, float] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: object, __: object, output: torch.Tensor) -> None:
            added[name] = float(output.std())

        return hook

    hooks = [
        part.register_forward_hook(note(f"{kind} {number}"))
        for number, layer in enumerate(model.model.layers)
        for kind, part in (("attention", layer.self_attn.o_proj), ("mlp", layer.mlp.down_proj))
    ]
    model(prompt_ids(tokenizer, 256))
    for hook in hooks:
        hook.remove()
    assert len(added) == 8
    for number in range(4):
        assert 0.5 < added[f"attention {number}"] / added[f"mlp {number}"] < 2.0


@torch.no_grad()
def test_rounding_stays_below_the_gap_of_the_best_two_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    ids = prompt_ids(tokenizer, 512)
    whole = model(ids).logits[0]
    cache = DynamicCache()
    chunked = torch.cat(
        [model(ids[:, at : at + 128], past_key_values=cache).logits[0] for at in range(0, 512, 128)]
    )
    best = whole.topk(2).values
    gaps = best[:, 0] - best[:, 1]
    assert float((whole - chunked).abs().max()) < float(gaps.median()) / 1000


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()
def test_every_family_and_dtype_loads_and_gives_finite_logits(
    tmp_path: Path, family: str, dtype: str
) -> None:
    shape = {**SMALL, "family": family, "dtype": dtype, "seed": 3}
    make_shaped_model(tmp_path / "m", **shape)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.model_type == family
    assert model.dtype == getattr(torch, dtype)
    assert 2e6 < sum(weight.numel() for weight in model.parameters()) < 8e6
    logits = model(torch.arange(100, 132)[None]).logits.float()
    assert logits.isfinite().all()
    words = logits[0, :, 300:3600].std()  # ids that the tokenizer has
    assert 1.0 < float(words) < 6.0
    assert float(logits[..., :6].max()) < float(logits.max()) - 10  # special tokens


def test_bfloat16_is_float32_rounded_to_the_nearest(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        make_shaped_model(tmp_path / dtype, vocab=4096, **{**TINY, "dtype": dtype})
    with (
        safe_open(tmp_path / "float32/model.safetensors", "pt") as exact,
        safe_open(tmp_path / "bfloat16/model.safetensors", "pt") as rounded,
    ):
        assert set(exact.keys()) == set(rounded.keys())
        assert exact.metadata() == {"format": "pt"}
        for name in exact.keys():  # noqa: SIM118 - not a mapping
            assert torch.equal(exact.get_tensor(name).bfloat16(), rounded.get_tensor(name))


def test_the_seed_determines_the_files(tmp_path: Path) -> None:
    one, same, other = (
        make_shaped_model(tmp_path / name, vocab=4096, **{**TINY, "seed": seed})
        for name, seed in (("one", 5), ("same", 5), ("other", 6))
    )
    for file in one.iterdir():
        assert file.read_bytes() == (same / file.name).read_bytes(), file.name
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


@torch.no_grad()
def test_ids_above_the_tokenizer_are_never_drawn(tmp_path: Path) -> None:
    folder = make_shaped_model(tmp_path / "m", vocab=5000, context=64, **TINY)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.vocab_size, model.config.max_position_embeddings) == (5000, 64)
    share = model(torch.arange(4900, 4964)[None]).logits.softmax(-1)[..., 4096:].sum(-1)
    assert float(share.max()) < 1e-6


@pytest.mark.parametrize(
    ("change", "reported"),
    [({"vocab": 2048}, f"give {ENTRIES} or more"), ({"kv_heads": 3}, "multiple of")],
)
def test_sizes_that_do_not_fit_are_refused(
    tmp_path: Path, change: dict[str, int], reported: str
) -> None:
    with pytest.raises(ConfigError, match=reported):
        make_shaped_model(tmp_path / "m", **{**TINY, "vocab": 4096, **change})


def test_the_folder_says_what_serving_needs(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == CONTEXT_TOKENS
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    end = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert end == config["eos_token_id"] == tiny_tokenizer.SPECIAL_TOKENS.index("<|end|>")
