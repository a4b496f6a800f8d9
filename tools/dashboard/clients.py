"""What the mesh does for its clients: the numbers of the first look, and the gateways' panels."""

from __future__ import annotations

from tools.dashboard.panels import (
    FAILURES,
    GATEWAY,
    GENERATING,
    MODEL,
    SCHEDULER,
    Kind,
    Panel,
    Query,
    Row,
    percentiles,
    quantiles,
    rate,
    stat,
)

OVERVIEW = Row(
    "At a glance",
    (
        stat(
            "Requests",
            "Answers of the generating endpoints a second, whatever their status. None while clients send: look at Envoy's row.",
            f"sum(rate(tokenloom:http_requests_total{{{GATEWAY}, {GENERATING}}}[$__rate_interval]))",
            "reqps",
        ),
        stat(
            "Output",
            "Tokens a second that clients get. Flat while the queue grows: the workers are at their limit; add some.",
            f"sum(rate(tokenloom:generation_tokens_total{{{MODEL}}}[$__rate_interval]))",
            "short",
        ),
        stat(
            "First token, p99",
            "Request read to first token. High: the row below says which stage takes the time.",
            quantiles("time_to_first_token_seconds", MODEL)[2].expr,
            "s",
            (2, 10),
        ),
        stat(
            "Failed requests",
            "Share of requests answered with an error that is not the client's, mid-stream ones included. Any: Errors, below, says which.",
            f"sum(rate(tokenloom:request_rejected_total{{{MODEL}, {FAILURES}}}[$__rate_interval])) "
            f"/ sum(rate(tokenloom:http_requests_total{{{GATEWAY}, {GENERATING}}}[$__rate_interval]))",
            "percentunit",
            (0.001, 0.01),
        ),
        stat("Running", "Sequences that stand in a worker.", f"sum(tokenloom:num_requests_running{{{SCHEDULER}}})"),
        stat(
            "Waiting",
            "Sequences in the queue. Growing: the panel of reasons says what they lack.",
            f"sum(tokenloom:num_requests_waiting{{{SCHEDULER}}})",
            thresholds=(16, 256),
        ),
        stat(
            "KV cache",
            "Share of KV blocks that live sequences hold. Over 90%: preemptions are near; more cache memory or fewer sequences "
            "(--max-num-seqs).",
            f"max(tokenloom:kv_cache_usage_perc{{{SCHEDULER}}})",
            "percentunit",
            (0.9, 0.97),
        ),
        stat(
            "Workers",
            "Attached worker groups. 0: nothing is served; read the workers' logs.",
            f"sum(tokenloom:workers_attached{{{SCHEDULER}}})",
        ),
    ),
)

