"""The scheduler's core in a small world: worker groups that model block contents, gateways that lose sessions, a clock.

Every method is one event, and after every event all that PROTOCOL.md says must hold is checked (`core_checks`). Hypothesis and the seeded
drive choose the events; `seen` counts what really happened, so that a test can insist that nothing was left out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from libs.blocks import block_hashes
from libs.constraints import Constraint
from libs.errors import ErrorCode, TokenloomError
from libs.packing import pack_ids
from libs.sampling import SamplingParams
from services.scheduler.convert import SubmitRules, from_closed, from_result, to_batch, to_request
from services.scheduler.core.apply import apply, close, lose_group
from services.scheduler.core.checks import Checks
from services.scheduler.core.plan import BatchOutcome, Cut, Effects, StepOutcome, StepPlan
from services.scheduler.core.planner import plan
from services.scheduler.core.queue import Policy
from services.scheduler.core.request import CancelReason, Ending, RequestKey, WaitReason
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.stopping import StopRules
from tests.support.core_checks import (
    Ledgers,
    PlanWatch,
    Tally,
    check_groups,
    check_lease,
    check_progress_of_requests,
    is_stuck_without_fault,
)
from tests.support.core_clients import Client, check_ending, refusal_of, why_refused
from tests.support.core_shapes import GATEWAYS, MAX_MODEL_LEN, TABLE, Rig, Shape
from tests.support.model_worker import EOS, VOCABULARY, ModelWorker, expected_output
from tokenloom.scheduler.v1 import scheduler_pb2
from tokenloom.worker.v1 import worker_pb2

# Far more turns than the longest run needs; beyond it requests chase each other in a circle.
MAX_TURNS = 5000


class World:
    """See the module. Numbers that choose among things (a group, a client, a row) are taken modulo how many there are."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.state = SchedulerState(shape.limits(), Policy(shape.policy))
        self.state.checking.checks = Checks(shape.most_idle)
        stopping = StopRules((EOS,), MAX_MODEL_LEN, TABLE)
        self.rules = SubmitRules(
            stopping, VOCABULARY, priorities=shape.policy == "priority", max_logprobs=2, max_prompt_logprobs=2, constraints=True
        )
        self.names = [f"g{number}" for number in range(shape.groups)]
        self.rigs: dict[str, Rig] = {}
        self.clients: dict[RequestKey, Client] = {}
        # More requests were lost at once than the core remembers counts for.
        self.stale: deque[tuple[str, StepOutcome]] = deque(maxlen=100)
        self.stale_closed: deque[tuple[str, Cut]] = deque(maxlen=100)
        self.seen: Counter[str] = Counter()
        self.tally = Tally()
        self.ledgers = Ledgers()
        self.epoch, self.now, self.attaches, self._submits = 0, 1, 0, 0
        for _ in self.names:
            self.attach()

    # Arrivals

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        gateway: int = 0,
        deadline: int | None = None,
        salt: bytes = b"",
        cacheable: bool = True,
        resumed: int = 0,
        priority: int = 0,
        choices: int = 1,
        poison: bool = False,
        constraint: Constraint | None = None,
    ) -> None:
        """A request of so many choices arrives; `resumed`: with so many output tokens (never all) that its client has from an earlier
        scheduler. `priority` counts in worlds whose policy knows it. `poison`: every batch that the first choice stands in fails."""
        submit = scheduler_pb2.Submit(prompt_ids=pack_ids(prompt), priority=priority if self.rules.priorities else 0)
        if cacheable:
            submit.block_hashes = b"".join(block_hashes(prompt, salt))
        if deadline is not None:
            submit.deadline_remaining_us = deadline
        if constraint is not None:
            submit.constraint.CopyFrom(constraint.to_proto())
        for index in range(choices):
            self._submits += 1
            room = max(1, MAX_MODEL_LEN - len(prompt))  # beyond which no gateway asks
            prompt_logprobs = None if index else params.prompt_logprobs  # the gateway asks once
            seed, room = params.seed + index, min(params.max_tokens, room)
            choice = replace(params, max_tokens=room, seed=seed, choice_index=index, prompt_logprobs=prompt_logprobs)
            submit.parent_id = self._submits - index if index else 0
            submit.id = self._submits
            submit.sampling.CopyFrom(choice.to_proto())
            want = expected_output(self.rules.stopping, prompt, choice, constraint) if len(prompt) < MAX_MODEL_LEN else []
            copy = scheduler_pb2.Submit.FromString(submit.SerializeToString())
            client = Client(copy, GATEWAYS[gateway % len(GATEWAYS)], list(prompt), want, salt, constraint)
            client.got = want[:-1][:resumed]
            client.poison = poison and not index
            client.submit.attempt = int(bool(client.got))
            self._hand_over(client)

    def _hand_over(self, client: Client) -> None:
        client.ask()
        request, stop = to_request(client.submit, client.gateway, self.rules, self.state.next_arrival(), self.now)
        if stop is None:
            client.go_on()
        client.name_blocks(private=not self.shape.caching)
        self.ledgers.learn(client.names, [*client.prompt, *client.want])
        expected = why_refused(self.state, request)
        refused, effects = refusal_of(self.state, request)
        assert refused is expected, "refused without need, or accepted beyond the bounds"
        if refused is not None:
            self.seen[f"refused {refused.name}"] += 1
            client.lost, client.over = False, True
            self.check()
            return
        # More have ended than it remembers the counts of.
        may_forget = sum(self.tally.ends.values()) > 4 * self.shape.most_live
        self.tally.accept(request, self.clients.get(request.key), may_forget=may_forget)
        client.begin(request)
        client.look_at_parent(self.state.requests.get(request.parent) if request.parent else None)
        self.clients[request.key] = client
        if effects.ended:
            self.seen["refused constraint, known"] += 1
            self._take(effects)
        elif stop is not None:
            self.state.finish(request, Ending(stop.reason, stop=stop), self.now, effects)
            self.seen["ended at submit"] += 1
            self._take(effects)
        elif not self.rigs and request.wait_reason is WaitReason.NEW:
            request.wait(WaitReason.NO_WORKER, self.now)
        self.seen["submit" if request.parent is None else "submit of a child"] += 1
        self._end_patience()
        self.check()

    def resubmit(self, number: int) -> None:
        """A gateway hands a request over again, after its session was lost, with what its client has."""
        lost = [client for client in self.clients.values() if client.lost]
        if lost:
            client = lost[number % len(lost)]
            client.submit.attempt += 1
            client.submit.ClearField("deadline_remaining_us")
            self.seen["resubmit"] += 1
            self._hand_over(client)

    # Steps

    def pick(self, number: int) -> Rig | None:
        """One of the attached groups."""
        rigs = list(self.rigs.values())
        return rigs[number % len(rigs)] if rigs else None

    def dispatch(self, number: int) -> None:
        """A group's next batch is planned and sent, if one may be."""
        rig = self.pick(number)
        if rig is not None and not self._send(rig) and self._is_idle():
            others = [other for other in self.rigs.values() if other is not rig]
            moved = any(self._send(other) for other in others)
            stuck = [(str(r.key), r.wait_reason) for r in self.state.requests.values() if not is_stuck_without_fault(self.state, r)]
            assert moved or not stuck, f"workers live, nothing in flight, and nobody runs: {stuck}"
        self.check()

    def _is_idle(self) -> bool:
        return not any(rig.group.in_flight for rig in self.rigs.values())

    def _send(self, rig: Rig) -> bool:
        watch = PlanWatch(self.state, rig.group)
        step = plan(self.state, rig.group, self.now, self.shape.lease_steps)
        victims = watch.check_victims()
        self.tally.preemptions += len(victims)
        self.seen["preempted"] += bool(victims)
        if step is None:
            return False
        watch.check_step(step, self.shape.distance)
        for entry in step.opens:
            client = self.clients[entry.request.key]
            client.look_at_parent(client.waits_for)  # which may have been admitted in this very plan, its prompt in the cache
            assert client.waits_for is None, "a child was admitted before its parent's prompt was computed"
            self.tally.open(entry, caching=self.shape.caching)
            self.seen["hit"] += entry.computed > 0
            self.seen["hit of output"] += entry.computed > len(entry.request.prompt_ids)
            watch.check_hits(entry, client.names)
            assert not (client.needs_positions and entry.computed), "the cache was read by one who needs every position"
            self.seen["hit of a sibling"] += entry.computed > 0 and entry.request.parent is not None
        self.tally.steps += bool(step.rows)
        self.seen["mixed"] += step.is_mixed
        self.seen["chunk"] += any(not row.sample for row in step.rows)
        self.seen[f"ahead {len({id(each.lease or each) for each in rig.group.in_flight}) - 1}"] += 1
        if step.steps > 1:
            check_lease(self.state, rig.group, step, self.shape.lease_steps)
            self.seen["lease"] += 1
        rig.plans.update((each.number, each) for each in rig.group.in_flight if each.number >= step.number)
        rig.runner.submit(to_batch(step, lambda _: None))
        self.seen["dispatch"] += 1
        return True

    def run(
        self,
        number: int,
        *,
        fail: bool = False,
        refuse: bool = False,
        row: int | None = None,
        outcome: int = worker_pb2.ROW_OUTCOME_NOT_RUN,
        error: TokenloomError | None = None,
        garble: bool = False,
        overdo: bool = False,
    ) -> None:
        """A worker ends its next step, as well as ModelWorker's arguments say (only whole batches are refused). `garble`: its answer does
        not fit the batch; `overdo`: it has a token too many for the first row. A step with a poison request fails."""
        rig = self.pick(number)
        if rig is None or rig.runner.idle:
            return
        step, refuse = rig.plans[rig.runner.next_step], refuse and not rig.runner.is_later
        fail |= any(self.clients[planned.request.key].poison for planned in step.rows)
        self.seen["failed within a lease"] += step.is_later and fail
        said = rig.runner.end(fail=fail, refuse=refuse, spoil=row, outcome=outcome, error=error)
        place = next(place for place, message in enumerate(said) if message.HasField("result"))
        result = said[place].result
        ran = result.outcome == worker_pb2.BATCH_OUTCOME_OK
        assert ran or fail or refuse or rig.broken, "a batch names a predecessor that is not the last one that ran"
        rig.broken = not ran
        if garble and ran and step.rows:
            result.row_outcomes = result.row_outcomes[:-1]
        for planned, row_outcome in zip(step.rows, result.row_outcomes, strict=False):
            self.clients[planned.request.key].look_at_row(planned.request, row_outcome, forced=row is not None)
            self.seen[f"row {worker_pb2.RowOutcome.Name(row_outcome)}"] += 1
        if not ran or garble:
            self.seen["garbled" if ran else f"batch {worker_pb2.BatchOutcome.Name(result.outcome)}"] += 1
        self.seen["out of memory"] += error is not None and fail
        answer = from_result(result)
        if overdo and ran and step.rows:
            answer = replace(answer, tokens=[[*answer.tokens[0], 1], *answer.tokens[1:]])
            self.clients[step.rows[0].request.key].may_fail.add(ErrorCode.PROTOCOL_VIOLATION)
            self.seen["overdone"] += 1
        self.say(rig, said[:place])
        rig.answers.append(answer)
        self.say(rig, said[place + 1 :])
        self.check()

    def say(self, rig: Rig, messages: Iterable[worker_pb2.RunResponse]) -> None:
        """What a worker sends is on its way."""
        for message in messages:
            rig.answers.append(from_result(message.result) if message.HasField("result") else from_closed(message.closed))

    def hear(self, number: int) -> None:
        """A worker's oldest answer arrives."""
        rig = self.pick(number)
        if rig is not None and rig.answers:
            answer = rig.answers.popleft()
            if isinstance(answer, Cut):
                self._hear_closed(rig, answer)
            else:
                self._hear(rig, answer)
            self.check()

    def _hear(self, rig: Rig, answer: StepOutcome) -> None:
        self.stale.append((rig.group.name, answer))
        head = rig.group.in_flight[0]
        assert head.number == answer.number, "a step was forgotten that its worker ran"
        fits = len(answer.rows) == len(head.rows)
        if not rig.group.broken and answer.outcome is not BatchOutcome.NOT_RUN:
            self.blame(head, failed=answer.outcome is BatchOutcome.FAILED or not fits)
        self.tally.steps += head.is_later and answer.outcome is BatchOutcome.OK and fits and not rig.group.broken
        ended = self.state.counters.finished
        self._take(apply(self.state, rig.group, answer, self.now))
        self.seen["hear"] += 1
        before_its_end = head.lease is not None and head.number < head.lease.last
        self.seen["stop within a lease"] += before_its_end and self.state.counters.finished > ended

    def _hear_closed(self, rig: Rig, closed: Cut) -> None:
        """The answer to a cut that was asked for: what lies behind is withdrawn, or there is nothing left of its lease."""
        group, late = rig.group, self.state.counters.stale_closed
        lease = next((step.lease for step in group.in_flight if step.lease and step.lease.first == closed.number), None)
        behind = [step.number for step in group.in_flight if lease is not None and step.number > closed.last_step]
        self.seen["closed after its last result"] += bool(behind) and len(behind) == len(group.in_flight)
        self._take(close(self.state, group, closed, self.now))
        assert not any(step.number in behind for step in group.in_flight), "what will not run is still waited for"
        assert self.state.counters.stale_closed == late + (lease is None)
        self.seen["late closed" if lease is None else "closed" if behind else "closed at its end"] += 1
        self.stale_closed.append((group.name, closed))

    def blame(self, step: StepPlan, *, failed: bool) -> None:
        """A step of these requests has failed, or has not: how often in a row is counted."""
        for planned in step.rows:
            self.clients[planned.request.key].count_crash(planned.request, failed=failed)

    # Losses

    def lose(self, number: int, *, crashed: bool) -> None:
        """A group's stream breaks. What its worker owed may still arrive, in vain."""
        rig = self.pick(number)
        if rig is None:
            return
        if crashed and rig.group.in_flight:
            self.blame(rig.group.in_flight[0], failed=True)
        self.seen["lost within a lease"] += any(step.is_later for step in rig.group.in_flight)
        while not rig.runner.idle:
            self.say(rig, rig.runner.end())
        self.stale.extend((rig.group.name, answer) for answer in rig.answers if isinstance(answer, StepOutcome))
        self.stale_closed.extend((rig.group.name, answer) for answer in rig.answers if isinstance(answer, Cut))
        del self.rigs[rig.group.name]
        self._take(lose_group(self.state, rig.group, self.now, crashed=crashed))
        if not self.rigs:
            self.state.wait_all(WaitReason.NO_WORKER, self.now)
        else:
            self.state.shelve_unfit(self.now)
        self.seen["lost, crashed" if crashed else "lost in peace"] += 1
        self.check()

    def attach(self) -> None:
        """A missing group comes (back), empty, with a new epoch and the next size of cache."""
        name = next((name for name in self.names if name not in self.rigs), None)
        if name is None:
            return
        blocks = self.shape.blocks[self.attaches % len(self.shape.blocks)]
        self.epoch, self.attaches = self.epoch + 1, self.attaches + 1
        group = self.shape.group(name, self.epoch, blocks)
        self.state.groups[name] = group
        self.rigs[name] = Rig(group, ModelWorker(blocks, self.shape.slots, epoch=self.epoch))
        self.seen["attach"] += 1
        self.seen["shelved"] += self.state.shelve_unfit(self.now)
        self._end_patience()
        self.check()

    def _end_patience(self) -> None:
        """With all groups there, nobody else will come who could hold what these cannot."""
        if len(self.rigs) == len(self.names):
            self._take(self.state.fail_unfit(self.now))

    def lose_session(self, gateway: int, unread: int) -> None:
        """A gateway's session breaks: its live requests end, and up to `unread` tokens of each, or its ending, never reached it."""
        who = GATEWAYS[gateway % len(GATEWAYS)]
        for client in [client for client in self.clients.values() if client.gateway == who]:
            if client.lost or (client.over and not client.may_have_missed_its_ending(unread)):
                continue
            if not client.over:
                client.cancelled = True
                self._take(self.state.cancel(client.request.key, CancelReason.SESSION_LOST, self.now))
            client.over, client.lost = False, True
            client.got = client.got[: max(0, len(client.got) - unread)]
        self.seen["session lost"] += 1
        self.check()

    # Ends

    def cancel(self, number: int, reason: CancelReason, *, running: bool = False) -> None:
        """Somebody asks for a request's end, be it live or not; `running`: of one that runs."""
        clients = [client for client in self.clients.values() if not running or client.request.residency is not None][-20:]
        if not clients:
            return
        client = clients[number % len(clients)]
        live, unknown = client.request.key in self.state.requests, self.state.counters.unknown_cancels
        steps = [step for rig in self.rigs.values() for step in rig.group.in_flight if step.is_later]
        self.seen["cancel within a lease"] += any(row.request is client.request for step in steps for row in step.rows)
        client.cancelled |= live
        effects = self.state.cancel(client.request.key, reason, self.now)
        assert effects.ended == ([client.request] if live else [])
        assert self.state.counters.unknown_cancels == unknown + (not live)
        self._take(effects)
        self.seen["cancel" if live else "cancel of nobody"] += 1
        self.check()

    def pass_time(self, step: int) -> None:
        """The clock moves; deadlines fall due."""
        self.now += step * 1000
        due = {key for key, request in self.state.requests.items() if request.deadline_ns is not None and request.deadline_ns <= self.now}
        effects = self.state.expire(self.now)
        assert {request.key for request in effects.ended} == due
        self._take(effects)
        self.seen["deadline"] += bool(due)
        self.check()

    def _take(self, effects: Effects) -> None:
        """What the gateways read."""
        for request, first, logprobs in effects.told:
            client = self.clients[request.key]
            assert client.reads(request), "positions of an attempt that is over"
            client.hear_positions(first, logprobs)
            self.seen["prompt told" if not first else "prompt told in pieces"] += 1
        for request, first, tokens, logprobs in effects.deltas:
            client = self.clients[request.key]
            client.check_logprobs(first, tokens, logprobs)
            self.seen["logprobs"] += logprobs is not None
            assert client.reads(request), "tokens of an attempt that is over"
            assert first == len(client.got), "a delta left a gap or came twice"
            client.got.extend(tokens)
            assert client.got == client.want[: len(client.got)], "the wrong tokens"
        for request in effects.ended:
            client = self.clients[request.key]
            self.look_at_ending(client)
            assert client.reads(request), "a request ended twice"
            client.over = True
            self.tally.end(request)
            self.seen[f"ending {check_ending(client, self.state, self.now)}"] += 1

    def look_at_ending(self, client: Client) -> None:
        """A client is about to see its ending: worlds that know more of what may fail say so here."""

    # What must hold

    def check(self) -> None:
        """Everything, after any event. Raises AssertionError, ValueError or LedgerError."""
        self.state.check()
        check_groups({name: (rig.group, rig.worker) for name, rig in self.rigs.items()}, self.ledgers, self.seen)
        check_progress_of_requests(self.state)
        self.tally.check(self.state, [client.request for client in self.clients.values()])
        for client in self.clients.values():
            live = client.request.key in self.state.requests
            client.look_at_parent(client.waits_for)
            assert live == (not client.over and not client.lost), "a request is lost"
            if live:
                assert client.got == client.request.output_ids
                self.seen[f"wait {client.request.wait_reason.name}"] += 1

    def drain(self) -> None:
        """No more trouble: with live workers every request reaches its end, and nothing is held."""
        while len(self.rigs) < len(self.names):
            self.attach()
        while any(client.lost for client in self.clients.values()):
            self.resubmit(0)
        turns = 0
        while self.state.requests:
            turns += 1
            assert turns < MAX_TURNS, f"no end: {[(str(key), r.state, r.wait_reason) for key, r in self.state.requests.items()]}"
            self._turn()
        while any(rig.group.in_flight or rig.group.closing for rig in self.rigs.values()):
            self._turn()
        for rig in self.rigs.values():
            ledger = rig.group.ledger
            assert (ledger.in_use, ledger.draining, ledger.available) == (0, 0, ledger.num_blocks)
            assert sorted(rig.group.free_slots) == list(range(self.shape.slots))
            assert not rig.worker.slots, "an idle worker holds slots"
        assert all(client.over for client in self.clients.values())

    def _turn(self) -> None:
        for number in range(len(self.rigs)):
            for _ in range(self.shape.in_flight):
                self.dispatch(number)
            self.run(number)
            self.hear(number)
