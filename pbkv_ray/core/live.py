"""What a person who watches sees: the controller's runs, replicas and rates, as one bounded snapshot.

Nothing here decides anything. `LiveView` keeps what the controller itself forgets at once (the newest forecasts, what
engines say of their pools, counters of the last minutes), each up to a bound, and puts a snapshot together only when
somebody asks: a controller that nobody watches pays for a dictionary entry an action and a sample every few seconds.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest, nsmallest
from itertools import islice, pairwise
from typing import Any

from pbkv_ray.core.actions import Action, PublishForecast, RetireRun
from pbkv_ray.core.controller import Controller, Replica
from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.health import Following
from pbkv_ray.core.runs import Run

Json = dict[str, Any]
Likely = list[list[tuple[str, float]]]

# Totals that engines report since their start; an engine that starts anew begins at zero.
TOTALS = (
    "prefetch_useful",
    "prefetch_late",
    "prefetch_wasted",
    "shadow_prompt_tokens",
    "shadow_cached_tokens",
    "evicted_device_tokens",
    "evicted_host_tokens",
)
_CALLS = ("calls_finished", "prompt_tokens", "device_cached_tokens", "host_cached_tokens")  # Controller.counts
INTERRUPT = "interrupt"  # what ToolWaiting names when a graph waits for a human


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """Bounds. steps: of a forecast that are shown; likely: agents of each; path: agents of a run's past."""

    steps: int = 3
    likely: int = 3
    path: int = 8
    forecasts: int = 4_096
    replicas: int = 256
    pieces: int = 16  # runs told apart in a replica's pool
    samples: int = 60
    sample_s: float = 5.0


