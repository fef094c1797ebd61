"""Every metric of a replica, with its meaning: recorder, documents and dashboard are made from this table."""

from app.serve.metric import Metric, draft_length, first_drafts, per_position, rise, rises, value, where_auto

LATENCIES_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
INTERVALS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
REQUESTS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

REFUSALS = ("request", "budget", "context", "kv", "controller", "proposer", "fault")

METRICS = (
    Metric(
        "num_requests_running",
        "gauge",
        "sequences",
        "Sequences that take part in steps; each of a request's `n` choices counts.",
        value("num_running"),
        vllm=True,
    ),
    Metric(
        "num_requests_waiting",
        "gauge",
        "sequences",
        "Sequences in the queue, for a slot or for KV blocks.",
        value("num_waiting"),
        vllm=True,
    ),
    Metric(
        "num_tokens_waiting",
        "gauge",
        "tokens",
        "Prompt tokens, and after a preemption answer tokens, of the sequences in the queue.",
        value("num_waiting_tokens"),
    ),
    Metric(
        "kv_cache_usage_perc",
        "gauge",
        "share",
        "Share of the KV blocks that sequences hold, 0 to 1. Blocks kept only for the prefix cache count as free.",
        value("kv_usage"),
        vllm=True,
    ),
    Metric(
        "prefix_cache_queries",
        "counter",
        "tokens",
        "Tokens that were looked up in the prefix cache when a sequence was first admitted.",
        rise("num_prefix_queried_tokens"),
        vllm=True,
    ),
    Metric(
        "prefix_cache_hits",
        "counter",
        "tokens",
        "Tokens that were found there, and not computed again.",
        rise("num_prefix_hit_tokens"),
        vllm=True,
    ),
    Metric(
        "num_preemptions",
        "counter",
        "sequences",
        "Sequences that gave their blocks up to older ones, and were computed again.",
        rise("num_preemptions"),
        vllm=True,
    ),
    Metric(
        "prompt_tokens",
        "counter",
        "tokens",
        "Prompt tokens of accepted requests, those found in the prefix cache included.",
        rise("num_prompt_tokens"),
        vllm=True,
    ),
    Metric(
        "generation_tokens", "counter", "tokens", "Tokens handed to clients.", rise("num_generated_tokens"), vllm=True
    ),
    Metric(
        "request_success",
        "counter",
        "sequences",
        "Sequences that ended, by reason: `stop`, `length`, `abort` (the client left) or `error`.",
        label="finished_reason",
        vllm=True,
    ),
    Metric(
        "requests_refused",
        "counter",
        "requests",
        "Requests answered with an error by reason: `overloaded` (429), `invalid` (400), `unavailable` (503, out of "
        "time), `lost` or `dead` (the engine ended with them, or before; the ingress sends them again where it can).",
        label="reason",
    ),
    Metric(
        "time_to_first_token_seconds",
        "histogram",
        "s",
        "From a request's arrival at the replica to its first token.",
        boundaries=LATENCIES_S,
        vllm=True,
    ),
    Metric(
        "inter_token_latency_seconds",
        "histogram",
        "s",
        "Between two deliveries to one sequence; with speculation a delivery is one or more tokens.",
        boundaries=INTERVALS_S,
        vllm=True,
    ),
    Metric(
        "request_time_per_output_token_seconds",
        "histogram",
        "s",
        "Of a finished sequence: time from its first to its last token over the tokens after the first.",
        boundaries=INTERVALS_S,
        vllm=True,
    ),
    Metric(
        "e2e_request_latency_seconds",
        "histogram",
        "s",
        "From a request's arrival at the replica to the end of a sequence by `stop` or `length`.",
        boundaries=REQUESTS_S,
        vllm=True,
    ),
    Metric(
        "request_prompt_tokens",
        "histogram",
        "tokens",
        "Prompt tokens of a finished sequence.",
        boundaries=TOKENS,
        vllm=True,
    ),
    Metric(
        "request_generation_tokens",
        "histogram",
        "tokens",
        "Tokens that a finished sequence got.",
        boundaries=TOKENS,
        vllm=True,
    ),
    Metric("num_steps", "counter", "steps", "Speculative steps of the engine.", rise("num_steps")),
    Metric(
        "phase_seconds",
        "counter",
        "s",
        "Time in each phase of the steps: `propose` (drafting, the drafter's catch-up included), `verify` (the "
        "target's pass), `sample` (rejection), `rest` (scheduling, commit, texts).",
        rises(
            propose=("propose_s",),
            verify=("forward_s",),
            sample=("verify_s",),
            rest=("schedule_s", "commit_s", "update_s"),
        ),
        label="phase",
    ),
    Metric(
        "spec_decode_num_drafts",
        "counter",
        "drafts",
        "Verifications of at least one draft token; one for a sequence and step.",
        first_drafts,
        vllm=True,
    ),
    Metric(
        "spec_decode_num_draft_tokens",
        "counter",
        "tokens",
        "Draft tokens that were verified.",
        rise("num_drafted"),
        vllm=True,
    ),
    Metric(
        "spec_decode_num_accepted_tokens",
        "counter",
        "tokens",
        "Draft tokens that were accepted and delivered.",
        rise("num_accepted"),
        vllm=True,
    ),
    Metric(
        "spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "tokens",
        "The same by position, from 0.",
        per_position("accepted_per_position"),
        label="position",
        vllm=True,
    ),
    Metric(
        "spec_decode_num_draft_tokens_per_pos",
        "counter",
        "tokens",
        "Draft tokens that were verified by position: lengths differ, so positions have their own denominators.",
        per_position("drafted_per_position"),
        label="position",
    ),
    Metric(
        "spec_decode_num_verifications",
        "counter",
        "steps",
        "Steps of sequences that gave tokens, with drafts or without: with the accepted tokens, all tokens.",
        rise("num_verifications"),
    ),
    Metric(
        "spec_decode_draft_length",
        "gauge",
        "tokens",
        "The current k: draft tokens of a sequence and step, mean of the last reporting period with work.",
        draft_length,
    ),
    Metric(
        "spec_decode_max_draft_length",
        "gauge",
        "tokens",
        "The most that a sequence and step may draft at present (`user_config.num_speculative_tokens`).",
        value("num_speculative_tokens"),
    ),
    Metric(
        "spec_decode_num_refused_tokens",
        "counter",
        "tokens",
        "Draft tokens below that number that were not made, by the first reason: `request` (asked for fewer), "
        "`budget` (no rows left in the step), `context` (the answer must end sooner), `kv` (no free blocks), "
        "`controller` (would not pay), `proposer` (had none to offer), "
        "`fault` (the drafter failed, or is being started anew).",
        rises(**{reason: (f"num_refused_{reason}",) for reason in REFUSALS}),
        label="reason",
    ),
    Metric(
        "drafter_faults",
        "counter",
        "steps",
        "Steps that went on without drafts, or forgot them, because the drafter failed.",
        rise("num_drafter_faults"),
    ),
    Metric(
        "drafter_restarts",
        "counter",
        "restarts",
        "Times that the drafter was started clean after a fault.",
        rise("num_drafter_restarts"),
    ),
    Metric(
        "spec_decode_speedup",
        "gauge",
        "ratio",
        "Tokens a second since the start, over those that the controller's cost model gives for plain decoding of the "
        "same work; only with `num_speculative_tokens: auto`.",
        where_auto(value("controller_measured_gain")),
    ),
    Metric(
        "spec_decode_emitted_tokens",
        "counter",
        "tokens",
        "The numerator of the speed-up: tokens of the steps that the controller decided on.",
        where_auto(rise("controller_emitted_tokens")),
    ),
    Metric(
        "spec_decode_plain_tokens",
        "counter",
        "tokens",
        "Its denominator: what plain decoding would have given in the same time.",
        where_auto(rise("controller_plain_tokens")),
    ),
)