REQUESTS = Row(
    "Requests, as clients see them (gateway)",
    (
        Panel(
            "Endings",
            "Sequences a second by how they ended. `length` prevails: clients' max_tokens cut answers short. client_disconnected rises: "
            "they "
            "give up waiting; look at the first token's time. slow_reader: their network, not the mesh.",
            (
                Query(rate("request_success_total", "finished_reason", MODEL), "{{finished_reason}}"),
                Query(rate("request_cancelled_total", "reason", MODEL), "cancelled: {{reason}}"),
            ),
            "reqps",
            Kind.STACKED,
        ),
        Panel(
            "Errors",
            "Requests a second answered with an error, by its label (docs/api.md lists them). over_window, queue_full, tokenizer_busy: too "
            "little capacity. invalid_request and the like: a client's fault. Anything else: the log of the service that it names.",
            (Query(rate("request_rejected_total", "reason", MODEL), "{{reason}}"),),
            "reqps",
            Kind.STACKED,
        ),
        Panel(
            "HTTP statuses",
            "Answers a second by status. 499: the client left before the answer. A stream that broke after its first byte is a 200 here "
            "and an "
            "error in the panel beside it.",
            (Query(f"sum by (status) (rate(tokenloom:http_requests_total{{{GATEWAY}, {GENERATING}}}[$__rate_interval]))", "{{status}}"),),
            "reqps",
            Kind.STACKED,
        ),
        percentiles(
            "Time to first token",
            "Request read to first token received. High: the stages say where. Points are single requests: a click opens their trace.",
            "time_to_first_token_seconds",
            MODEL,
            exemplars=True,
        ),
        percentiles(
            "Inter-token latency",
            "Between two deliveries of one sequence. A p99 far above the median: prefills stand in the way; lower "
            "--max-num-batched-tokens.",
            "inter_token_latency_seconds",
            MODEL,
        ),
        percentiles(
            "Time per output token",
            "Mean of a sequence's tokens after the first. High: fewer sequences at once (--max-num-seqs) or more workers.",
            "time_per_output_token_seconds",
            MODEL,
            exemplars=True,
        ),
        percentiles(
            "End to end",
            "Request read to last byte sent. Rises with the output's length; compare with the stages. Points open a request's trace.",
            "e2e_request_latency_seconds",
            MODEL,
            exemplars=True,
        ),
        Panel(
            "Where the time goes",
            "Mean seconds that each stage takes of a request with one choice; they add up to its whole time. Mend the largest: queue -> "
            "capacity; prefill -> prefix caching, chunk size; decode -> sequences at once; tokenize -> pool and replicas; transport -> "
            "CPU of "
            "gateway and scheduler; lost -> a scheduler died; stream -> slow clients.",
            (
                Query(
                    rate("request_stage_seconds_sum", "stage", MODEL)
                    + " / on () group_left () "
                    + f'sum(rate(tokenloom:request_stage_seconds_count{{{MODEL}, stage="decode"}}[$__rate_interval]))',
                    "{{stage}}",
                ),
            ),
            "s",
            Kind.STACKED,
        ),
        Panel(
            "Tokens",
            "Tokens a second: prompts taken in, output received. The first far above the second: prefill decides; prefix caching and "
            "chunk size.",
            (
                Query(f"sum(rate(tokenloom:prompt_tokens_total{{{MODEL}}}[$__rate_interval]))", "prompt"),
                Query(f"sum(rate(tokenloom:generation_tokens_total{{{MODEL}}}[$__rate_interval]))", "output"),
            ),
        ),
        Panel(
            "Lengths",
            "Median and 99th percentile of prompts and outputs. Outputs near the context length: clients set no max_tokens.",
            (
                Query(quantiles("request_prompt_tokens", MODEL)[0].expr, "prompt p50"),
                Query(quantiles("request_prompt_tokens", MODEL)[2].expr, "prompt p99"),
                Query(quantiles("request_generation_tokens", MODEL)[0].expr, "output p50"),
                Query(quantiles("request_generation_tokens", MODEL)[2].expr, "output p99"),
            ),
        ),
        Panel(
            "Gateways' windows",
            "What each gateway has outstanding, and what the scheduler lets it have. At the window: 429s. All are full: add workers, not "
            "gateways.",
            (
                Query(f'tokenloom:gateway_outstanding{{{GATEWAY}, unit="sequences"}}', "outstanding {{instance}}"),
                Query(f'tokenloom:gateway_window{{{GATEWAY}, unit="sequences"}}', "window {{instance}}"),
            ),
        ),
        Panel(
            "Sessions and streams",
            "Open requests of each gateway, sessions lost and requests resubmitted. Losses: the scheduler's log; resumed requests saw a "
            "pause.",
            (
                Query(f"tokenloom:gateway_open_streams{{{GATEWAY}}}", "open {{instance}}"),
                Query(f"increase(tokenloom:gateway_session_losses_total{{{GATEWAY}}}[$__rate_interval])", "losses {{instance}}"),
                Query(f"increase(tokenloom:gateway_resumed_requests_total{{{GATEWAY}}}[$__rate_interval])", "resumed {{instance}}"),
                Query(f"tokenloom:gateway_session_up{{{GATEWAY}}}", "session up {{instance}}"),
            ),
        ),
    ),
)
