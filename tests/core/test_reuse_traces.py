"""The policies on a public trace, in seconds: what a change of the policy is worth, before the real cache replays it.

Runs of AutoCodeRover at 20 % of the live footprint, every fourth block, a closed loop with tool gaps of 1 to 8 s;
forecasts, waits and reuse are learned on other runs first. The shares of Belady's hit are in `replay/LOG.md`.
"""

import heapq
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from pbkv_ray.core.ghost import LearnedReuse
from pbkv_ray.core.owners import OwnersOptions
from pbkv_ray.core.reuse import ReuseIndex, Tier
from pbkv_ray.core.scores import PaperScore, RecencyScore, Score, TimeScore
from pbkv_ray.core.waits import WaitingTimes
from pbkv_ray.predict.counts import VariableOrderCounts
from pbkv_ray.replay.traces import read_trace
from pbkv_ray.replay.workload import Workload

DATA = Path(os.environ.get("PBKV_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))
COARSE = 4  # blocks of 16 tokens a unit
Call = tuple[int, int, float, bool]  # run, call, at_s, last


class Span:
    """A radix-tree node of whole units."""

    def __init__(self, units: list[int], parent: "Span | None") -> None:
        self.units, self.parent, self.children = units, parent, 0


class Cache:
    """A radix tree of `capacity` units, device tier only, over an index. The path in use is locked."""

    def __init__(self, index: ReuseIndex[Span], capacity: int) -> None:
        self.index, self.free = index, capacity
        self.where: dict[int, Span] = {}

    def split(self, span: Span, units: int) -> Span:
        upper = Span(span.units[:units], span.parent)
        upper.children, span.units, span.parent = 1, span.units[units:], upper
        self.where.update(dict.fromkeys(upper.units, upper))
        self.index.split(span, upper, units)
        self.mark(upper, False)
        return upper

    def mark(self, span: Span, evictable: bool) -> None:
        self.index.set_tier(span, Tier.DEVICE, resident=True, evictable=evictable)

    def call(self, units: list[int], run: str, agent: str) -> int:
        """Units found."""
        found = next((i for i, unit in enumerate(units) if unit not in self.where), len(units))
        last = self.where[units[found - 1]] if found else None
        if last is not None:
            inside = last.units.index(units[found - 1]) + 1
            last = self.split(last, inside) if inside < len(last.units) else last
            self.mark(last, False)
            self.index.use(last, run, agent)
        self.evict(len(units) - found, last)
        new = units[found : found + self.free]
        if new:
            span = Span(new, last)
            if last is not None:
                last.children += 1
            self.where.update(dict.fromkeys(new, span))
            self.free -= len(new)
            self.index.add(span, len(new) * COARSE * 16, last)
            self.index.use(span, run, agent)
            last = span
        if last is not None:
            self.mark(last, last.children == 0)
        return found

    def evict(self, units: int, locked: Span | None) -> None:
        """Tails of leaves, as much as is asked for."""
        walk = self.index.victims(Tier.DEVICE)
        while self.free < units and (victim := next(walk, None)) is not None:
            surplus = len(victim.units) - (units - self.free)
            if surplus > 0:
                self.split(victim, surplus)
            self.free += len(victim.units)
            for unit in victim.units:
                del self.where[unit]
            self.index.remove(victim)
            if victim.parent is not None:
                victim.parent.children -= 1
                self.mark(victim.parent, victim.parent.children == 0 and victim.parent is not locked)
        walk.close()


def closed_loop(workload: Workload, in_flight: int, seed: int) -> Iterator[Call]:
    rng = random.Random(seed)
    waiting = list(range(len(workload)))
    rng.shuffle(waiting)
    queue = [(rng.uniform(0, 20), waiting.pop(), 0) for _ in range(min(in_flight, len(waiting)))]
    heapq.heapify(queue)
    while queue:
        at_s, run, call = heapq.heappop(queue)
        calls = workload.runs[run].calls
        last = call + 1 == len(calls)
        yield run, call, at_s, last
        at_s += calls[call].output_tokens / 40 + rng.uniform(1, 8)
        if not last:
            heapq.heappush(queue, (at_s, run, call + 1))
        elif waiting:
            heapq.heappush(queue, (at_s, waiting.pop(), 0))


def device_hit(score: Score, train: Workload, test: Workload, fraction: float) -> float:
    predictor, learned, waits = VariableOrderCounts(), LearnedReuse(16 * COARSE), WaitingTimes()

    def blocks(workload: Workload, run: int, call: int) -> list[int]:
        units: list[int] = workload.runs[run].calls[call].blocks()[COARSE - 1 :: COARSE].tolist()
        return units

    called: dict[int, float] = {}
    for run, call, at_s, last in closed_loop(train, train.in_flight, seed=2):
        agents = train.runs[run].agents[: call + 1]
        predictor.observe("acr", agents[:-1], agents[-1])
        if call:
            waits.observe("acr", agents[-2], at_s - called[run])
            predictor.observe_wait("acr", agents[-2], agents[-1], at_s - called[run])
        called[run] = at_s
        learned.observe("acr", f"train {run}", agents[-1], agents[:-1], blocks(train, run, call))
        if last:
            predictor.observe("acr", agents, None)
            learned.end(f"train {run}")
    options = OwnersOptions(max_age_s=1e9)
    index = ReuseIndex[Span](score, options, learned=learned, waits=waits)
    units = int(test.pool_tokens(fraction, test.in_flight) / 16 / COARSE)
    cache = Cache(index, units)
    found = asked = 0
    for version, (run, call, at_s, last) in enumerate(closed_loop(test, test.in_flight, seed=1)):
        agents, name, prompt = test.runs[run].agents[: call + 1], f"r{run}", blocks(test, run, call)
        index.call(name, agents[-1], workflow="acr", blocks=prompt, at_s=at_s)
        forecast = predictor.forecast("acr", agents, score.horizon)
        if forecast is not None:
            index.update(name, forecast, version=version, at_s=at_s)
        found += cache.call(prompt, name, agents[-1])
        asked += len(prompt)
        if last:
            index.end(name)
    index.check_invariants()
    return found / asked


@pytest.fixture(scope="module")
def halves() -> tuple[Workload, Workload]:
    path = DATA / "acr.wf.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"{path} is not there; PBKV_DATA names the folder of the public traces")
    trace = read_trace(path)
    return trace.half("tune").cut(60), trace.half("report").cut(60)


def test_every_idea_is_worth_something(halves: tuple[Workload, Workload]) -> None:
    train, test = halves
    scores: dict[str, Score] = {
        "lru": RecencyScore(),
        "retired first": RecencyScore("lae", retired_first=True),
        "paper": PaperScore(),
        "time": TimeScore(learns=False),
        "time and learned reuse": TimeScore(),
    }
    hits = {name: device_hit(score, train, test, fraction=0.2) for name, score in scores.items()}
    assert sorted(hits, key=lambda name: hits[name]) == list(scores), hits
    assert hits["time and learned reuse"] > 2 * hits["lru"]
