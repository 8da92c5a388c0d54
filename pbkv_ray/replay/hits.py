"""Hit rates at a fixed order of calls: one call at a time, no timing beyond the order's own clock."""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pbkv_ray.replay.belady import belady_hits
from pbkv_ray.replay.driver import Driver
from pbkv_ray.replay.keys import Keys, as_key
from pbkv_ray.replay.order import OrderedCall
from pbkv_ray.replay.workload import Workload


@dataclass(slots=True)
class Hits:
    """Tokens. `device` and `host` are prompt tokens found there; what is left was computed."""

    prompt: int = 0
    device: int = 0
    host: int = 0
    evicted: int = 0
    refused_calls: int = 0
    overseen: dict[str, Any] = field(default_factory=dict)  # engine.oversight's report, in units, if there was one
    by_agent: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    @property
    def device_hit(self) -> float:
        return self.device / max(1, self.prompt)

    @property
    def host_hit(self) -> float:
        return self.host / max(1, self.prompt)

    @property
    def recomputed(self) -> int:
        return self.prompt - self.device - self.host

    def add(self, agent: str, prompt: int, device: int, host: int) -> None:
        self.prompt += prompt
        self.device += device
        self.host += host
        self.by_agent[agent][0] += prompt
        self.by_agent[agent][1] += device


def replay_order(workload: Workload, order: Sequence[OrderedCall], keys: Keys, driver: Driver, capacity: int) -> Hits:
    """Serve the calls in order from `driver`. `capacity`: device units; a call that exceeds it is refused.

    A call is served at once, but the driver hears of its end when it would have ended.
    """
    hits, unit = Hits(), keys.unit_tokens
    answers: list[tuple[float, int]] = []  # when they end, number in the order
    for number, item in enumerate(order):
        while answers and answers[0][0] <= item.at_s:
            ends_s, ended = heapq.heappop(answers)
            of, at = workload.runs[order[ended].run], order[ended].call
            driver.call_finished(of.run_id, of.workflow, of.agents[: at + 1], of.calls[at].output_tokens, ends_s)
        run = workload.runs[item.run]
        call = run.calls[item.call]
        history = run.agents[: item.call + 1]
        prompt, output = keys.prompt(item.run, item.call), keys.output(item.run, item.call)
        driver.call_started(run.run_id, run.workflow, history, item.at_s)
        device = host = 0
        if len(prompt) + len(output) <= capacity:
            tail = unit > 1 and (call.prompt_tokens % unit > 0 or keys.known_only)
            request = driver.request(str(number), run.run_id, call.agent, run.workflow, as_key(prompt), tail)
            tree = driver.tree
            tree.admit(request)
            served = tree.allocate(request, len(prompt) - request.allocated)
            if served and len(output) and tree.allocate(request, len(output)):
                tree.append(request, output.tolist())
            tree.finish(request, publish=served)
            device, host = request.device_hit * unit, request.host_hit * unit
        else:
            hits.refused_calls += 1
        hits.add(call.agent, len(prompt) * unit if keys.known_only else call.prompt_tokens, device, host)
        if item.last:  # at once: what comes after it must not wait for the end of the answer
            driver.call_finished(run.run_id, run.workflow, history, call.output_tokens, item.at_s)
            driver.run_ended(run.run_id, run.workflow, history, item.at_s)
        else:
            heapq.heappush(answers, (item.ends_s, number))
    hits.evicted = driver.tree.evicted_units * unit
    if (oversight := getattr(driver.tree.cache, "oversight", None)) is not None:
        hits.overseen = oversight.report()
    return hits


def replay_belady(workload: Workload, order: Sequence[OrderedCall], keys: Keys, capacity: int) -> Hits:
    """The clairvoyant bound at the same order, with the same rules."""
    hits, unit = Hits(), keys.unit_tokens
    prompts = [keys.prompt(item.run, item.call) for item in order]
    held = [
        np.concatenate([prompt, keys.output(item.run, item.call)]) for item, prompt in zip(order, prompts, strict=True)
    ]
    found = belady_hits(prompts, held, capacity)
    for item, prompt, units, hit in zip(order, prompts, held, found.tolist(), strict=True):
        call = workload.runs[item.run].calls[item.call]
        hits.refused_calls += len(units) > capacity
        whole = not keys.known_only and (unit == 1 or call.prompt_tokens % unit == 0)
        device = min(hit, len(prompt) - 1) if whole and len(prompt) else hit  # the last unit is always computed
        hits.add(call.agent, len(prompt) * unit if keys.known_only else call.prompt_tokens, device * unit, 0)
    return hits
