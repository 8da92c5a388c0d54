"""The routing table: where runs live, what replicas hold of them, what waits there. The controller's and its copies.

Theory of operation. The controller's table is fed with reports and events; every change gets a number, and `changes`
tells a router what is new since the number it knows. A router's copy takes these with `apply` and decides by itself: no
call waits for the controller, except one of a run that the copy does not know and that did not just begin. Between two
reports both count what they have sent: a prompt on its way is as good as cached for the run's next call (siblings of a
fan-out follow the first), and its tokens wait at the replica until the replica had the time to compute them.

All replicas count as equally fast, at the median of the rates that they report. A rate says what a replica happened to
compute more than what it can: compared with each other, they once sent all runs to the replica that had the first long
prompt, for ever. Whoever is really slower has the longer queue.

Everything is soft: a table that starts empty places runs where reports say that their context is.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median_high
from typing import TypeVar

from pbkv_ray.core.places import Changes, Place, ReplicaNews
from pbkv_ray.core.routing import NOTHING, CallSize, Decision, Held, ReplicaFacts, RoutingOptions, decide

T = TypeVar("T")

PROMISE_S = 10.0  # a prompt that was sent counts as held for so long, whatever reports say
REPORT_AGE_S = 1.5  # what was sent less than so long before a report may be missing in it
KEEP_HOME_S = 5.0  # a copy's own choice of a home stands so long against the controller's
MAX_ANCESTORS = 8


@dataclass(slots=True)
class _Replica:
    news: ReplicaNews
    tokens: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # the controller's: the whole last report
    waiting: float = 0.0  # tokens, as of `at_s`
    at_s: float = 0.0
    sent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=256))


class Routes:
    def __init__(self, options: RoutingOptions | None = None) -> None:
        self.options = options or RoutingOptions()
        self.version = 0
        self.counts: Counter[str] = Counter()
        self.replicas: dict[str, _Replica] = {}
        self._places: OrderedDict[str, Place] = OrderedDict()  # longest untouched first
        self._expected: Counter[str] = Counter()  # replica -> tokens that its runs will bring
        self._promised: OrderedDict[str, tuple[str, int, float]] = OrderedDict()  # root run -> replica, tokens, when
        self._chosen: OrderedDict[str, float] = OrderedDict()  # run -> when its home was chosen here
        self._changed: OrderedDict[str, int] = OrderedDict()  # run -> version, oldest first
        self._forgotten = 0  # changes up to here are not remembered one by one
        self._usual = 1_000.0
        self._prefill_tokens_s = self._load_tokens_s = 0.0  # medians; 0: nobody has told

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, run: str) -> bool:
        return run in self._places

    def get(self, run: str) -> Place | None:
        return self._places.get(run)

    # Replicas

    def joined(self, replica: str, epoch: str) -> None:
        """No-op for a known epoch; an engine with a new one holds nothing."""
        known = self.replicas.get(replica)
        if known is not None and known.news.epoch == epoch:
            return
        self._emptied(replica)
        self.replicas[replica] = _Replica(ReplicaNews(epoch))
        while len(self.replicas) > self.options.max_replicas:
            self.left(next(iter(self.replicas)))
        self._touch(())

    def report(
        self,
        replica: str,
        epoch: str,
        tokens: Mapping[str, tuple[int, int]],
        queued_tokens: float,
        at_s: float,
        prefill_tokens_s: float = 0.0,
        load_tokens_s: float = 0.0,
    ) -> None:
        """tokens: run -> (device, host), the whole of it."""
        self.joined(replica, epoch)
        known = self.replicas[replica]
        news = known.news
        news = ReplicaNews(epoch, news.number + 1, queued_tokens, prefill_tokens_s, load_tokens_s, news.draining)
        before, known.tokens = known.tokens, tokens
        self._refill(known, news, at_s)
        for run in {run for run in (*before, *tokens) if before.get(run) != tokens.get(run)}:
            self._hold(run, replica, tokens.get(run))
        self._touch(())

    def drain(self, replica: str) -> None:
        """It takes no new runs, and its runs leave with their next calls."""
        known = self.replicas.get(replica)
        if known is not None:
            known.news = replace(known.news, draining=True)
            self._touch(())

    def left(self, replica: str) -> None:
        if self.replicas.pop(replica, None) is not None:
            self._emptied(replica)
            for run, place in list(self._places.items()):
                if place.home == replica:
                    self._set(run, replace(place, home=None))
            self._touch(())

    def _emptied(self, replica: str) -> None:
        for run, place in list(self._places.items()):
            if replica in place.held:
                self._hold(run, replica, None)
        for run, (where, _, _) in list(self._promised.items()):
            if where == replica:
                del self._promised[run]

    def _hold(self, run: str, replica: str, tokens: tuple[int, int] | None) -> None:
        place = self._places.get(run)
        if place is not None:
            held = {name: kept for name, kept in place.held.items() if name != replica}
            if tokens is not None:
                held[replica] = Held(*tokens)
            self._set(run, replace(place, held=held))

    def _refill(self, known: _Replica, news: ReplicaNews, at_s: float) -> None:
        while known.sent and known.sent[0][0] < at_s - REPORT_AGE_S:
            known.sent.popleft()
        known.news = news
        known.waiting = max(news.queued_tokens, sum(tokens for _, tokens in known.sent))
        known.at_s = at_s
        self._prefill_tokens_s = self._median(r.news.prefill_tokens_s for r in self.replicas.values())
        self._load_tokens_s = self._median(r.news.load_tokens_s for r in self.replicas.values())

    @staticmethod
    def _median(rates: Iterable[float]) -> float:
        told = [rate for rate in rates if rate > 0]
        return median_high(told) if told else 0.0

    # Runs

    def started(self, run: str, parent: str | None) -> None:
        place = self._places.get(run) or Place(held=self._reported(run))
        if place.parent != parent or run not in self._places:
            self._set(run, replace(place, parent=parent if parent != run else None))

    def finished(self, run: str, replica: str, prompt_tokens: int, cached_tokens: int) -> None:
        """One of its calls was answered by `replica`."""
        place = self._places.get(run) or Place(held=self._reported(run))
        computed = max(0, prompt_tokens - cached_tokens)
        self._usual += 0.02 * (computed - self._usual)
        recent = (*place.recent, computed)[-2:] if place.calls else ()
        home = place.home or (replica if replica in self.replicas else None)
        expected = sum(recent) / len(recent) if recent else self._usual
        self._set(run, Place(home, place.parent, place.held, recent, expected, place.calls + 1))  # `replace` is slow

    def settled(self, run: str, home: str) -> None:
        """A router has chosen a home for the run, or a new one."""
        place = self._places.get(run) or Place(held=self._reported(run))
        if home in self.replicas and place.home != home:
            self._set(run, replace(place, home=home, expected=self._first_guess(place)))

    def ended(self, run: str) -> None:
        place = self._places.pop(run, None)
        self._promised.pop(run, None)
        self._chosen.pop(run, None)
        if place is not None:
            self._count(place, -1)
            self._touch((run,))

    def _reported(self, run: str) -> dict[str, Held]:
        return {name: Held(*known.tokens[run]) for name, known in self.replicas.items() if run in known.tokens}

    def _set(self, run: str, place: Place) -> None:
        before = self._places.pop(run, None)
        if before is not None:
            self._count(before, -1)
        self._places[run] = place
        self._count(place, 1)
        self._touch((run,))
        while len(self._places) > self.options.max_runs:
            self.counts["places_displaced"] += 1
            self.ended(next(iter(self._places)))

    def _count(self, place: Place, sign: int) -> None:
        if place.home is not None:
            self._expected[place.home] += sign * place.expected  # type: ignore[assignment]
            if abs(self._expected[place.home]) < 1e-6:
                del self._expected[place.home]

    # Calls

    def route(self, run: str, prompt_tokens: int, at_s: float, among: Collection[str] | None = None) -> Decision | None:
        """The replica for a call of `run`, which is then its home; None when there is none.

        among: the replicas that can be reached; by default all that are known. One that is not known costs what its
        prompt costs.
        """
        names = self.replicas.keys() if among is None else among
        place = self._places.get(run) or Place(held=self._reported(run))
        root = self._root(run, place)
        decision = decide(
            CallSize(prompt_tokens, place.fresh),
            {name: self._facts(name, at_s) for name in names},
            {name: self._held(name, place, root, at_s) for name in names},
            self.options,
            home=place.home,
            family=self._home_of(root),
            own_tokens=place.expected,
        )
        if decision is None:
            return None
        self._send(root, decision, prompt_tokens, at_s)
        if place.home != decision.replica or run not in self._places:
            self._set(run, replace(place, home=decision.replica, expected=self._first_guess(place)))
            self._remember(self._chosen, run, at_s)
        else:
            self._places.move_to_end(run)
        self.counts[f"routed_{decision.reason}"] += 1
        return decision

    def adopt(self, run: str, place: Place | None, decision: Decision, prompt_tokens: int, at_s: float) -> None:
        """For a copy: the controller has decided for a run that was not known here."""
        place = place or Place()
        self._set(run, replace(place, home=decision.replica))
        self._send(self._root(run, place), decision, prompt_tokens, at_s)

    def _first_guess(self, place: Place) -> float:
        """A sibling on its way adds no crowd: it shares what the first one of its family brings."""
        return place.expected or (self._usual if place.parent is None else 0.0)

    def _root(self, run: str, place: Place) -> str:
        """The run at the top of the family, as far as the table knows it."""
        for _ in range(MAX_ANCESTORS):
            if place.parent is None:
                break
            run, place = place.parent, self._places.get(place.parent) or Place()
        return run

    def family_home(self, run: str) -> str | None:
        """Where its family's runs went so far."""
        return self._home_of(self._root(run, self._places.get(run) or Place()))

    def _home_of(self, root: str) -> str | None:
        promised = self._promised.get(root)
        place = self._places.get(root)
        return (place and place.home) or (promised and promised[0])

    def _facts(self, name: str, at_s: float) -> ReplicaFacts:
        known = self.replicas.get(name)
        expected = float(self._expected.get(name, 0.0))
        if known is None:
            return ReplicaFacts(0.0, expected, self._prefill_tokens_s, self._load_tokens_s)
        waiting, draining = self._waiting(known, at_s), known.news.draining
        return ReplicaFacts(waiting, expected, self._prefill_tokens_s, self._load_tokens_s, draining)

    def _waiting(self, known: _Replica, at_s: float) -> float:
        rate = self._prefill_tokens_s or self.options.prefill_tokens_s
        return max(0.0, known.waiting - rate * max(0.0, at_s - known.at_s))

    def _held(self, name: str, place: Place, root: str, at_s: float) -> Held:
        held = place.held.get(name, NOTHING)
        if place.parent is not None and (above := self._places.get(root)) is not None:
            shared = above.held.get(name, NOTHING)
            held = max(held, shared, key=lambda h: h.device + h.host)
        where, tokens, sent_s = self._promised.get(root, ("", 0, 0.0))
        known = self.replicas.get(name)
        if where == name and (known is None or known.news.number == 0 or at_s - sent_s < PROMISE_S):
            return held if held.device >= tokens else Held(tokens, 0)
        return held

    def _send(self, root: str, decision: Decision, prompt_tokens: int, at_s: float) -> None:
        self._remember(self._promised, root, (decision.replica, prompt_tokens, at_s))
        known = self.replicas.get(decision.replica)
        if known is not None:
            known.waiting, known.at_s = self._waiting(known, at_s) + decision.tokens, at_s
            known.sent.append((at_s, decision.tokens))

    def _remember(self, table: OrderedDict[str, T], run: str, value: T) -> None:
        table[run] = value
        table.move_to_end(run)
        while len(table) > self.options.max_runs:
            table.popitem(last=False)

    # Copies

    def _touch(self, runs: Iterable[str]) -> None:
        self.version += 1
        for run in runs:
            self._changed[run] = self.version
            self._changed.move_to_end(run)
        while len(self._changed) > 2 * self.options.max_runs:
            _, self._forgotten = self._changed.popitem(last=False)

    def changes(self, since: int) -> Changes:
        """What is new after version `since`; everything if that is too long ago, or of another table."""
        replicas = {name: known.news for name, known in self.replicas.items()}
        if not self._forgotten <= since <= self.version:
            return Changes(self.version, True, dict(self._places), replicas)
        news: dict[str, Place | None] = {}
        for run, version in reversed(self._changed.items()):
            if version <= since:
                break
            news[run] = self._places.get(run)
        return Changes(self.version, False, news, replicas)

    def apply(self, changes: Changes, at_s: float, *, merge: bool = False) -> None:
        """For a copy; `at_s` on its own clock. merge: the controller has just restarted and does not know all yet, so
        what it does not mention stays."""
        if not merge:
            for name in [name for name in self.replicas if name not in changes.replicas]:
                self.left(name)
        for name, news in changes.replicas.items():
            self.joined(name, news.epoch)
            known = self.replicas[name]
            if news.number != known.news.number:
                self._refill(known, news, at_s)
            known.news = news
        if changes.full and not merge:
            for run in [run for run in self._places if run not in changes.places]:
                self.ended(run)
        for run, place in changes.places.items():
            if place is None:
                self.ended(run)
            else:
                self._set(run, self._mine(run, place, at_s))

    def _mine(self, run: str, told: Place, at_s: float) -> Place:
        """What the controller says, but for a home that was chosen here just now, which it may not have heard of."""
        mine = self._places.get(run)
        if mine is None or mine.home not in self.replicas:
            return told
        if told.home is None or at_s - self._chosen.get(run, 0.0) < KEEP_HOME_S:
            return replace(told, home=mine.home)
        return told

    def check_invariants(self) -> None:
        sums: Counter[str] = Counter()
        for place in self._places.values():
            if place.home is not None:
                sums[place.home] += place.expected  # type: ignore[assignment]
        for name in sums.keys() | self._expected.keys():
            assert abs(sums[name] - self._expected[name]) < 1e-3, f"{name}: {self._expected[name]}, not {sums[name]}"
        assert max(len(self._places), len(self._promised), len(self._chosen)) <= self.options.max_runs
        assert len(self._changed) <= 2 * self.options.max_runs
