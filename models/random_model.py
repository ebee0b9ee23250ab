"""Random-weight models as Hugging Face folders: the embedded one, and any shape for benchmarks.

They answer with noise, but real noise: every part of serving is exercised, and a wrong KV
block changes the answer. Written without transformers or torch. The embedded model lives in
the user's cache folder, keyed by the package's version and by what it is made from; whoever
needs it first makes it, in a draft folder that is renamed when complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from baton.models import demo_tokenizer, random_weights
from baton.models.random_weights import Family, Shape, WeightDtype
from baton.runtime.errors import ConfigError

EMBEDDED_SEED = 0
CONTEXT_TOKENS = 2048
_DRAFT = "draft-"
_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


def make_random_model(
    folder: Path, *, seed: int = 0, family: Family = "qwen3", dtype: WeightDtype = "float32"
) -> Path:
    """A model of 4 million parameters in `folder`, which is made if missing; returns it."""
    return make_shaped_model(
        folder,
        layers=4,
        hidden=256,
        heads=8,
        kv_heads=4,
        head_dim=32,
        ffn=768,
        vocab=demo_tokenizer.TOKENIZER_ENTRIES,
        dtype=dtype,
        seed=seed,
        family=family,
    )


def make_shaped_model(
    folder: Path,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    dtype: WeightDtype,
    seed: int,
    family: Family = "qwen3",
    context: int = CONTEXT_TOKENS,
) -> Path:
    """A model of the given shape in `folder`, which is made if missing; returns it.

    `vocab` may exceed the tokenizer's entries; the ids above are never drawn. All of it is
    held in memory once while it is written. Raises ConfigError for sizes that do not fit.
    """
    if vocab < demo_tokenizer.TOKENIZER_ENTRIES:
        raise ConfigError(f"vocab is {vocab}: give {demo_tokenizer.TOKENIZER_ENTRIES} or more")
    if heads % kv_heads:
        raise ConfigError(f"heads is {heads}: give a multiple of kv_heads ({kv_heads})")
    folder.mkdir(parents=True, exist_ok=True)
    shape = Shape(family, layers, hidden, heads, kv_heads, head_dim, ffn, vocab, context)
    tokenizer = demo_tokenizer.train()
    demo_tokenizer.write(tokenizer, folder, context)
    special = len(demo_tokenizer.SPECIAL_TOKENS)
    random_weights.write_weights(
        folder / "model.safetensors",
        shape,
        dtype,
        seed,
        said=demo_tokenizer.word_ids(tokenizer),
        known=range(special, demo_tokenizer.TOKENIZER_ENTRIES),
    )
    end, pad = (tokenizer.token_to_id(t) for t in (demo_tokenizer.END, demo_tokenizer.PAD))
    ends = {"eos_token_id": end, "pad_token_id": pad}
    _write_json(folder / "generation_config.json", {**ends, "do_sample": True})
    _write_json(folder / "config.json", {**_config(shape, dtype), **ends})
    return folder


def embedded_model() -> Path:
    """The folder of the embedded model, made now if this is the first need.

    Raises ConfigError if the cache folder cannot be written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    folder = cache / f"embedded-{_version()}-{EMBEDDED_SEED}-{_recipe()}"
    if not (folder / "config.json").is_file():
        try:
            _make_once(folder)
        except OSError as error:
            raise ConfigError(
                f"the embedded model cannot be written to {cache} ({error}): "
                "make it writable, or set XDG_CACHE_HOME to a folder that is"
            ) from error
    return folder


def _make_once(folder: Path) -> None:
    """Processes that do this at once each make a draft; the first rename wins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=folder.parent))
    try:
        make_random_model(draft, seed=EMBEDDED_SEED)
        try:
            os.rename(draft, folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # nothing left of it after the rename


def _config(shape: Shape, dtype: WeightDtype) -> dict[str, object]:
    return {
        "architectures": [_ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": random_weights.ROPE_THETA,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": None,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _version() -> str:
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "0"


def _recipe() -> str:
    """What the model is made from: another recipe is another folder."""
    digest = blake2b(digest_size=4)
    for source in ("corpus", "demo_tokenizer", "random_weights", "random_model"):
        digest.update(Path(__file__).with_name(f"{source}.py").read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    print(embedded_model())
