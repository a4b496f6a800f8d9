"""Queue, cache and steps: the scheduler's panels."""

from __future__ import annotations

from tools.dashboard.panels import SCHEDULER, Kind, Panel, Query, Row, mean, percentiles, quantiles, rate

SCHEDULING = Row(
    "Scheduler",
    (
        Panel(
            "Running and waiting",
            "Sequences in workers and in the queue. Waiting while running stays flat: at capacity; the next panel says of what.",
            (
                Query(f"sum(tokenloom:num_requests_running{{{SCHEDULER}}})", "running"),
                Query(f"sum(tokenloom:num_requests_waiting{{{SCHEDULER}}})", "waiting"),
            ),
            kind=Kind.STATES,
        ),
        Panel(
            "Why they wait",
            "no_blocks: KV cache; no_slot: --max-num-seqs; token_budget: --max-num-batched-tokens; no_worker: start one; behind_another: "
            "the "
            "one before it waits for something else; draining_blocks, prefix_in_flight, parent_prompt: pass by themselves.",
            (Query(f"sum by (reason) (tokenloom:num_requests_waiting_by_reason{{{SCHEDULER}}})", "{{reason}}"),),
            kind=Kind.STATES,
        ),
        percentiles(
            "Queue time",
            "Arrival at the scheduler to first dispatch. Grows: the panel of reasons says what is short. Points open a request's trace.",
            "request_queue_time_seconds",
            SCHEDULER,
            exemplars=True,
        ),
        Panel(
            "KV blocks",
            "Blocks by state: held by live sequences, draining until their last step ends, cached for a later prompt, free. Nothing free "
            "or "
            "cached: preemptions follow; more cache memory or fewer sequences.",
            (Query(f"sum by (state) (tokenloom:kv_blocks{{{SCHEDULER}}})", "{{state}}"),),
            kind=Kind.STATES,
        ),
        Panel(
            "Prefix hit rate",
            "Share of looked-up prompt tokens that the cache had. Under 10% while prompts repeat: put the stable text first, give one "
            "user's "
            "requests the same cache_salt, add cache memory.",
            (
                Query(
                    f"sum(rate(tokenloom:prefix_cache_hits_total{{{SCHEDULER}}}[$__rate_interval])) "
                    f"/ sum(rate(tokenloom:prefix_cache_queries_total{{{SCHEDULER}}}[$__rate_interval]))",
                    "hits",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Preemptions and returns",
            "Sequences a second sent back to the queue, and such as were admitted again (after a lost worker too). Lasting: too many "
            "sequences for "
            "the cache; lower --max-num-seqs or add cache memory.",
            (
                Query(rate("num_preemptions_total", "reason", SCHEDULER), "preempted: {{reason}}"),
                Query(f"sum(rate(tokenloom:requests_resumed_total{{{SCHEDULER}}}[$__rate_interval]))", "admitted again"),
            ),
            "reqps",
        ),
        percentiles(
            "Step time",
            "Dispatch of a batch to its result. It bounds the inter-token latency. Grows with rows and tokens: see the worker's row.",
            "scheduler_step_seconds",
            SCHEDULER,
        ),
        Panel(
            "Planning and applying",
            "The scheduler's own work for each step, p99. Over a millisecond: profile it; the worker waits meanwhile unless the lead "
            "covers it.",
            (
                Query(quantiles("scheduler_plan_seconds", SCHEDULER)[2].expr, "plan p99"),
                Query(quantiles("scheduler_apply_seconds", SCHEDULER)[2].expr, "apply p99"),
                Query(quantiles("dispatch_lead_seconds", SCHEDULER)[0].expr, "lead p50"),
            ),
            "s",
        ),
        Panel(
            "Steps",
            "Steps a second, those that mix prefill and decode, and steps granted per message (leases). Mixed ones prevail: long "
            "inter-token "
            "latencies; lower --max-num-batched-tokens.",
            (
                Query(f"sum(rate(tokenloom:scheduler_steps_total{{{SCHEDULER}}}[$__rate_interval]))", "steps"),
                Query(f"sum(rate(tokenloom:scheduler_mixed_steps_total{{{SCHEDULER}}}[$__rate_interval]))", "mixed"),
                Query(mean("lease_steps", SCHEDULER), "steps per message"),
            ),
        ),
        Panel(
            "Accepted and ended",
            "Accepted, finished, failed and cancelled a second. Their totals and the live ones must agree at every scrape (an alert "
            "watches it).",
            tuple(
                Query(f"sum(rate(tokenloom:requests_{ending}_total{{{SCHEDULER}}}[$__rate_interval]))", ending)
                for ending in ("admitted", "finished", "failed", "cancelled")
            ),
            "reqps",
        ),
        Panel(
            "Losses",
            "Workers lost, requests that failed, results that came too late. Any of the first two: the worker's log, then the scheduler's.",
            (
                Query(f"sum(increase(tokenloom:worker_losses_total{{{SCHEDULER}}}[$__rate_interval]))", "workers lost"),
                Query(f"sum(increase(tokenloom:request_failed_total{{{SCHEDULER}}}[$__rate_interval]))", "requests failed"),
                Query(f"sum(increase(tokenloom:stale_results_total{{{SCHEDULER}}}[$__rate_interval]))", "late results"),
            ),
        ),
        percentiles(
            "Cancel to free",
            "A cancel's arrival to its blocks being free: the batches already sent at most. Grows: long steps.",
            "cancel_to_free_seconds",
            SCHEDULER,
        ),
    ),
)
