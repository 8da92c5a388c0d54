"""A simulated scheduler around a real cache: continuous batching, chunked prefill, decode, tools, host loads.

One replica. It decides as SGLang's does by default: prefill before decode, first come first served, one prompt may
be cut into chunks, a call is admitted when its prompt and its whole output fit beside what the running ones still
need. Times come from a cost model; the cache is driven exactly as in the engine (tree.py).
"""

import heapq
from collections import deque
from dataclasses import dataclass

from pbkv_ray.core.admission import Admission
from pbkv_ray.errors import InputError
from pbkv_ray.replay.arrivals import Arrivals, ToolWaits
from pbkv_ray.replay.cost import Cost
from pbkv_ray.replay.driver import Driver
from pbkv_ray.replay.keys import Keys, as_key
from pbkv_ray.replay.outcome import Outcome, RunTimes, Scheduler
from pbkv_ray.replay.tree import TreeRequest
from pbkv_ray.replay.workload import Workload

_DECODE_JUMP = 64  # steps that are taken at once at most, so that memory fills as it would


@dataclass(slots=True, eq=False)
class _Call:
    run: int
    call: int
    arrived_s: float
    request: TreeRequest
    prompt: int  # units
    output: list[int]
    prompt_tokens: int
    output_tokens: int
    seen: int  # leading units of the prompt that were computed before
    done_tokens: int = 0  # of the output
    grown: int = 0  # output units with a slot

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.done_tokens


