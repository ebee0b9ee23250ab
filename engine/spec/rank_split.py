"""The part of a model that one rank of a tensor-parallel worker holds.

    rows of q, k, v, gate, up, and their biases    by heads, or evenly    column-parallel
    columns of output, down                        by heads, or evenly    row-parallel
    rows of the embedding and of the head          evenly                 vocabulary-parallel
    norms, the router of experts, MLA's down       whole on every rank

Megatron's split (Shoeybi et al. 2019, arXiv:1909.08053): one sum over the ranks after attention and
one after the MLP. Experts are split like the MLP. If there are fewer KV heads than ranks, several
ranks hold the same KV head. The module is pure and knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.engine.spec.model_spec import ModelSpec
from baton.runtime.errors import ConfigError

MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class RankSplit:
    """Rank `rank` of `ranks`."""

    ranks: int
    rank: int

    def share(self, count: int) -> range:
        """Return this rank's range of `count` items; ranges differ in length by at most one."""
        return range(count * self.rank // self.ranks, count * (self.rank + 1) // self.ranks)

    def kv_heads(self, count: int) -> range:
        """Return this rank's KV heads of `count`; with more ranks than heads, several ranks hold
        the same head."""
        if count >= self.ranks:
            return self.share(count)
        head = self.rank * count // self.ranks
        return range(head, head + 1)


def check_split(spec: ModelSpec, ranks: int) -> None:
    """Raise ConfigError, with the number that does not divide, unless `spec` can be split over
    `ranks`."""
    if not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(f"worker.tp is {ranks}: give a number from 1 to {MAX_RANKS}")
    sizes = {"attention heads": spec.heads, "MLP columns": spec.ffn_size}
    if spec.experts is not None:
        sizes["columns of an expert"] = spec.experts.ffn_size
    for name, size in sizes.items():
        if size % ranks:
            raise ConfigError(
                f"worker.tp is {ranks}, which does not divide the model's {size} {name}: give one "
                f"of {', '.join(map(str, possible_ranks(spec)))}"
            )
    if spec.latent is None and spec.kv_heads % ranks and ranks % spec.kv_heads:
        raise ConfigError(
            f"worker.tp is {ranks}: neither it nor the model's {spec.kv_heads} KV heads divides "
            f"the other; give one of {', '.join(map(str, possible_ranks(spec)))}"
        )


def possible_ranks(spec: ModelSpec) -> list[int]:
    """Return all rank counts that `spec` can be split over, in order."""
    sizes = [spec.heads, spec.ffn_size]
    if spec.experts is not None:
        sizes.append(spec.experts.ffn_size)
    return [
        ranks
        for ranks in range(1, MAX_RANKS + 1)
        if all(size % ranks == 0 for size in sizes)
        and (spec.latent is not None or not spec.kv_heads % ranks or not ranks % spec.kv_heads)
    ]


def spec_of_rank(spec: ModelSpec, split: RankSplit) -> ModelSpec:
    """Return the spec of one rank's share: fewer heads, columns and vocabulary entries, the same
    hidden size. Raises ConfigError like `check_split`."""
    check_split(spec, split.ranks)
    experts = spec.experts
    if experts is not None:
        experts = replace(
            experts,
            ffn_size=experts.ffn_size // split.ranks,
            shared_ffn_size=experts.shared_ffn_size // split.ranks,
        )
    return replace(
        spec,
        heads=spec.heads // split.ranks,
        kv_heads=1 if spec.latent else len(split.kv_heads(spec.kv_heads)),
        ffn_size=spec.ffn_size // split.ranks,
        vocab_size=len(split.share(spec.vocab_size)),
        experts=experts,
    )
