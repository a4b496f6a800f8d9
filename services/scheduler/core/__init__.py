"""The scheduler's pure core: `plan(state) -> StepPlan`, `apply(state, outcome) -> Effects`, and the small verbs between them.

Owns: requests and their states, the queue, the block ledgers, planning, applying results, all endings.
Does not own: time (instants are arguments), messages, tasks. It imports neither grpc nor asyncio, so that the simulator and
the property tests drive the very code that serves. All instants are nanoseconds of one monotonic clock.
"""
