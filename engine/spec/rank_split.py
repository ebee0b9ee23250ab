"""The part of a model that one rank of a tensor-parallel worker holds.

    rows of q, k, v, gate, up, and their biases    by heads, or evenly    column-parallel
    columns of output, down                        by heads, or evenly    row-parallel
    rows of the embedding and of the head          evenly                 vocabulary-parallel
    norms, the router of experts, MLA's down       whole on every rank
    experts                                        divided, or split like the MLP

Megatron's split (Shoeybi et al. 2019, arXiv:1909.08053): one sum over the ranks after attention and
one after the MLP. If there are fewer KV heads than ranks, several ranks hold the same KV head.

Expert parallelism divides the ranks into `ep` groups of neighbours. A group holds an equal,
contiguous part of each layer's experts, and each of its ranks a slice of all of them:

    4 ranks, 8 experts    ep 1: a quarter of each expert    ep 2: a half of each of four experts
                          ep 4: two whole experts

The sum after the MLP adds the groups' results. Shared experts are split over all ranks. The module
is pure and knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.engine.spec.model_spec import ModelSpec
from baton.engine.spec.moe_spec import ExpertsSpec
from baton.runtime.errors import ConfigError

MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class RankSplit:
    """Rank `rank` of `ranks`, which form `ep` groups of experts."""

    ranks: int
    rank: int
    ep: int = 1

    @property
    def slices(self) -> int:
        """Return the number of ranks over which an expert is split."""
        return self.ranks // self.ep

    @property
    def slice(self) -> int:
        """Return this rank's place among the ranks that hold the same experts."""
        return self.rank % self.slices

    def experts(self, count: int) -> range:
        """Return the experts of `count` that this rank holds, whole or a slice of each."""
        held, group = count // self.ep, self.rank // self.slices
        return range(held * group, held * (group + 1))

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


def check_split(spec: ModelSpec, ranks: int, ep: int = 1) -> None:
    """Raise ConfigError, with the number that does not divide, unless `spec` can be split over
    `ranks` in `ep` groups of experts."""
    if not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(f"worker.tp is {ranks}: give a number from 1 to {MAX_RANKS}")
    if ep != 1 and spec.experts is None:
        raise ConfigError(
            f"worker.ep is {ep}, but a {spec.family} model has no experts: set worker.ep to 1"
        )
    for name, size in _divided(spec).items():
        if size % ranks:
            raise ConfigError(
                f"worker.tp is {ranks}, which does not divide the model's {size} {name}: give one "
                f"of {_listed(possible_ranks(spec))}"
            )
    if spec.latent is None and spec.kv_heads % ranks and ranks % spec.kv_heads:
        raise ConfigError(
            f"worker.tp is {ranks}: neither it nor the model's {spec.kv_heads} KV heads divides "
            f"the other; give one of {_listed(possible_ranks(spec))}"
        )
    if spec.experts is not None and ep not in possible_groups(spec.experts, ranks):
        count, columns = spec.experts.count, spec.experts.ffn_size
        groups = _listed(possible_groups(spec.experts, ranks))
        raise ConfigError(
            f"worker.ep is {ep} and worker.tp {ranks}: worker.ep must divide worker.tp and the "
            f"model's {count} experts, and worker.tp / worker.ep the {columns} columns of an "
            f"expert; give " + (f"worker.ep one of {groups}" if groups else "another worker.tp")
        )


def divides(spec: ModelSpec, ranks: int) -> bool:
    """Return whether `spec` can be split over `ranks` in one group of experts."""
    try:
        check_split(spec, ranks)
    except ConfigError:
        return False
    return True


def possible_groups(experts: ExpertsSpec, ranks: int) -> list[int]:
    """Return the numbers of groups, in order, in which `ranks` can hold the experts."""
    return [
        groups
        for groups in range(1, ranks + 1)
        if ranks % groups == 0
        and experts.count % groups == 0
        and experts.ffn_size % (ranks // groups) == 0
    ]


def possible_ranks(spec: ModelSpec) -> list[int]:
    """Return all rank counts that `spec` can be split over, in any groups, in order."""
    return [
        ranks
        for ranks in range(1, MAX_RANKS + 1)
        if all(size % ranks == 0 for size in _divided(spec).values())
        and (spec.experts is None or possible_groups(spec.experts, ranks))
        and (spec.latent is not None or not spec.kv_heads % ranks or not ranks % spec.kv_heads)
    ]


def _divided(spec: ModelSpec) -> dict[str, int]:
    """Return the sizes of which each rank has an equal part, by name."""
    sizes = {"attention heads": spec.heads, "MLP columns": spec.ffn_size}
    if spec.experts is not None:
        sizes["columns of the shared experts"] = spec.experts.shared_ffn_size
    return sizes


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def spec_of_rank(spec: ModelSpec, split: RankSplit) -> ModelSpec:
    """Return the spec of one rank's share: fewer heads, columns and vocabulary entries, the same
    hidden size. Raises ConfigError like `check_split`."""
    check_split(spec, split.ranks, split.ep)
    experts = spec.experts
    if experts is not None:
        held = split.experts(experts.count)
        experts = replace(
            experts,
            ffn_size=experts.ffn_size // split.slices,
            shared_ffn_size=experts.shared_ffn_size // split.ranks,
            held=(held.start, held.stop),
        )
    return replace(
        spec,
        heads=spec.heads // split.ranks,
        kv_heads=1 if spec.latent else len(split.kv_heads(spec.kv_heads)),
        ffn_size=spec.ffn_size // split.ranks,
        vocab_size=len(split.share(spec.vocab_size)),
        experts=experts,
    )
