"""Writes docs/grafana_dashboard.json, and the table of metrics in docs/operations.md, from the table in the code.

python -m docs.build_dashboard
"""

import json
import re
from pathlib import Path
from typing import Any

from app.serve.metric import Metric
from app.serve.metric_table import METRICS
from docs.dashboard_panels import BY_NAME, ROWS, Panel

FOLDER = Path(__file__).parent
DASHBOARD = FOLDER / "grafana_dashboard.json"
OPERATIONS = FOLDER / "operations.md"
WIDTH, HEIGHT, NUM_COLUMNS = 24, 8, 2
TABLE = re.compile(r"(<!-- metrics: .*? -->\n).*?(<!-- end of metrics -->)", re.DOTALL)


def dashboard() -> dict[str, Any]:
    """As Grafana imports it; the data source is a variable, as in Ray's own dashboards."""
    return {
        "annotations": {"list": []},
        "editable": True,
        "graphTooltip": 1,
        "links": [],
        "panels": _panels(),
        "refresh": "10s",
        "schemaVersion": 39,
        "tags": ["forerun", "ray"],
        "templating": {"list": [_data_source(), _variable("model", "model_name"), _variable("replica", "replica")]},
        "time": {"from": "now-30m", "to": "now"},
        "timepicker": {},
        "timezone": "",
        "title": "Forerun",
        "uid": "forerun",
        "version": 1,
    }


def metrics_table() -> str:
    lines = ["| metric | kind, unit | label | meaning |", "|---|---|---|---|"]
    lines.extend(
        f"| `{metric.exported_name}`{' ᵛ' * metric.vllm} | {metric.kind}, {metric.unit} "
        f"| {f'`{metric.label}`' if metric.label else ''} | {metric.meaning} |"
        for metric in METRICS
    )
    return "\n".join(lines) + "\n"


def operations(text: str) -> str:
    """The document with the table as it is now."""
    text, num = TABLE.subn(lambda found: f"{found[1]}\n{metrics_table()}\n{found[2]}", text)
    assert num == 1, "the marks around the table are gone"
    return text


def _panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for title, panels in ROWS.items():
        made.append(
            {
                "id": len(made) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y},
                "panels": [],
            }
        )
        for index, panel in enumerate(panels):
            line, column = divmod(index, NUM_COLUMNS)
            width = WIDTH // NUM_COLUMNS
            place = {"h": HEIGHT, "w": width, "x": width * column, "y": y + 1 + HEIGHT * line}
            made.append(_panel(panel, len(made) + 1, place))
        y += 1 + HEIGHT * -(-len(panels) // NUM_COLUMNS)
    return made


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.stacked else 5,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description or " ".join(metric.meaning for metric in panel.metrics),
        "datasource": "${datasource}",
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query.promql, "legendFormat": legend, "range": True}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _data_source() -> dict[str, Any]:
    return {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "hide": 2,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
    }


def _variable(name: str, label: str) -> dict[str, Any]:
    metric: Metric = BY_NAME["num_requests_running"]
    definition = f"label_values({metric.exported_name}, {label})"
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": "${datasource}",
        "definition": definition,
        "query": {"query": definition, "refId": "StandardVariableQuery"},
        "hide": 0,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
        "refresh": 2,
        "regex": "",
        "sort": 1,
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    DASHBOARD.write_text(text())
    OPERATIONS.write_text(operations(OPERATIONS.read_text()))
    print(DASHBOARD, OPERATIONS, sep="\n")


if __name__ == "__main__":
    main()
