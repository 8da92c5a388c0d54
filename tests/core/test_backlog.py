"""What is taken in late is as if it had been taken in at once: one index asked after every event, one at the end."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from pbkv_ray.core.backlog import DEVICE_FREE, DEVICE_HELD, HOST_FREE, HOST_HELD
from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.owners import OwnersOptions
from pbkv_ray.core.reuse import ReuseIndex, Tier
from pbkv_ray.core.scores import score_of

AGENTS = ("plan", "code")
RUNS = ("r0", "r1", "r2")
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["call", "call", "call", "use", "lock", "split", "update", "end", "evict", "host", "demote"]),
        st.integers(0, 999),
        st.integers(0, 999),
    ),
    max_size=60,
)


class Engine:
    """A tree of prompts whose blocks are 16 tokens, and what it tells its index."""

    def __init__(self, policy: str, curious: bool) -> None:
        self.recency: dict[int, float] = {}
        options = OwnersOptions(max_owners=2, max_runs=2)
        self.index = ReuseIndex[int](score_of(policy), options, recency=self.recency.__getitem__)
        self.curious = curious
        self.parent: dict[int, int | None] = {}
        self.tokens: dict[int, int] = {}
        self.locked: set[int] = set()
        self.demoted: set[int] = set()
        self.order: list[list[int]] = []
        self.made = self.clock = self.version = 0

    def do(self, what: str, a: int, b: int) -> None:
        self.clock += 1
        run, agent, nodes = RUNS[a % 3], AGENTS[b % 2], list(self.parent)
        node = nodes[b % len(nodes)] if nodes else None
        match what:
            case "call":
                path = self.path(node)
                for one in self.demoted.intersection(path):
                    self.demoted.remove(one)
                    self.say(one)
                self.index.call(run, agent, workflow="flow", blocks=path, at_s=float(self.clock))
                if node is not None:
                    self.used(node, run, agent)
                self.made += 1
                self.parent[self.made], self.tokens[self.made] = node, 16 * (1 + a % 3)
                self.touch(self.made)
                self.index.add(self.made, self.tokens[self.made], node)
                self.say(self.made, node)
                self.used(self.made, run, agent)
            case "use" if node is not None:
                self.used(node, run if a % 5 else None, agent)
            case "lock" if node is not None:
                self.locked ^= {node}
                self.say(node)
                if a % 2:
                    self.locked ^= {node}
                    self.say(node)
            case "split" if node is not None and self.tokens[node] > 16:
                self.made += 1
                self.index.split(node, self.made, 16)
                self.demoted |= {self.made} if node in self.demoted else set()
                self.parent[self.made], self.parent[node] = self.parent[node], self.made
                self.tokens[self.made], self.tokens[node] = 16, self.tokens[node] - 16
                self.touch(self.made)
                self.say(self.made, node)
            case "update":
                self.version += 1
                step = np.array([[1.0 + a % 3, b % 4, 1.0]])
                forecast = Forecast(AGENTS, step / step.sum())
                self.index.update(run, forecast, version=self.version, at_s=float(self.clock), workflow="flow")
            case "end":
                self.index.end(run)
            case "evict":
                self.evict(1 + a % 3, b % 2 == 0)
            case "host" if node is not None:
                self.index.report(node, self.state(node) | HOST_HELD)
            case "demote" if node is not None and node not in self.parent.values():
                self.demoted ^= {node}
                self.say(node)
        self.wonder()

    def wonder(self) -> None:
        if self.curious:
            self.index.retired_tokens(Tier.DEVICE)
            self.index.residency()

    def evict(self, count: int, keeps: bool) -> None:
        walk, gone = self.index.victims(Tier.DEVICE), list[int]()
        for victim in walk:
            gone.append(victim)
            if keeps and victim % 3 == 0:
                self.locked ^= {victim}
                self.say(victim)
                self.locked ^= {victim}
                self.say(victim)
                if len(gone) > 4:
                    break
                continue
            above = self.parent.pop(victim)
            self.index.report(victim, 0)
            self.index.remove(victim)
            self.say(above)
            count -= 1
            if not count:
                break
        walk.close()
        self.order.append(gone)

    def path(self, node: int | None) -> list[int]:
        out = []
        while node is not None:
            out.append(node)
            node = self.parent[node]
        return out[::-1]

    def touch(self, node: int) -> None:
        self.clock += 1
        self.recency[node] = float(self.clock)

    def used(self, node: int, run: str | None, agent: str) -> None:
        for one in self.path(node):
            self.touch(one)
        self.index.use(node, run, agent, workflow="flow")

    def state(self, node: int) -> int:
        free = node not in self.locked and node not in self.parent.values()
        if node in self.demoted:
            return HOST_HELD | (HOST_FREE if free else 0)
        return DEVICE_HELD | (DEVICE_FREE if free else 0)

    def say(self, *nodes: int | None) -> None:
        for node in nodes:
            if node is not None:
                self.index.report(node, self.state(node))
                self.wonder()

    def seen(self) -> tuple[object, ...]:
        """All that an index tells, and what it knows of every node."""
        explained = {node: self.index.explain(node) for node in self.parent}
        walk = self.index.victims(Tier.DEVICE)
        left = list(walk)
        walk.close()
        self.index.check_invariants()
        tokens = self.index.retired_tokens(Tier.DEVICE), self.index.residency(), self.index.count
        sets = {node: self.index._nodes[node].owned for node in self.parent}
        known = {
            node: ([(use.run.run_id, *masks[1:]) for use, masks in zip(s.uses, s.owners, strict=True)], s.key[1:])
            for node, s in sets.items()
        }
        return self.order, explained, known, left, tokens, list(self.index.host_only())


@pytest.mark.parametrize("policy", ["lru", "lae", "he", "pbkv+"])
@given(events=EVENTS)
@settings(max_examples=150, deadline=None)
def test_late_is_as_good_as_at_once(policy: str, events: list[tuple[str, int, int]]) -> None:
    curious, patient = Engine(policy, curious=True), Engine(policy, curious=False)
    for event in events:
        curious.do(*event)
        patient.do(*event)
    assert patient.seen() == curious.seen()


def test_a_call_that_locks_and_names_its_path_three_times_is_taken_in_once() -> None:
    engine = Engine("he", curious=False)
    engine.do("call", 0, 0)
    walks = engine.index._backlog
    engine.index.retired_tokens(Tier.DEVICE)
    assert len(walks) == 0
    for _ in range(3):
        engine.used(1, "r0", "plan")
        engine.do("lock", 1, 0)
    assert len(walks) == 2  # one use, one node
    assert engine.index.residency() == {"r0": (16, 0)}
    assert len(walks) == 0
