"""The random models that the benchmarks run, in the user's cache folder.

Qwen3-shaped, bf16. Made at the first need, in a draft folder that is renamed when complete.
Holds no state.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from baton.models.random_model import make_shaped_model

MODEL_SEED = 0
VOCABULARY = 8192
CONTEXT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a model; the name is of its parameters."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int


LARGE = ModelSize("0.45b", 28, hidden=1024, heads=16, kv_heads=8, head_dim=128, ffn=3072)
SMALL = ModelSize("0.1b", 12, hidden=768, heads=12, kv_heads=4, head_dim=64, ffn=2304)


def cached_model(shape: ModelSize = LARGE) -> Path:
    """Return the folder; its name says what is in it, so that another model is another folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    folder = cache / f"benchmark-{shape.name}-{VOCABULARY}-{CONTEXT_TOKENS}-{MODEL_SEED}"
    if (folder / "config.json").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="draft-", dir=cache))
    try:
        make_shaped_model(
            draft,
            layers=shape.layers,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            ffn=shape.ffn,
            vocab=VOCABULARY,
            dtype="bfloat16",
            seed=MODEL_SEED,
            context=CONTEXT_TOKENS,
        )
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder
