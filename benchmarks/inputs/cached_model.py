"""The random models that the benchmarks run, in the user's cache folder.

Qwen3-shaped, bf16. Made at the first need, in a draft folder that is renamed when complete.
Holds no state.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from baton.models.random_model import make_shaped_model
from baton.models.random_weights import RandomShape

MODEL_SEED = 0
VOCABULARY = 8192
CONTEXT_TOKENS = 2048
# by their number of parameters
SHAPES = {
    "0.45b": RandomShape("qwen3", 28, 1024, 16, 8, 128, 3072, VOCABULARY, CONTEXT_TOKENS),
    "0.1b": RandomShape("qwen3", 12, 768, 12, 4, 64, 2304, VOCABULARY, CONTEXT_TOKENS),
}


def cached_model(name: str = "0.45b") -> Path:
    """Return the folder; its name says what is in it, so that another model is another folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    folder = cache / f"benchmark-{name}-{VOCABULARY}-{CONTEXT_TOKENS}-{MODEL_SEED}"
    if (folder / "config.json").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="draft-", dir=cache))
    try:
        make_shaped_model(draft, dtype="bfloat16", seed=MODEL_SEED, **asdict(SHAPES[name]))
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder
