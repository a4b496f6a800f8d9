"""Workers, tokenizers, Envoy, and the processes of all services."""

from __future__ import annotations

from tools.dashboard.panels import (
    GATEWAY,
    MODEL,
    SERVICES,
    TOKENIZER,
    UPSTREAMS,
    WORKER,
    Kind,
    Panel,
    Query,
    Row,
    mean,
    percentiles,
    quantiles,
    rate,
)

WORKING = Row(
    "Worker",
    (
        Panel(
            "Where a step's time goes",
            "Mean seconds of a step: forward pass, sampling, and the rest. Sampling large: wide top_p without top_k.",
            (
                Query(mean("worker_forward_seconds", WORKER), "forward"),
                Query(mean("worker_sample_seconds", WORKER), "sample"),
                Query(" - ".join(mean(f"worker_{part}_seconds", WORKER) for part in ("step", "forward", "sample")), "rest"),
            ),
            "s",
            Kind.STACKED,
        ),
        Panel(
            "Idle between steps",
            "Share of the time that a worker waits though batches keep coming. Over a few percent: scheduler, network or CPU contention.",
            (Query(f"rate(tokenloom:worker_idle_seconds_total{{{WORKER}}}[$__rate_interval])", "{{instance}}"),),
            "percentunit",
        ),
        Panel(
            "Batch",
            "Mean rows and tokens of a step. Tokens always at --max-num-batched-tokens: prefill-bound. Few rows under load: "
            "--max-num-seqs or cache.",
            (Query(mean("worker_batch_rows", WORKER), "rows"), Query(mean("worker_batch_tokens", WORKER), "tokens")),
        ),
        Panel(
            "Tokens computed",
            "Tokens a second by phase. Far above what clients are billed: recomputation after preemptions or losses.",
            (Query(rate("worker_tokens_total", "phase", WORKER), "{{phase}}"),),
            kind=Kind.STACKED,
        ),
        Panel(
            "Steps by outcome",
            "failed: the worker's log says why. not_run follows a failed one, or a new leader.",
            (Query(rate("batches_total", "outcome", WORKER), "{{outcome}}"),),
            "ops",
            Kind.STACKED,
        ),
        Panel(
            "Slots and blocks",
            "Sequences in slots, and the KV blocks that the device has. Slots at --max-num-seqs: others wait for one.",
            (
                Query(f"tokenloom:worker_slots_used{{{WORKER}}}", "slots {{instance}}"),
                Query(f"tokenloom:worker_kv_blocks{{{WORKER}}}", "blocks {{instance}}"),
            ),
        ),
    ),
)

TOKENIZING = Row(
    "Tokenizer",
    (
        percentiles(
            "Call, seen from the gateways",
            "Round trip of an encode call, Envoy included. High while encoding is fast: queue, network, or the tokenizers' CPU.",
            "tokenizer_call_seconds",
            MODEL,
        ),
        Panel(
            "Queue and encoding",
            "p99 of waiting for an encoder process and of rendering and encoding. Waiting: --tokenizer-pool-size or replicas. Encoding: "
            "very "
            "long prompts or a slow template.",
            (
                Query(quantiles("tokenizer_queue_seconds", TOKENIZER)[2].expr, "queue p99"),
                Query(quantiles("tokenizer_encode_seconds", TOKENIZER)[2].expr, "encode p99"),
            ),
            "s",
        ),
        Panel(
            "Pool",
            "Encoder processes at work and alive. All at work for long: prompts wait. Fewer alive than --tokenizer-pool-size: the log.",
            (
                Query(f"tokenloom:tokenizer_pool_busy{{{TOKENIZER}}}", "busy {{instance}}"),
                Query(f"tokenloom:tokenizer_pool_size{{{TOKENIZER}}}", "alive {{instance}}"),
                # What encoders use is not in process_cpu_seconds_total: they are processes of their own. They do nothing but encode.
                Query(
                    f"rate(tokenloom:tokenizer_encode_seconds_sum{{{TOKENIZER}}}[$__rate_interval])",
                    "encoders' cores {{instance}} {{kind}}",
                ),
            ),
        ),
        Panel(
            "Calls",
            "Calls a second by replica and outcome. One replica has far more than the others: it is not balanced per call. "
            "tokenizer_busy: add some.",
            (Query(rate("tokenizer_requests_total", "instance, outcome", TOKENIZER), "{{instance}} {{outcome}}"),),
            "reqps",
            Kind.STACKED,
        ),
        Panel(
            "Failures and restarts",
            "Failed calls by replica (each was tried elsewhere), and encoder processes replaced. died, timeout: look at the prompts in "
            "the log.",
            (
                Query(
                    f"sum by (address) (increase(tokenloom:gateway_tokenizer_failures_total{{{GATEWAY}}}[$__rate_interval]))",
                    "failed {{address}}",
                ),
                Query(
                    f"sum by (reason) (increase(tokenloom:tokenizer_process_restarts_total{{{TOKENIZER}}}[$__rate_interval]))",
                    "replaced: {{reason}}",
                ),
            ),
        ),
        Panel(
            "Prompt tokens",
            "Prompt tokens a second that tokenizers made. Far above the scheduler's: work that was refused after encoding.",
            (Query(f"sum(rate(tokenloom:tokenizer_tokens_total{{{TOKENIZER}}}[$__rate_interval]))", "tokens"),),
        ),
    ),
)

