"""Panels and dashboards as Grafana reads them. Knows no metric.

A query may use `$SELECT` for the matchers of the dashboard's variables, as the rules do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.deploy.monitoring.rules import SELECT

RELEASE_LABEL = "app_kubernetes_io_instance"  # which the chart's PodMonitors add
CHOSEN = f'{RELEASE_LABEL}=~"$release"'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24
SCHEMA_VERSION = 39


@dataclass(frozen=True, slots=True)
class Query:
    """One line, or one for each value of the labels that `legend` names."""

    expr: str
    legend: str = ""  # Grafana's own: it names the line


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time. `meaning` is shown as its help; `unit` is one of Grafana's."""

    title: str
    meaning: str
    queries: Sequence[Query]
    unit: str = "short"


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`name` is its file, and with `baton-` before it its identity in Grafana."""

    name: str
    title: str
    question: str
    panels: Sequence[Panel]

    def queries(self) -> list[str]:
        return [query.expr for panel in self.panels for query in panel.queries]

    def body(self) -> dict[str, Any]:
        """Return the dashboard as Grafana imports it."""
        return {
            "uid": f"baton-{self.name}",
            "title": f"Baton: {self.title}",
            "description": self.question,
            "tags": ["baton"],
            "schemaVersion": SCHEMA_VERSION,
            "editable": True,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "links": [
                {
                    "type": "dashboards",
                    "title": "Baton",
                    "tags": ["baton"],
                    "asDropdown": True,
                    "includeVars": True,
                    "keepTime": True,
                }
            ],
            "templating": {"list": _variables()},
            "panels": [_panel(number, panel) for number, panel in enumerate(self.panels)],
        }


def _variables() -> list[dict[str, Any]]:
    query = f"label_values(baton_role, {RELEASE_LABEL})"
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "release",
            "type": "query",
            "label": "Release",
            "datasource": _SOURCE,
            "definition": query,
            "query": {"query": query, "refId": "release"},
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",  # also series without the label, of a fleet outside Kubernetes
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    per_row = _COLUMNS // _WIDTH
    corner = {"x": number % per_row * _WIDTH, "y": number // per_row * _HEIGHT}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "datasource": _SOURCE,
        "gridPos": {"w": _WIDTH, "h": _HEIGHT, **corner},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 10}},
            "overrides": [],
        },
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}},
        "targets": [
            {
                "refId": chr(ord("A") + letter),
                "datasource": _SOURCE,
                "expr": query.expr.replace(SELECT, CHOSEN),
                "legendFormat": query.legend or panel.title,
                "editorMode": "code",
                "range": True,
            }
            for letter, query in enumerate(panel.queries)
        ],
    }
