"""The JSON of an explanation: the decision, and what each worker would have cost."""

from __future__ import annotations

from dataclasses import asdict

from baton.router.fleet.explain import Explanation

UNIT = "tenths of a prompt token's computation"


def explained(explanation: Explanation) -> dict[str, object]:
    """Return the body for one prompt. It holds sizes and the names of workers, no text."""
    placement = explanation.placement
    return {
        "decision": "local" if placement.local else "disaggregated",
        "reason": placement.reason,
        "prompt_tokens": explanation.prompt_tokens,
        "decode_worker": placement.decode.worker_id,
        "prefill_candidates": [worker.worker_id for worker in placement.candidates],
        "read_from": placement.source.worker.worker_id if placement.source else None,
        "prefill_cost": {
            "here": explanation.local_cost,
            "remote": explanation.remote_cost,
            "unit": UNIT,
        },
        "decode_costs": {"unit": UNIT, "workers": [asdict(each) for each in explanation.decode]},
        "prefill_costs": {"unit": UNIT, "workers": [asdict(each) for each in explanation.prefill]},
    }
