"""The finding of `baton doctor` about running instances: does KV move to the decode workers?

A fleet whose prefill workers help no prompt serves on, only slower. Reads the metrics of each
router, which counts the prompts of the last minutes; changes nothing.
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from baton.deploy.cli.doctor import Finding
from baton.deploy.cli.process_list import running
from baton.deploy.host.router_trust import connect, url_of
from baton.deploy.serve.plan import ROUTER_JOB
from baton.router.fleet.recent_prompts import WINDOW_S

NAME = "kv transfers"
SCRAPE_TIMEOUT_S = 2.0
PREFILLS = "baton_recent_prefills"
REMEDIES = {  # of what is a fault where no KV moves
    "failed": "handoffs fail: see `handoff failed` in the decode workers' logs",
    "configured": "router.placement is local: set it to auto",
    "cheaper": "prefill workers' queues are too long: see `baton explain FILE`; start more, or set "
    "router.placement=disaggregated",
    "alone": "requests hung workers before: see the log for `worker hung`",
    "no_prefill_worker": "a prefill worker was linked only later: send requests again",
    "incompatible": "run all workers with the same model, dtype, pool settings, processor type and "
    "version; during an upgrade, wait until the workers of the other role are replaced too",
    "too_large": "give prefill workers a larger pool (pool.blocks, pool.memory_fraction)",
    "left": "prefill workers drain or restart: see `baton ps` and their logs",
}

# A decode worker prefills these better by itself: a fleet that gets no others is in order.
HARMLESS = ("short", "cached")

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def kv_transfers() -> list[Finding]:
    """Return a finding for each instance of this user whose router answers."""
    rows = running()
    found = []
    for instance in sorted({row.instance for row in rows}):
        own = [row for row in rows if row.instance == instance]
        routers = [_scrape(row.address) for row in own if row.name == ROUTER_JOB and row.address]
        found += [judged(instance, router) for router in routers if router]
    return found


def judged(instance: str, router: Samples) -> Finding:
    """Return the finding for one router, from its metrics."""
    linked = int(total(router, "baton_links", peer="prefill"))
    moved = int(total(router, PREFILLS, outcome="moved"))
    reasons = (*REMEDIES, *HARMLESS)
    outcomes = {outcome: int(total(router, PREFILLS, outcome=outcome)) for outcome in reasons}
    local = sum(outcomes.values())
    minutes = f"the last {WINDOW_S / 60:g} minutes"
    seen = f"{instance}: {linked} prefill workers; in {minutes} KV moved for {moved} of"
    seen += f" {moved + local} prompts"
    if not linked or not local or moved:
        return Finding(NAME, "ok", seen)
    counted = sorted(((n, outcome) for outcome, n in outcomes.items() if n), reverse=True)
    seen += ": " + ", ".join(f"{outcome} {n}" for n, outcome in counted)
    remedies = [REMEDIES[outcome] for _, outcome in counted if outcome in REMEDIES]
    return Finding(NAME, "warn", seen, remedies[0]) if remedies else Finding(NAME, "ok", seen)


def total(samples: Samples, name: str, **labels: str) -> float:
    """Return the sum of a metric over the series that have these labels."""
    wanted = set(labels.items())
    return sum(n for (found, own), n in samples.items() if found == name and wanted <= own)


def parsed(text: str) -> Samples:
    """Return Baton's own samples of a /metrics body. Raises ValueError for another body."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("baton_")
    }


def _scrape(address: str) -> Samples:
    """Return the samples of a process; none where it does not answer in time."""
    connection = connect(url_of(address), SCRAPE_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        return parsed(connection.getresponse().read().decode())
    except (OSError, http.client.HTTPException, ValueError):
        return {}  # `baton ps` shows a process that does not answer
    finally:
        connection.close()
