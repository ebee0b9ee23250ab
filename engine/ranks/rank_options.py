"""The options with which a rank process loads its share of a model. Immutable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from baton.engine.execution.engine_options import EngineOptions


@dataclass(frozen=True, slots=True)
class RankOptions:
    """The options of one rank, which are equal on all ranks of a worker except `rank`."""

    rank: int
    ranks: int
    folder: Path
    engine: EngineOptions  # `threads` are those of one rank
    ep: int = 1  # groups of ranks that hold different experts
    blocks: int = 0  # of the pool; known once all ranks have loaded
    memory_bytes: tuple[int, ...] = ()  # of sums, commands, logits and the pool, in this order
    store: Path | None = None  # the file by which ranks on devices of their own find each other

    def text(self) -> str:
        return json.dumps(asdict(self), default=str)

    @staticmethod
    def parse(text: str | bytes) -> RankOptions:
        """Parse the result of `text`. Raises ValueError or TypeError for anything else."""
        values = json.loads(text)
        given = values.pop("engine")
        draft = given.pop("draft_folder")
        engine = EngineOptions(**given, draft_folder=None if draft is None else Path(draft))
        folder, sizes = Path(values.pop("folder")), tuple(values.pop("memory_bytes"))
        store = values.pop("store")
        return RankOptions(
            folder=folder,
            engine=engine,
            memory_bytes=sizes,
            store=None if store is None else Path(store),
            **values,
        )

    def numerics(self, digest: str) -> str:
        """Return what identifies a deterministic worker's bits. They depend on the order of sums,
        which the proof's one text, whose digest this is, need not show."""
        split = f"{digest} tp {self.ranks} ep {self.ep}"
        return blake2b(split.encode(), digest_size=16).hexdigest()
