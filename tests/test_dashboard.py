"""The Grafana dashboard and the documents are what the table of metrics says."""

import json
import re

import pytest

from app.serve.metric_table import METRICS
from docs import build_dashboard
from docs.dashboard_panels import ROWS

DASHBOARD = json.loads(build_dashboard.DASHBOARD.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPORTED = {
    metric.exported_name + suffix: metric
    for metric in METRICS
    for suffix in (["_bucket"] if metric.kind == "histogram" else [""])
}


def test_the_file_is_what_the_script_makes() -> None:
    assert build_dashboard.DASHBOARD.read_text() == build_dashboard.text()


def test_the_document_has_the_table() -> None:
    text = build_dashboard.OPERATIONS.read_text()
    assert build_dashboard.operations(text) == text
    assert all(f"`{metric.exported_name}`" in text for metric in METRICS)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_asks_for_metrics_that_are_there(panel: dict) -> None:
    assert panel["title"]
    assert panel["description"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == "${datasource}"
    assert panel["targets"]
    for target in panel["targets"]:
        expr = target["expr"]
        names = re.findall(r"\bray_\w+", expr)
        assert names
        for name in names:
            metric = EXPORTED[name]
            is_rate = f"rate({name}{{" in expr
            assert is_rate == (metric.kind != "gauge")
        for label in [*re.findall(r"by \((\w+)\)", expr), *re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])]:
            assert all(label in (EXPORTED[name].label, "le") for name in names)
        assert expr.count("(") == expr.count(")")


def test_rows_panels_and_numbers_are_in_order() -> None:
    assert [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"] == list(ROWS)
    assert "Speculation" in ROWS
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    cells = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(set(cells)) == len(cells), "panels lie upon each other"
    assert max(x for x, _ in cells) == 23


def test_the_data_source_is_a_variable_as_in_rays_dashboards() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    used = set(re.findall(r'=~"\$(\w+)"', json.dumps(DASHBOARD).replace("\\", "")))
    assert used == variables.keys() - {"datasource"}


def test_every_metric_of_speculation_is_shown() -> None:
    shown = {metric.name for panels in ROWS.values() for panel in panels for metric in panel.metrics}
    hidden = {metric.name for metric in METRICS} - shown
    sizes = {"request_prompt_tokens", "request_generation_tokens"}
    assert hidden == sizes | {"spec_decode_num_drafts", "spec_decode_draft_length"}, "k is drawn from its counters"