class Simulation:
    """One workload on one replica under one policy. Deterministic. `run()` once."""

    def __init__(
        self,
        workload: Workload,
        keys: Keys,
        driver: Driver,
        cost: Cost,
        capacity: int,
        scheduler: Scheduler,
        arrivals: Arrivals | None = None,
        waits: ToolWaits | None = None,
        seed: int = 0,
        admission: Admission | None = None,
    ) -> None:
        """capacity: device units of the driver's tree."""
        self.workload, self.keys, self.driver, self.cost = workload, keys, driver, cost
        self.capacity, self.scheduler, self.seed = capacity, scheduler, seed
        self.arrivals, self.waits, self.admission = arrivals or Arrivals(), waits or ToolWaits(), admission
        self.now = 0.0
        self.outcome = Outcome()
        self._events: list[tuple[float, int, int, int]] = []  # (time, order, run, call); call -1 submits the run
        self._sequence = 0
        self._held: deque[int] = deque()  # submitted runs that may not start yet
        self._unsubmitted = deque(range(len(workload.runs)))
        self._in_flight = 0
        self._waiting: list[_Call] = []
        self._running: list[_Call] = []
        self._chunked: _Call | None = None
        self._computed: set[int] = set()  # units that some call has brought, if an admission rule asks
        self._reserved = 0  # units that admitted calls still need
        if not workload.runs:
            raise InputError(f"workload {workload.name!r} has no runs; loosen the filters")

    def run(self) -> Outcome:
        self._submit_first()
        while True:
            self._deliver()
            if not self._prefill() and not self._decode():
                if not self._events:
                    break
                self._advance(self._events[0][0] - self.now)
        if self._waiting:
            raise InputError(
                f"{len(self._waiting)} calls never fitted a pool of {self.capacity} units; raise the pool fraction"
            )
        self.outcome.makespan_s = self.now
        self.outcome.hits.evicted = self.driver.tree.evicted_units * self.keys.unit_tokens
        if self.driver.prefetch is not None:
            count = self.driver.prefetch.count
            self.outcome.prefetched = {name: getattr(count, name) for name in ("useful", "late", "wasted")}
        return self.outcome

    # Runs

    def _submit_first(self) -> None:
        if self.arrivals.kind in ("poisson", "trace"):
            for run, at in enumerate(self.arrivals.submit_s(self.workload, self.seed)):
                self._push(at, run, -1)
            self._unsubmitted.clear()
            return
        first = len(self._unsubmitted) if self.arrivals.kind == "backlog" else self.scheduler.concurrency
        for _ in range(min(first, len(self._unsubmitted))):
            self._push(0.0, self._unsubmitted.popleft(), -1)

    def _push(self, at: float, run: int, call: int) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (at, self._sequence, run, call))

    def _deliver(self) -> None:
        while self._events and self._events[0][0] <= self.now:
            at, _, run, call = heapq.heappop(self._events)
            if call < 0:
                self.outcome.runs[run] = RunTimes(at)
                self._held.append(run)
                self._start_held()
            else:
                self._arrive(run, call, at)

    def _start_held(self) -> None:
        closed = self.arrivals.kind in ("closed", "backlog")
        most = self.scheduler.concurrency if closed else len(self.workload.runs)
        if self.scheduler.limit is not None:
            most = min(most, self.scheduler.limit)
        if self.admission is not None:
            most = min(most, self.admission.limit)
        while self._held and self._in_flight < most:
            run = self._held.popleft()
            self._in_flight += 1
            self.outcome.runs[run].started_s = self.now
            self._arrive(run, 0, self.now)

    def _arrive(self, run: int, call: int, at: float) -> None:
        item = self.workload.runs[run]
        it = item.calls[call]
        prompt, output = self.keys.prompt(run, call), self.keys.output(run, call)
        self.outcome.runs[run].prompt_tokens += it.prompt_tokens
        self.driver.call_started(item.run_id, item.workflow, item.agents[: call + 1], at)
        if len(prompt) + len(output) > self.capacity:
            self.outcome.hits.refused_calls += 1
            self.outcome.hits.add(it.agent, it.prompt_tokens, 0, 0)
            self._ended(run, call)
            return
        tail = self.keys.unit_tokens > 1 and it.prompt_tokens % self.keys.unit_tokens > 0
        request = self.driver.request(
            f"{item.run_id}/{call}", item.run_id, it.agent, item.workflow, as_key(prompt), tail
        )
        seen = 0
        if self.admission is not None:
            units = prompt.tolist()
            seen = next((i for i, unit in enumerate(units) if unit not in self._computed), len(units))
            self._computed.update(units)
        self._waiting.append(
            _Call(run, call, at, request, len(prompt), output.tolist(), it.prompt_tokens, it.output_tokens, seen)
        )

    def _ended(self, run: int, call: int) -> None:
        item = self.workload.runs[run]
        tokens = item.calls[call].output_tokens
        self.driver.call_finished(item.run_id, item.workflow, item.agents[: call + 1], tokens, self.now)
        if call + 1 < len(item.calls):
            self._push(self.now + self.waits.wait_s(item, call + 1, self.seed), run, call + 1)
            self._start_held()  # the limit may have grown
            return
        self.driver.run_ended(item.run_id, item.workflow, item.agents, self.now)
        if self.admission is not None:
            self.admission.ended(item.footprint_tokens, len(item.calls), item.prompt_tokens)
        self.outcome.runs[run].ended_s = self.now
        self._in_flight -= 1
        if self._unsubmitted:
            self._push(self.now, self._unsubmitted.popleft(), -1)
        self._start_held()

    # Batches

    def _advance(self, seconds: float) -> None:
        self.outcome.running_s += seconds * self._in_flight
        self.now += seconds

    def _prefill(self) -> bool:
        """One prefill batch, if there is something to compute and room for it."""
        budget, unit = self.scheduler.chunk_tokens, self.keys.unit_tokens
        tree = self.driver.tree
        chunks: list[tuple[int, int]] = []
        batch: list[tuple[_Call, bool]] = []
        loaded = 0
        candidates = [] if self._chunked is None else [self._chunked]
        self._chunked = None
        while budget >= unit:
            if candidates:
                call = candidates.pop()
            else:
                found = self._next_waiting()
                if found is None:
                    break
                call = found
                tree.admit(call.request)
                loaded += call.request.host_hit * unit
            left = call.prompt - call.request.allocated
            take = min(left, budget // unit)
            before = call.request.allocated * unit
            if not tree.allocate(call.request, take):
                raise InputError(f"{call.prompt} units do not fit a pool of {self.capacity} that was checked")
            self._reserved -= take
            last = take == left
            tokens = take * unit if not last else max(1, call.prompt_tokens - before)
            chunks.append((tokens, before))
            batch.append((call, last))
            budget -= tokens
            if not last:
                self._chunked = call
                break
        if not batch:
            return False
        self._await_prefetch()
        compute, load = self.cost.prefill(chunks), self.cost.load(loaded)
        self.outcome.prefill_s += compute
        self.outcome.load_s += max(0.0, load - compute)  # loads overlap the forward, layer by layer
        self._advance(max(compute, load))
        for call, last in batch:
            tree.checkpoint(call.request)
            if last:
                self._first_token(call)
        return True

    def _await_prefetch(self) -> None:
        """No batch runs while a prefetch is on the way: it may read what that brings (engine.prefetcher)."""
        prefetch = self.driver.prefetch
        if prefetch is not None:
            late = max(0.0, prefetch.ends_s - self.now)
            self.outcome.load_s += late
            self._advance(late)
            prefetch.settle(self.now)

    def _next_waiting(self) -> _Call | None:
        if not self._waiting or len(self._running) + (self._chunked is not None) >= self.scheduler.max_running:
            return None
        at = 0 if self.scheduler.order == "fcfs" else self._most_cached()
        call = self._waiting[at]
        need = call.prompt + len(call.output)
        tree = self.driver.tree
        if need > tree.free_units() + tree.evictable_units() - self._reserved:
            return None
        del self._waiting[at]
        found, hosted = tree.match(call.request)
        self._reserved += need - found - hosted
        return call

    def _most_cached(self) -> int:
        tree, best, chosen = self.driver.tree, -1.0, 0
        for i, call in enumerate(self._waiting[:32]):
            found, hosted = tree.match(call.request)
            value = (found + hosted) / max(1, call.prompt) + self.scheduler.aging * (self.now - call.arrived_s)
            if value > best:
                best, chosen = value, i
        return chosen

    def _first_token(self, call: _Call) -> None:
        unit = self.keys.unit_tokens
        self.outcome.ttft_s.append(self.now - call.arrived_s)
        agent = self.workload.runs[call.run].calls[call.call].agent
        request = call.request
        self.outcome.hits.add(agent, call.prompt_tokens, request.device_hit * unit, request.host_hit * unit)
        if self.admission is not None:
            found = request.device_hit + request.host_hit
            again = self._last_s(call, max(0, call.seen - found) * unit)
            computed = self._last_s(call, max(0, call.prompt_tokens - found * unit))
            token_s = self.cost.token_s + call.prompt_tokens / 2 * self.cost.pair_s
            self.admission.called(again, computed, token_s, self.now, self._in_flight)
        call.done_tokens = 1
        if call.done_tokens >= call.output_tokens:
            self._finish(call)
        else:
            self._running.append(call)

    def _last_s(self, call: _Call, tokens: int) -> float:
        """Seconds for computing the last tokens of a prompt."""
        return tokens * (self.cost.token_s + (call.prompt_tokens - tokens / 2) * self.cost.pair_s)

    def _decode(self) -> bool:
        """Decode steps up to the next arrival or the next call that is done."""
        if not self._running:
            return False
        batch = len(self._running)
        context = sum(call.context_tokens for call in self._running)
        step = self.cost.decode_step(batch, context)
        steps = min(_DECODE_JUMP, min(call.output_tokens - call.done_tokens for call in self._running))
        if self._events:
            steps = min(steps, max(1, int((self._events[0][0] - self.now) / step) + 1))
        seconds = self.cost.decode(batch, context, steps)
        if self.driver.prefetch is not None:
            self._await_prefetch()
            self.driver.prefetch.decode(self.now, seconds, self.cost)
        self.outcome.decode_s += seconds
        self._advance(seconds)
        done = []
        for call in self._running:
            call.done_tokens += steps
            self._grow(call)
            if call.done_tokens >= call.output_tokens:
                done.append(call)
        if done:
            self._running = [call for call in self._running if call not in done]
            for call in done:
                self._finish(call)
        return True

    def _grow(self, call: _Call) -> None:
        share = call.done_tokens / call.output_tokens
        want = len(call.output) if share >= 1 else int(len(call.output) * share)
        if want > call.grown and self.driver.tree.allocate(call.request, want - call.grown):
            self._reserved -= want - call.grown
            call.grown = want

    def _finish(self, call: _Call) -> None:
        self._grow(call)
        self._reserved -= len(call.output) - call.grown
        self.driver.tree.append(call.request, call.output[: call.grown])
        self.driver.tree.finish(call.request)
        self._ended(call.run, call.call)
