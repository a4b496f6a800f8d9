"""The rules of the session between gateway and scheduler (PROTOCOL.md 17 to 20), each with an edit that breaks it."""

from __future__ import annotations

from functools import partial

from tests.property.mutation import Mutation

_Gateway = partial(Mutation, package="gateway", drive="session_drive")
_Scheduler = partial(Mutation, package="scheduler", drive="session_drive")

SESSION_MUTATIONS = [
    _Scheduler(
        "a gateway's old session lives on",
        "17: a new session of the same gateway instance first ends all of the old one",
        "intake",
        "        for old in self._clients.of_gateway(session.gateway):\n",
        "        for old in ():\n",
    ),
    _Scheduler(
        "a broken session's requests live on",
        "17: a broken session cancels its requests there",
        "intake",
        "        for key in sorted(session.keys):\n",
        "        for key in ():\n",
    ),
    _Scheduler(
        "a closed session still submits",
        "17, 18: frames of a session that is over are ignored",
        "intake",
        "        if session.closed.is_set():\n            return\n        try:\n",
        "        try:\n",
    ),
    _Scheduler(
        "endings are dropped",
        "21: endings are never dropped",
        "sessions",
        "            endings=endings,\n",
        "            endings=endings[:1],\n",
    ),
    _Scheduler(
        "a delta says where the last one began",
        "18: a delta carries its first output index",
        "sessions",
        "            first_indexes=[entry.first_index for entry in deltas.values()],\n",
        "            first_indexes=[max(0, entry.first_index - 1) for entry in deltas.values()],\n",
        quick=True,
    ),
    _Scheduler(
        "a window forgets who has ended",
        "20: credits return",
        "clients",
        "            self._windows.add(client.session.id, -1, -request.most_tokens)\n",
        "",
    ),
    _Scheduler(
        "an ending names no attempt",
        "17, 19: attempts are told apart",
        "convert",
        "        attempt=request.attempt,\n        reason=_FINISH[ending.reason],\n",
        "        attempt=0,\n        reason=_FINISH[ending.reason],\n",
    ),
    _Gateway(
        "the gateway takes every token it is sent",
        "18: it drops what it has",
        "tickets",
        '        known = len(ticket.output) - first\n        if known < 0:\n            raise SessionBroken(f"request {ticket.id}: tokens',
        "        known = min(0, len(ticket.output) - first)\n"
        '        if known < 0:\n            raise SessionBroken(f"request {ticket.id}: tokens',
        quick=True,
    ),
    _Gateway(
        "the gateway overlooks a gap",
        "18: a gap is a broken session",
        "tickets",
        "        if known < 0:\n",
        "        if False:\n",
    ),
    _Gateway(
        "a resubmission says nothing of the output",
        "4, 17: prompt and output ids go along",
        "tickets",
        "        submit.output_ids = pack_ids(ticket.output)\n",
        "",
    ),
    _Gateway(
        "a resubmission is the same attempt",
        "17: with a higher attempt",
        "tickets",
        "        ticket.attempt += 1\n",
        "",
    ),
    _Gateway(
        "tickets of a lost session wait for its endings",
        "17: the gateway resumes them",
        "tickets",
        "                self._wait_again(ticket, now, lost=True)\n",
        "                continue\n",
    ),
    _Gateway(
        "a cancelled ticket ends at once",
        "19: it is a tombstone until the ending arrives",
        "tickets",
        "            self._cancels[ticket.id] = reason\n",
        "            self._end(ticket, ticket.owned_ending(_reason_of_cancel(reason)), now)\n",
    ),
    _Gateway(
        "a cancelled ticket is resubmitted",
        "19: with its session lost it ends",
        "tickets",
        "            if ticket.cancel_reason is not None:\n                self._end(",
        "            if False:\n                self._end(",
    ),
    _Gateway(
        "an ending ends a ticket twice",
        "19: the first ending wins",
        "tickets",
        "        if ticket.on_ended is not None:\n            ticket.on_ended()\n",
        "        if ticket.on_ended is not None:\n            ticket.on_ended()\n            ticket.on_ended()\n",
    ),
    _Gateway(
        "a place is given back twice",
        "20: credits return once",
        "admission",
        "            self._admission = None\n",
        "            pass\n",
    ),
    _Scheduler(
        "a prompt whose ending was lost is counted twice",
        "17, issue 3: counters count each prompt once, attempts are linked",
        "core/state",
        "        if request.counted:\n",
        "        if request.counted and ending.cancel is CancelReason.SESSION_LOST:\n",
    ),
]