ENVOY = Row(
    "Envoy",
    (
        Panel(
            "Healthy upstreams",
            "Replicas that pass their health checks, of those that DNS names. Fewer: the logs of those that are missing.",
            (
                Query(f"sum by (envoy_cluster_name) (envoy_cluster_membership_healthy{{{UPSTREAMS}}})", "healthy {{envoy_cluster_name}}"),
                Query(f"sum by (envoy_cluster_name) (envoy_cluster_membership_total{{{UPSTREAMS}}})", "all {{envoy_cluster_name}}"),
            ),
            kind=Kind.LINES,
        ),
        Panel(
            "Retries and ejections",
            "Tries beyond the first a second, and replicas left alone for now. Lasting: one replica is broken or overloaded; its logs.",
            (
                Query(
                    f"sum by (envoy_cluster_name) (rate(envoy_cluster_upstream_rq_retry{{{UPSTREAMS}}}[$__rate_interval]))",
                    "retries {{envoy_cluster_name}}",
                ),
                Query(
                    f"sum by (envoy_cluster_name) (envoy_cluster_outlier_detection_ejections_active{{{UPSTREAMS}}})",
                    "ejected {{envoy_cluster_name}}",
                ),
                Query(
                    f"sum by (envoy_cluster_name) (rate(envoy_cluster_upstream_cx_connect_fail{{{UPSTREAMS}}}[$__rate_interval]))",
                    "no connection {{envoy_cluster_name}}",
                ),
            ),
        ),
        Panel(
            "Requests",
            "Running requests at the edge and upstream. Edge far above upstream: they wait for a connection; see the circuit breakers.",
            (
                Query(
                    "sum by (envoy_http_conn_manager_prefix) "
                    '(envoy_http_downstream_rq_active{envoy_http_conn_manager_prefix=~"edge|tokenizers"})',
                    "from clients: {{envoy_http_conn_manager_prefix}}",
                ),
                Query(f"sum by (envoy_cluster_name) (envoy_cluster_upstream_rq_active{{{UPSTREAMS}}})", "to {{envoy_cluster_name}}"),
            ),
        ),
        Panel(
            "Upstream answers",
            "Answers a second by class of status. 5: what the service's own error panel says, or a replica that is gone.",
            (
                Query(
                    f"sum by (envoy_cluster_name, envoy_response_code_class) "
                    f"(rate(envoy_cluster_upstream_rq_xx{{{UPSTREAMS}}}[$__rate_interval]))",
                    "{{envoy_cluster_name}} {{envoy_response_code_class}}xx",
                ),
            ),
            "reqps",
            Kind.STACKED,
        ),
    ),
)

PROCESSES = Row(
    "Processes",
    (
        Panel(
            "CPU",
            "Cores that each process uses; encoder processes of the tokenizers are in their own panel. At its limit: raise it, or add "
            "replicas.",
            (Query(f'rate(process_cpu_seconds_total{{{SERVICES}, instance=~"$instance"}}[$__rate_interval])', "{{job}} {{instance}}"),),
        ),
        Panel(
            "Memory",
            "Resident memory. It should stand still once warm: what grows for hours is worth a report.",
            (Query(f'process_resident_memory_bytes{{{SERVICES}, instance=~"$instance"}}', "{{job}} {{instance}}"),),
            "bytes",
        ),
        Panel(
            "Open files and uptime",
            "Open file descriptors, and hours since the start: an hour that falls to zero is a restart.",
            (
                Query(f'process_open_fds{{{SERVICES}, instance=~"$instance"}}', "files {{job}} {{instance}}"),
                Query(f'(time() - process_start_time_seconds{{{SERVICES}, instance=~"$instance"}}) / 3600', "hours {{job}} {{instance}}"),
            ),
        ),
        Panel(
            "Targets",
            "1: Prometheus reaches it. 0: it is down, or a network policy is in the way. Missing: nobody has the name.",
            (Query('up{instance=~"$instance"}', "{{job}} {{instance}}"),),
        ),
        Panel(
            "Store",
            "p99 of a call of the shared store, and failures a second. Failures: it is away or full; serving goes on, but new workers are "
            "not found. Slow: it is far or busy.",
            (
                Query(quantiles("store_call_seconds", 'job=~"gateway|scheduler|worker"')[2].expr, "p99, seconds"),
                Query(rate("store_failures_total", "job", 'job=~"gateway|scheduler|worker"'), "failures {{job}}"),
            ),
        ),
        Panel(
            "Spans lost",
            "Spans a second that no collector got. queue_full: the collector is slow; export_failed: it is away. Requests are not "
            "affected.",
            (
                Query(
                    f"sum by (job, reason) (rate(tokenloom:trace_spans_dropped_total{{{SERVICES}}}[$__rate_interval]))",
                    "{{job}} {{reason}}",
                ),
            ),
        ),
    ),
)
