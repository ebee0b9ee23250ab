"""The random 0.45 B-parameter model that the benchmarks run, in the user's cache folder.

Qwen3-shaped, bf16. Made at the first need, in a draft folder that is renamed when complete.
Holds no state.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from baton.models.random_model import make_shaped_model

MODEL_SEED = 0
VOCABULARY = 8192
CONTEXT_TOKENS = 2048


def cached_model() -> Path:
    """The folder; the name says what is in it, so that another model is another folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    folder = cache / f"benchmark-0.45b-{VOCABULARY}-{CONTEXT_TOKENS}-{MODEL_SEED}"
    if (folder / "config.json").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="draft-", dir=cache))
    try:
        make_shaped_model(
            draft,
            layers=28,
            hidden=1024,
            heads=16,
            kv_heads=8,
            head_dim=128,
            ffn=3072,
            vocab=VOCABULARY,
            dtype="bfloat16",
            seed=MODEL_SEED,
            context=CONTEXT_TOKENS,
        )
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder
