"""Routers of a simulated cluster: ours through `core.routes`, and the rivals that users have today.

A router sees what the real one would: prompts, its own choices, answers, and reports that are up to a second old.
"""

import bisect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pbkv_ray.core.routes import Routes
from pbkv_ray.core.routing import RoutingOptions
from pbkv_ray.errors import ConfigError
from pbkv_ray.replay.arrivals import uniform

VNODES = 100


@dataclass(frozen=True, slots=True)
class Asks:
    """A call. prompt: its units, prefix-chained, so that a unit names the whole prefix up to it."""

    run_id: str
    parent: str | None
    prompt: Sequence[int]
    prompt_tokens: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica tells of itself once a second: run -> (device, host) tokens, waiting tokens, rates."""

    tokens: Mapping[str, tuple[int, int]]
    queued_tokens: int
    prefill_tokens_s: float
    load_tokens_s: float


class Router(Protocol):
    wants_reports: bool

    def choose(self, call: Asks, in_flight: Sequence[int]) -> int:
        """in_flight: unanswered calls of each replica."""

    def report(self, replica: int, report: Report, at_s: float) -> None: ...
    def finished(self, run_id: str, replica: int, prompt_tokens: int, cached_tokens: int) -> None: ...
    def ended(self, run_id: str) -> None: ...


class _Blind:
    """Hears nothing of what becomes of its calls."""

    wants_reports = False

    def report(self, replica: int, report: Report, at_s: float) -> None: ...
    def finished(self, run_id: str, replica: int, prompt_tokens: int, cached_tokens: int) -> None: ...
    def ended(self, run_id: str) -> None: ...


class Ours:
    """The router's own class; the table is the controller's, without the copy's delay."""

    wants_reports = True

    def __init__(self, replicas: int, seed: int, options: RoutingOptions | None = None) -> None:
        self.routes = Routes(options)
        self._names = [f"{n:02}" for n in range(replicas)]
        for name in self._names:
            self.routes.joined(name, "epoch")

    def choose(self, call: Asks, in_flight: Sequence[int]) -> int:
        if call.run_id not in self.routes:
            self.routes.started(call.run_id, call.parent)
        decision = self.routes.route(call.run_id, call.prompt_tokens, call.at_s)
        assert decision is not None
        return int(decision.replica)

    def report(self, replica: int, report: Report, at_s: float) -> None:
        self.routes.report(
            self._names[replica],
            "epoch",
            report.tokens,
            report.queued_tokens,
            at_s,
            report.prefill_tokens_s,
            report.load_tokens_s,
        )

    def finished(self, run_id: str, replica: int, prompt_tokens: int, cached_tokens: int) -> None:
        self.routes.finished(run_id, self._names[replica], prompt_tokens, cached_tokens)

    def ended(self, run_id: str) -> None:
        self.routes.ended(run_id)


class PowerOfTwo(_Blind):
    """Ray Serve's default: of two random replicas the one with fewer unanswered calls."""

    def __init__(self, replicas: int, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, call: Asks, in_flight: Sequence[int]) -> int:
        pair = self._random.sample(range(len(in_flight)), min(2, len(in_flight)))
        return min(pair, key=lambda n: in_flight[n])


class ConsistentHash(_Blind):
    """Ray Serve's ConsistentHashRouter keyed by run: a ring with a hundred points a replica."""

    def __init__(self, replicas: int, seed: int) -> None:
        self._ring = sorted((uniform("ring", seed, n, v), n) for n in range(replicas) for v in range(VNODES))

    def choose(self, call: Asks, in_flight: Sequence[int]) -> int:
        at = bisect.bisect(self._ring, (uniform("run", call.run_id), -1))
        return self._ring[at % len(self._ring)][1]


class PrefixAffinity(_Blind):
    """Ray's PrefixCacheAffinityRouter: the replica that was sent the longest prefix, if that is a tenth of the prompt,
    else the one that was sent least; two choices while queues differ by more than `threshold`. It forgets nothing and
    hears of no eviction."""

    def __init__(self, replicas: int, seed: int, threshold: float = float("inf")) -> None:
        self._two = PowerOfTwo(replicas, seed)
        self._threshold = threshold
        self._sent: dict[int, set[int]] = {}  # unit -> replicas
        self._size = [0] * replicas

    def choose(self, call: Asks, in_flight: Sequence[int]) -> int:
        chosen = self._match(call, in_flight)
        for unit in call.prompt:
            holders = self._sent.setdefault(unit, set())
            self._size[chosen] += chosen not in holders
            holders.add(chosen)
        return chosen

    def _match(self, call: Asks, in_flight: Sequence[int]) -> int:
        if max(in_flight) - min(in_flight) > self._threshold:
            return self._two.choose(call, in_flight)
        depth = next((n for n in range(len(call.prompt), 0, -1) if call.prompt[n - 1] in self._sent), 0)
        if depth and depth >= 0.1 * len(call.prompt):
            tenants = sorted(self._sent[call.prompt[depth - 1]])
        else:
            tenants = [n for n, size in enumerate(self._size) if size == min(self._size)]
        return min(tenants, key=lambda n: in_flight[n])


ROUTERS: dict[str, Callable[[int, int], Router]] = {
    "pbkv": Ours,
    "pow2": PowerOfTwo,
    "hash": ConsistentHash,
    "prefix": PrefixAffinity,
    "prefix-balanced": lambda replicas, seed: PrefixAffinity(replicas, seed, threshold=10.0),
}


def parse_routers(text: str) -> list[str]:
    """Raises ConfigError for a name that is not known."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ROUTERS]
    if unknown or not names:
        raise ConfigError(f"routers {text!r}: {unknown or 'none'} unknown; known are {', '.join(ROUTERS)}")
    return names
