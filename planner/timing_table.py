"""A fitted timing model as text: errors and coefficients of each kind, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping

from baton.planner.timing_fit import Fit
from baton.planner.timing_model import TimingModel

FREE_KINDS = ("transfer", "host")  # cost nothing where they were not measured


def fit_lines(fit: Fit, missing: tuple[str, ...] = ()) -> list[str]:
    """Return a table of the kinds with their errors and seconds, then what was not measured."""
    lines = [f"{'kind':<12}{'samples':>8}{'median error':>14}{'p90 error':>12}  seconds"]
    terms = _terms(fit.model)
    for kind, found in fit.errors.items():
        errors = f"{found.samples:>8}{found.median:>14.1%}{found.p90:>12.1%}"
        lines.append(f"{kind:<12}{errors}  {_sum(terms[kind])}")
    free = [kind for kind in FREE_KINDS if kind not in fit.errors]
    if free:
        lines.append(f"not measured, so it costs nothing: {', '.join(free)}")
    if not (fit.model.chunk.per_token_s or fit.model.attention.per_pair_s):
        lines.append(
            "a step costs the same for every length of its chunks: this fit needs prompts of "
            "different lengths"
        )
    lines += [f"not covered: {each}" for each in missing]
    return lines


def error_text(fit: Fit) -> str:
    """Return the median errors of a fit in words."""
    found = [f"{kind} {error.median:.1%}" for kind, error in fit.errors.items()]
    return f"median errors of its fit: {', '.join(found)}" if found else "its errors are unknown"


def _terms(model: TimingModel) -> Mapping[str, tuple[tuple[float, str], ...]]:
    attention = model.attention
    pairs, context = (
        (attention.per_pair_s, "pairs"),
        (attention.per_context_token_s, "context_tokens"),
    )
    return {
        "attention": (pairs, context),
        "chunk": ((model.chunk.fixed_s, ""), (model.chunk.per_token_s, "tokens"), pairs),
        "step": ((model.step.fixed_s, ""), (model.step.per_sequence_s, "sequences"), context),
        "transfer": ((model.transfer.fixed_s, ""), (model.transfer.per_byte_s, "bytes")),
        "host": ((model.host.fixed_s, ""), (model.host.per_token_s, "tokens")),
    }


def _sum(terms: tuple[tuple[float, str], ...]) -> str:
    return " + ".join(f"{value:.3g} {name}".rstrip() for value, name in terms)