class LiveView:
    def __init__(self, controller: Controller, options: LiveOptions | None = None) -> None:
        self._controller = controller
        self._options = options or LiveOptions()
        self._forecasts: OrderedDict[str, Forecast] = OrderedDict()
        self._numbers: OrderedDict[str, tuple[str, Mapping[str, float]]] = OrderedDict()  # replica -> epoch, numbers
        self._totals: Counter[str] = Counter()
        self._reported: set[str] = set()  # which of TOTALS anybody has ever reported
        self._samples: deque[tuple[float, Counter[str]]] = deque(maxlen=self._options.samples + 1)

    def performed(self, actions: Sequence[Action]) -> None:
        """What the controller has told the engines."""
        for action in actions:
            if isinstance(action, PublishForecast):
                self._forecasts.pop(action.run_id, None)
                self._forecasts[action.run_id] = action.forecast
                if len(self._forecasts) > self._options.forecasts:
                    self._forecasts.popitem(last=False)
            elif isinstance(action, RetireRun):
                self._forecasts.pop(action.run_id, None)

    def reported(self, replica: str, epoch: str, numbers: Mapping[str, float]) -> None:
        """What an engine says of itself: its `state` (core.health.Following), sizes of its pools in tokens
        (`device_pool`, `device_free`, `device_retired`, and the same of `host_`), and TOTALS."""
        # The first word of a replica may tell of hours before this controller: nothing of it is new.
        before_epoch, before = self._numbers.pop(replica, (epoch, numbers))
        for name in TOTALS:
            if name in numbers:
                start = before.get(name, 0.0) if before_epoch == epoch else 0.0
                self._totals[name] += int(max(0.0, numbers[name] - start))
                self._reported.add(name)
        self._numbers[replica] = epoch, dict(numbers)
        if len(self._numbers) > self._options.replicas:
            self._numbers.popitem(last=False)

    def tick(self, now_s: float) -> None:
        """Takes a sample if one is due."""
        if self._samples and now_s - self._samples[-1][0] < self._options.sample_s:
            return
        counts = self._controller.counts
        self._samples.append((now_s, Counter({**{name: counts[name] for name in _CALLS}, **self._totals})))

    def snapshot(self, now_s: float, limit: int) -> Json:
        """JSON. `runs.rows` holds the `limit` runs that started first: the ones that a list in this order keeps in
        place while others come and go. Everything else is of all runs."""
        runs = self._controller.runs
        rows = [self._row(run) for run in nsmallest(limit, runs, key=lambda run: (run.started_s, run.run_id))]
        states: Counter[str] = Counter()
        workflows: Counter[str] = Counter()
        for run in runs:
            states[state_of(run)] += 1
            workflows[run.workflow] += 1
        return {
            "at_s": now_s,
            "runs": {
                "active": len(runs),
                "states": dict(states),
                "workflows": dict(workflows.most_common(32)),
                "rows": rows,
            },
            "replicas": [
                self._replica(name, known)
                for name, known in islice(sorted(self._controller.replicas.items()), self._options.replicas)
            ],
            "rates": self._rates(),
        }

    def _row(self, run: Run) -> Json:
        totals = run.totals
        return {
            "run_id": run.run_id,
            "workflow": run.workflow,
            "state": state_of(run),
            "now": list(dict.fromkeys(agent for agent, _ in (*run.calls.values(), *run.entered)))[:4],
            "waiting_for": run.waiting_for,
            "path": list(islice(reversed(run.history), self._options.path))[::-1],
            "calls": totals.calls + len(run.calls),
            "forecast": self._likely(run.run_id),
            "home": run.home,
            "started_s": run.started_s,
            "seen_s": run.seen_s,
            "prompt_tokens": totals.prompt_tokens,
            "device_cached_tokens": totals.device_cached_tokens,
            "host_cached_tokens": totals.host_cached_tokens,
        }

    def _likely(self, run_id: str) -> Likely | None:
        """[steps][likely] of (agent, P(the run makes that call, by that agent)), END with P(it has ended by then);
        None without a forecast."""
        forecast = self._forecasts.get(run_id)
        if forecast is None:
            return None
        steps: Likely = []
        for mass in forecast.mass()[: self._options.steps]:
            shares = [*zip(forecast.agents, mass.tolist(), strict=True), ("END", max(0.0, 1.0 - float(mass.sum())))]
            best = nlargest(self._options.likely, shares, key=lambda share: share[1])
            steps.append([(agent, round(share, 3)) for agent, share in best if share >= 0.005])
        return steps

    def _replica(self, name: str, known: Replica) -> Json:
        epoch, numbers = self._numbers.get(name, ("", {}))
        if epoch != known.epoch:
            numbers = {}
        state = numbers.get("state")
        return {
            "replica": name,
            "state": None if state is None else Following(int(state)).name,
            "seen_s": known.seen_s,
            "runs": len(known.tokens),
            "queued_prefill_tokens": known.queued_prefill_tokens,
            "device": self._pool(known, numbers, 0, "device"),
            "host": self._pool(known, numbers, 1, "host"),
        }

    def _pool(self, known: Replica, numbers: Mapping[str, float], tier: int, name: str) -> Json | None:
        """A tier in tokens: pool = free + retired + used; `pieces` are the runs with most of what is used. Nodes
        that several runs share count for each of them in reports, so shares are scaled to what is used."""
        pool = int(numbers.get(f"{name}_pool", 0))
        if pool <= 0:
            return None
        free = min(pool, int(numbers.get(f"{name}_free", 0)))
        retired = min(pool - free, int(numbers.get(f"{name}_retired", 0)))
        used = pool - free - retired
        held = sum(tokens[tier] for tokens in known.tokens.values())
        scale = min(1.0, used / held) if held else 0.0
        top = nlargest(self._options.pieces, known.tokens.items(), key=lambda item: (item[1][tier], item[0]))
        pieces = [(run, int(tokens[tier] * scale)) for run, tokens in top if tokens[tier]]
        return {"pool": pool, "free": free, "retired": retired, "used": used, "pieces": pieces}

    def _rates(self) -> Json:
        """What happened between two samples each, in tokens; None where no engine reports it."""
        samples = list(self._samples)
        known = [*_CALLS, *(name for name in TOTALS if name in self._reported)]
        of: Json = {name: None for name in TOTALS}
        for name in known:
            of[name] = [after[name] - before[name] for (_, before), (_, after) in pairwise(samples)]
        return {"at_s": [at_s for at_s, _ in samples[1:]], "every_s": self._options.sample_s, **of}


def state_of(run: Run) -> str:
    """calling: the LLM; human or tool: waits for one; thinking: in an agent, between calls; idle: none of these."""
    if run.calls:
        return "calling"
    if run.waiting_for is not None:
        return "human" if run.waiting_for == INTERRUPT else "tool"
    return "thinking" if run.entered else "idle"
