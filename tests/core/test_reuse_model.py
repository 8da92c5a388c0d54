"""ReuseIndex against a brute-force model: the same events, the whole order computed anew from the definitions."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.owners import OwnersOptions
from pbkv_ray.core.reuse import ReuseIndex, Tier
from pbkv_ray.core.scores import PaperScore, RecencyScore, Score

AGENTS = ("plan", "code", "test")
RUNS = tuple(f"r{i}" for i in range(6))


@dataclass
class Leaf:
    """A node of the model."""

    parent: int | None
    tokens: int
    recency: float
    ever: dict[str, set[str]] = field(default_factory=dict)
    readers: set[str] = field(default_factory=set)  # runs, ended ones included
    foreign: bool = False
    evictable: bool = False


class Model(RuleBasedStateMachine):
    """Nodes are integers; recency is read from the model, as the engine's index reads it from the tree."""

    score: Score = PaperScore()

    def __init__(self) -> None:
        super().__init__()
        self.nodes: dict[int, Leaf] = {}
        self.active: dict[str, Forecast | None] = {}
        self.ended: set[str] = set()
        self.clock = 0.0
        self.made = 0
        self.version = 0
        options = OwnersOptions(ended_memory_s=1e9, max_age_s=1e9)
        self.index = ReuseIndex[int](self.score, options, recency=lambda n: self.nodes[n].recency)

    def tick(self) -> float:
        self.clock += 1.0
        return self.clock

    def path(self, node: int | None) -> list[int]:
        out = []
        while node is not None:
            out.append(node)
            node = self.nodes[node].parent
        return out

    def children(self, node: int) -> list[int]:
        return [n for n, leaf in self.nodes.items() if leaf.parent == node]

    def mark(self, node: int, evictable: bool) -> None:
        self.nodes[node].evictable = evictable
        self.index.set_tier(node, Tier.DEVICE, resident=True, evictable=evictable)

    @rule(data=st.data(), tokens=st.integers(1, 40), run=st.sampled_from([None, *RUNS]))
    def add(self, data: st.DataObject, tokens: int, run: str | None) -> None:
        """A call's tokens are inserted; the engine says at once whose they are."""
        parent = data.draw(st.sampled_from([None, *self.nodes]))
        self.made += 1
        self.nodes[self.made] = Leaf(parent, tokens, self.tick())
        self.index.add(self.made, tokens, parent)
        self.mark(self.made, True)
        if parent is not None:
            self.mark(parent, False)
        self.used(self.made, run, data.draw(st.sampled_from(AGENTS)))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), run=st.sampled_from([None, *RUNS]), agent=st.sampled_from(AGENTS))
    def use(self, data: st.DataObject, run: str | None, agent: str) -> None:
        self.used(data.draw(st.sampled_from(list(self.nodes))), run, agent)

    def used(self, node: int, run: str | None, agent: str) -> None:
        self.index.use(node, run, agent)
        now = self.tick()
        for depth, n in enumerate(self.path(node)):
            leaf = self.nodes[n]
            leaf.recency = max(leaf.recency, now - depth * 1e-5)
            if run is None:
                leaf.foreign = True
            elif run in self.ended:  # late tokens: what nobody else has read is retired from the start
                leaf.readers = leaf.readers or ({run} if not leaf.foreign else set())
            else:
                leaf.ever.setdefault(run, set()).add(agent)
                leaf.readers.add(run)
        if run is not None and run not in self.ended:
            self.active.setdefault(run, None)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), part=st.integers(1, 39))
    def split(self, data: st.DataObject, part: int) -> None:
        node = data.draw(st.sampled_from(list(self.nodes)))
        child = self.nodes[node]
        if part >= child.tokens:
            return
        self.made += 1
        ever = {run: set(agents) for run, agents in child.ever.items()}
        upper = Leaf(child.parent, part, self.tick(), ever, set(child.readers), child.foreign)
        self.nodes[self.made] = upper
        child.parent, child.tokens, child.recency = self.made, child.tokens - part, self.tick()
        self.index.split(node, self.made, part)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def lock_or_unlock(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(list(self.nodes)))
        self.mark(node, not self.nodes[node].evictable and not self.children(node))

    @rule(run=st.sampled_from(RUNS))
    def end(self, run: str) -> None:
        self.index.end(run)
        self.active.pop(run, None)
        self.ended.add(run)
        for leaf in self.nodes.values():
            leaf.ever.pop(run, None)

    @rule(run=st.sampled_from(RUNS), data=st.data())
    def update(self, run: str, data: st.DataObject) -> None:
        row = st.lists(st.integers(0, 4), min_size=4, max_size=4).filter(any)
        step = np.array(data.draw(st.lists(row, min_size=1, max_size=4)), float)
        forecast = Forecast(AGENTS, step / step.sum(1, keepdims=True))
        self.version += 1
        self.index.update(run, forecast, version=self.version, at_s=0.0)
        if run not in self.ended:
            self.active[run] = forecast

    @rule(run=st.sampled_from(RUNS))
    def late_and_unknown_events_do_nothing(self, run: str) -> None:
        self.index.use(-1, run, "plan")
        self.index.remove(-1)
        self.index.split(-1, -2, 1)
        self.index.set_tier(-1, Tier.HOST, resident=True, evictable=True)
        if run in self.ended:
            self.index.end(run)
            self.index.call(run, "plan")

    @rule(count=st.integers(1, 5), keep=st.booleans())
    def evict(self, count: int, keep: bool) -> None:
        """Parents become leaves under way; a victim that could not be evicted is not offered twice in a pass."""
        walk = self.index.victims(Tier.DEVICE)
        kept: set[int] = set()
        for _ in range(count):
            victim = next(walk, None)
            left = [n for n, leaf in self.nodes.items() if leaf.evictable and n not in kept]
            if not left:
                assert victim is None
                break
            assert victim is not None
            first = min(map(self.key, left))
            assert self.key(victim)[:2] == pytest.approx(first[:2])
            rivals = [n for n in left if self.rank(n) == self.rank(victim)]  # ties as the index sees them
            assert victim == min(rivals, key=lambda n: self.nodes[n].recency)
            if keep and victim % 2:
                kept.add(victim)
                continue
            parent = self.nodes[victim].parent
            self.index.set_tier(victim, Tier.DEVICE, resident=False, evictable=False)
            self.index.remove(victim)
            del self.nodes[victim]
            if parent is not None and not self.children(parent):
                self.mark(parent, True)
        walk.close()

    # The definitions

    def value(self, leaf: Leaf) -> float:
        return sum(
            float(forecast.values(0.7, 3)[[AGENTS.index(a) for a in agents]].sum())
            for run, agents in leaf.ever.items()
            if (forecast := self.active.get(run)) is not None
        )

    def key(self, node: int) -> tuple[int, float, float]:
        leaf = self.nodes[node]
        if self.score.retired_first and leaf.readers and not leaf.ever and not leaf.foreign:
            return (0, len(leaf.readers), leaf.recency)
        return (1, 0.0 if isinstance(self.score, RecencyScore) else self.value(leaf), leaf.recency)

    def rank(self, node: int) -> tuple[int, float]:
        explained = self.index.explain(node)
        assert explained is not None
        return explained.key[:2]

    @invariant()
    def explains_every_node(self) -> None:
        for node in self.nodes:
            explained = self.index.explain(node)
            assert explained is not None
            assert explained.key == pytest.approx(self.key(node), abs=1e-9)
            readers = {run: set(agents) for run, agents in explained.owners}
            assert readers == self.nodes[node].ever

    @invariant()
    def child_is_never_worth_more(self) -> None:
        for node, leaf in self.nodes.items():
            if leaf.parent is not None:
                (band, worth), (above, most) = self.rank(node), self.rank(leaf.parent)
                assert (band, worth) <= (above, most + 1e-9)

    @invariant()
    def holds_its_invariants(self) -> None:
        self.index.check_invariants()

    def teardown(self) -> None:
        for run in RUNS:
            self.index.end(run)
        self.index.check_invariants()
        assert self.index.owners.runs == {}
        self.index.clear()
        assert list(self.index.owners.sets()) in ([], [self.index.owners.nobody])


def _machine(score: Score) -> type[Model]:
    return type("Model_" + score.name, (Model,), {"score": score})


TestPaper = _machine(PaperScore()).TestCase
TestRetiredFirst = _machine(RecencyScore("lae", retired_first=True)).TestCase
TestRecency = _machine(RecencyScore()).TestCase
for case in (TestPaper, TestRetiredFirst, TestRecency):
    case.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
