"""Reads tables of measured kernels from Parquet files, and the shape of a model's rank for them.

pyarrow is imported when tables are read, and by nothing else; no extra brings it. Keeps no state.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.deploy.host.packages import installed
from baton.engine.spec.model_spec import read_spec
from baton.engine.spec.rank_split import RankSplit, spec_of_rank
from baton.planner.kernel_times import COLUMNS, RankForm, Table
from baton.runtime.errors import ConfigError

MAX_ROWS = 4_000_000
KV_NUMBER_BYTES = {"bfloat16": 2, "fp8": 1}


def read_tables(folder: Path, backend: str) -> dict[str, Table]:
    """Return the tables of a server in `folder`, by kernel: the one file that is named
    BACKEND-VERSION-KERNEL_perf.parquet. Raises ConfigError."""
    if not installed("pyarrow"):
        raise ConfigError("--tables needs pyarrow: pip install pyarrow")
    return {kernel: _read(_file(folder, backend, kernel), COLUMNS[kernel]) for kernel in COLUMNS}


def _file(folder: Path, backend: str, kernel: str) -> Path:
    found = sorted(folder.glob(f"{backend}-*-{kernel}_perf.parquet"))
    if len(found) != 1:
        raise ConfigError(
            f"{folder} has {len(found)} files {backend}-VERSION-{kernel}_perf.parquet, and one is "
            "needed: give another --tables or --backend"
        )
    return found[0]


def _read(path: Path, names: tuple[str, ...]) -> dict[str, NDArray[np.generic]]:
    pyarrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
        missing = sorted({*names} - {*file.schema_arrow.names})
        if missing:
            raise ConfigError(f"{path} lacks the columns {', '.join(missing)}")
        if file.metadata.num_rows > MAX_ROWS:
            raise ConfigError(f"{path} has more than {MAX_ROWS} rows")
        table = file.read(columns=list(names))
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {error}") from error
    return {name: table[name].to_numpy() for name in names}


def rank_form(folder: Path, ranks: int, gemm_dtype: str, kv_dtype: str) -> tuple[RankForm, int]:
    """Return the shape of one of `ranks` of a model, and the bytes of KV of a token. Raises
    ModelError for a model that is not served, ConfigError for one that the tables do not describe
    or that cannot be divided so."""
    spec = read_spec(folder)
    if spec.experts is not None or spec.latent is not None or any(spec.attention.windows):
        raise ConfigError(
            f"{folder}: --tables describes dense models with ordinary attention in each layer (no "
            "experts, no latent KV, no window); measure this one, and give --samples"
        )
    own = spec_of_rank(spec, RankSplit(ranks, 0))
    form = RankForm(
        layers=own.layers,
        hidden_size=own.hidden_size,
        heads=own.heads,
        kv_heads=own.kv_heads,
        head_dim=own.head_dim,
        ffn_size=own.ffn_size,
        vocab_size=own.vocab_size,
        gemm_dtype=gemm_dtype,
        kv_dtype=kv_dtype,
    )
    numbers = 2 * spec.layers * spec.kv_heads * spec.head_dim
    return form, numbers * KV_NUMBER_BYTES[kv_dtype]
