"""The rules about log-probabilities, each with an edit that breaks it."""

from __future__ import annotations

from tests.property.mutation import Mutation

LOGPROBS_MUTATIONS = [
    Mutation(
        "a resumed prompt's positions come again",
        "6: per-position results are emitted once, with their index",
        "apply",
        "positions.logprobs.piece(request.told - positions.first)",
        "positions.logprobs",
    ),
    Mutation(
        "what was told is forgotten",
        "6: per-position results are emitted once",
        "apply",
        "        request.told = reach\n",
        "        request.told = max(request.told, 1)\n",
    ),
    Mutation(
        "who needs every position reads the cache",
        "6: requests that need every position do not read the cache",
        "leases",
        "not request.cacheable or request.needs_positions or not (",
        "not request.cacheable or not (",
        quick=True,
    ),
    Mutation(
        "tokens leave their log-probabilities behind",
        "18: they ride with their tokens",
        "apply",
        "    effects.deltas.append(Delta(request, first, tokens, logprobs))\n",
        "    effects.deltas.append(Delta(request, first, tokens))\n",
    ),
    Mutation(
        "a prompt that is not looked up counts as a miss",
        "the hit rate is of those who read the cache",
        "state",
        "not request.counted and not request.needs_positions:",
        "not request.counted:",
    ),
]
