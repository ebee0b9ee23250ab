"""Checks of what grammars promise: every mask is the grammar's own, and so is every answer.

A mask is compared, as it is computed, with that of a matcher which has read the same tokens and
nothing else: so a matcher that was not brought to the accepted tokens after a migration, or kept a
rejected proposal, is seen even where the token that is drawn is the right one by chance. Nothing
here changes what happens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from baton.simulation.fleet.history import FINISHED, History
from baton.simulation.fleet.lab_vocabulary import END, matcher_behind
from baton.simulation.fleet.world import WorkerProcess


def watch_masks(process: WorkerProcess, breaches: list[str]) -> None:
    """Compare each mask that a worker computes from now on."""
    grammars: Any = process.worker._grammars
    make, name = grammars.masks, process.machine.name

    def watched(message: Any, grammar: Any, output: Any) -> Any:
        masks: Any = make(message, grammar, output)
        compute, size = masks.bits, grammar.vocabulary.size

        def compared(length: int, tail: tuple[int, ...]) -> bytes | None:
            bits: bytes | None = compute(length, tail)
            tokens = [*output[:length], *tail]
            matcher = matcher_behind(message.text, size, tokens)
            right = None if matcher is None else matcher.bitmask()
            if bits != right:
                breaches.append(
                    f"{name}: the mask behind {length} accepted tokens and {len(tail)} proposals "
                    "is not that of the grammar"
                )
            return bits

        masks.bits = compared
        return masks

    grammars.masks = watched


def outside_grammar(history: History, size: int) -> Iterable[str]:
    """Name the choices that their grammar does not admit, whole where they end by themselves."""
    ask = history.ask
    for choice, tokens in enumerate(history.tokens):
        matcher = matcher_behind(ask.grammar, size, [token for token in tokens if token != END])
        if matcher is None:
            yield f"choice {choice}: its grammar does not admit {tokens}"
        elif history.ends == [FINISHED] and tokens and tokens[-1] == END and not matcher.complete:
            yield f"choice {choice}: it stops within its grammar: {tokens}"
