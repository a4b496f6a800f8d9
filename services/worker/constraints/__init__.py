"""What an output must be: constraints compiled beside the runner, and the masks that keep a row's output to them.

Rooms, every arrow downwards:

    preparing (prepare, forget: the scheduler's wishes) > compiler process (checks and compiles, may be killed) > registry > backends
    (guidance, xgrammar) > readers of what clients send (schemas, regexes, grammars, tags); beside them progress (one row's state)

Owns: which text a constraint allows, that compiling is bounded in time and memory, and the mask of each row in each step.
Does not own: when a request ends (it only says that nothing may follow), how ids are drawn under a mask (services/worker/sampling).
"""
