"""The panels of the Grafana dashboard, as rows of queries over our own metrics; text and picture are made from them."""

from dataclasses import dataclass

from app.serve.metric import Metric
from app.serve.metric_table import METRICS

BY_NAME = {metric.name: metric for metric in METRICS}
SELECTOR = 'model_name=~"$model",replica=~"$replica"'


@dataclass(frozen=True)
class Level:
    """A gauge, over all replicas: their sum or their mean."""

    metric: str
    how: str = "sum"

    @property
    def promql(self) -> str:
        return f"{self.how}({BY_NAME[self.metric].exported_name}{{{SELECTOR}}})"


@dataclass(frozen=True)
class Rate:
    """A counter's rise a second, over all replicas, by its label where `by` is set."""

    metric: str
    by: bool = False

    @property
    def label(self) -> str | None:
        return BY_NAME[self.metric].label if self.by else None

    @property
    def promql(self) -> str:
        by = f" by ({self.label})" if self.label else ""
        return f"sum{by}(rate({BY_NAME[self.metric].exported_name}{{{SELECTOR}}}[$__rate_interval]))"


@dataclass(frozen=True)
class Ratio:
    """Of what rose to what else rose, `plus` a number; label by label where both have one."""

    top: Rate
    bottom: Rate
    plus: float = 0.0

    @property
    def promql(self) -> str:
        return (f"{self.plus:g} + " if self.plus else "") + f"{self.top.promql} / {self.bottom.promql}"


@dataclass(frozen=True)
class Quantile:
    """Of a histogram's observations."""

    metric: str
    quantile: float

    @property
    def promql(self) -> str:
        series = f"{BY_NAME[self.metric].exported_name}_bucket{{{SELECTOR}}}"
        return f"histogram_quantile({self.quantile:g}, sum by (le)(rate({series}[$__rate_interval])))"


Query = Level | Rate | Ratio | Quantile


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str  # Grafana's name of it
    queries: dict[str, Query]  # by legend; {{label}} stands for a label's value
    stacked: bool = False
    description: str = ""  # in place of what the table says of the metrics

    @property
    def metrics(self) -> list[Metric]:
        names: dict[str, None] = {}
        for query in self.queries.values():
            parts = (query.top, query.bottom) if isinstance(query, Ratio) else (query,)
            names.update(dict.fromkeys(part.metric for part in parts))
        return [BY_NAME[name] for name in names]


def _quantiles(metric: str) -> dict[str, Query]:
    return {f"p{100 * quantile:g}": Quantile(metric, quantile) for quantile in (0.5, 0.9, 0.99)}


TOKENS_A_SECOND = "suffix: tokens/s"

ROWS: dict[str, list[Panel]] = {
    "Traffic": [
        Panel(
            "Tokens a second",
            TOKENS_A_SECOND,
            {"prompt": Rate("prompt_tokens"), "generation": Rate("generation_tokens")},
        ),
        Panel(
            "Sequences",
            "short",
            {"running": Level("num_requests_running"), "waiting": Level("num_requests_waiting")},
            stacked=True,
        ),
        Panel(
            "Sequences ended a second", "ops", {"{{finished_reason}}": Rate("request_success", by=True)}, stacked=True
        ),
        Panel("Requests refused a second", "reqps", {"{{reason}}": Rate("requests_refused", by=True)}, stacked=True),
    ],
    "Latency": [
        Panel("Time to first token", "s", _quantiles("time_to_first_token_seconds")),
        Panel("Between deliveries", "s", _quantiles("inter_token_latency_seconds")),
        Panel("Time per output token, of a request", "s", _quantiles("request_time_per_output_token_seconds")),
        Panel("Whole request", "s", _quantiles("e2e_request_latency_seconds")),
    ],
    "Speculation": [
        Panel(
            "Speed-up against plain decoding",
            "suffix: ×",
            {
                "now": Ratio(Rate("spec_decode_emitted_tokens"), Rate("spec_decode_plain_tokens")),
                "predicted": Ratio(Rate("spec_decode_predicted_tokens"), Rate("spec_decode_plain_tokens")),
                "since the start": Level("spec_decode_speedup", "avg"),
            },
            description="Tokens a second over those that the controller's cost model gives for plain decoding.",
        ),
        Panel(
            "Steps left without drafts",
            "percentunit",
            {"by the controller": Ratio(Rate("spec_decode_plain_decisions"), Rate("spec_decode_decisions"))},
            description="Of those that it decided on: drafts would not have paid.",
        ),
        Panel(
            "Acceptance by position",
            "percentunit",
            {
                "{{position}}": Ratio(
                    Rate("spec_decode_num_accepted_tokens_per_pos", by=True),
                    Rate("spec_decode_num_draft_tokens_per_pos", by=True),
                )
            },
            description="Of the draft tokens that were verified at a position, the share that was accepted.",
        ),
        Panel(
            "Draft length and acceptance length",
            "suffix: tokens",
            {
                "drafts a step (k)": Ratio(Rate("spec_decode_num_draft_tokens"), Rate("spec_decode_num_verifications")),
                "tokens a step": Ratio(
                    Rate("spec_decode_num_accepted_tokens"), Rate("spec_decode_num_verifications"), plus=1
                ),
                "k allowed": Level("spec_decode_max_draft_length", "max"),
            },
            description="Of a sequence and step: drafts verified, tokens gained, and the most that may be drafted.",
        ),
        Panel(
            "Draft tokens that were not made",
            TOKENS_A_SECOND,
            {"{{reason}}": Rate("spec_decode_num_refused_tokens", by=True)},
            stacked=True,
        ),
        Panel(
            "Draft tokens a second",
            TOKENS_A_SECOND,
            {
                "drafted": Rate("spec_decode_num_draft_tokens"),
                "accepted": Rate("spec_decode_num_accepted_tokens"),
            },
        ),
        Panel(
            "Drafter faults and restarts a second",
            "ops",
            {"faults": Rate("drafter_faults"), "restarts": Rate("drafter_restarts")},
        ),
    ],
    "Engine": [
        Panel(
            "Time in each phase, a second", "suffix: s/s", {"{{phase}}": Rate("phase_seconds", by=True)}, stacked=True
        ),
        Panel("KV cache in use", "percentunit", {"mean of the replicas": Level("kv_cache_usage_perc", "avg")}),
        Panel(
            "Prefix cache hits",
            "percentunit",
            {"share of the tokens looked up": Ratio(Rate("prefix_cache_hits"), Rate("prefix_cache_queries"))},
        ),
        Panel("Steps a second", "ops", {"steps": Rate("num_steps"), "preemptions": Rate("num_preemptions")}),
        Panel("Tokens in the queues", "suffix: tokens", {"waiting": Level("num_tokens_waiting")}),
        Panel("Replicas", "short", {"reporting": Level("num_requests_running", "count")}, description="That report."),
    ],
}
