"""One replay of one trace: which policies, on which pools, in which mode, as JSON."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from pbkv_ray.core.admission import Admission, AdmissionOptions
from pbkv_ray.core.forecast import Predictor
from pbkv_ray.core.scores import PaperScore, Score
from pbkv_ray.errors import ConfigError
from pbkv_ray.predict.counts import VariableOrderCounts
from pbkv_ray.replay.arrivals import Arrivals, ToolWaits
from pbkv_ray.replay.cost import Cost
from pbkv_ray.replay.driver import Driver, StockDriver
from pbkv_ray.replay.forecasts import Forecasts
from pbkv_ray.replay.hits import Hits, replay_belady, replay_order
from pbkv_ray.replay.keys import Keys, Outputs
from pbkv_ray.replay.order import OrderedCall, fixed_order
from pbkv_ray.replay.outcome import Outcome, Scheduler
from pbkv_ray.replay.owned import Memo, OwnedDriver
from pbkv_ray.replay.policies import BOUND, STOCK, Choice
from pbkv_ray.replay.simulate import Simulation
from pbkv_ray.replay.tree import TreeOptions
from pbkv_ray.replay.workload import BLOCK_TOKENS, Workload

Mode = Literal["fixed", "loop", "both"]
Json = dict[str, Any]
LIMITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True, slots=True)
class Setup:
    """What all policies of a replay share.

    train:  runs that the predictor, the waits and the learned reuse have seen before; None starts with nothing.
    host_ratio: host pool relative to the device pool; 0: no host tier.
    """

    workload: Workload
    concurrency: int
    train: Workload | None = None
    unit_tokens: int = BLOCK_TOKENS
    outputs: Outputs = "private"
    known_only: bool = False
    host_ratio: float = 0.0
    write_policy: str = "write_through"
    cost: Cost | None = None
    scheduler: Scheduler = field(default_factory=Scheduler)
    arrivals: Arrivals = field(default_factory=Arrivals)
    waits: ToolWaits = field(default_factory=ToolWaits)
    seed: int = 0
    noise: float = 0.0
    steps: int = 3  # the paper's K and gamma: scores of `he` and `pbkv`
    gamma: float = 0.7
    rho: float = 0.0  # share of the pool that a prefetch may take from active nodes (paper, appendix E)
    predictor: str = "counts"  # of replay.predictors
    shadow: str = "off"  # config.SHADOWS: our policies beside the shadow of LRU, or under its guard
    make_predictor: Callable[[], Predictor] = VariableOrderCounts
    score: Callable[[], Score] | None = None  # experiments: instead of every policy's own
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)
    memo: Memo = field(default_factory=Memo)

    def capacity(self, fraction: float) -> int:
        """Device units of a pool that is `fraction` of the live footprint."""
        units = self.workload.pool_tokens(fraction, self.concurrency) // self.unit_tokens
        if units < 1:
            raise ConfigError(f"a pool fraction of {fraction} leaves no room for one block; raise it")
        return units

    def keys(self, workload: Workload) -> Keys:
        return Keys(workload, self.unit_tokens, self.outputs, self.known_only)

    def order(self, workload: Workload) -> list[OrderedCall]:
        return fixed_order(workload, self.concurrency, self.seed + 1)


def make_driver(policy: str, capacity: int, setup: Setup, times: dict[str, list[float]] | None = None) -> Driver:
    """A fresh cache of `capacity` units under `policy`, trained as the setup says.

    times: run -> call times at a fixed order; the oracle then knows those too, and forecasts are shared.
    """
    longest = max(
        run.calls[i].prompt_tokens + run.calls[i].output_tokens
        for run in setup.workload.runs
        for i in range(len(run.calls))
    )
    base = TreeOptions(
        capacity,
        host_units=int(capacity * setup.host_ratio),
        write_policy=setup.write_policy,
        max_requests=setup.scheduler.max_running + 8,
        max_context_units=longest // setup.unit_tokens + 16,
    )
    if policy in STOCK:
        return StockDriver(policy, base, setup.unit_tokens)
    knows = policy == "oracle"
    memo = setup.memo if times is not None and not knows else None
    known = memo.forecasts if memo is not None else None
    forecasts = Forecasts(
        setup.make_predictor(),
        agents={run.run_id: run.agents for run in setup.workload.runs} if knows else None,
        future=times,
        noise=setup.noise,
        made=known or None,
        keep=None if known else known,
    )
    driver = OwnedDriver(
        policy,
        base,
        setup.unit_tokens,
        forecasts=forecasts,
        memo=memo,
        score=_score(policy, setup),
        switches={"aggressive_share": setup.rho, "shadow": setup.shadow},
    )
    if setup.train is not None:
        driver.learn(setup.train, setup.order(setup.train), setup.keys(setup.train))
    return driver


def _score(policy: str, setup: Setup) -> Score | None:
    if setup.score is not None:
        return setup.score()
    return PaperScore(setup.steps, setup.gamma) if policy in ("he", "pbkv") else None


def fixed(policy: str, fraction: float, setup: Setup) -> Hits:
    """Hits of one policy, or of Belady's bound, at the fixed order of calls."""
    workload, capacity = setup.workload, setup.capacity(fraction)
    order, keys = setup.order(workload), setup.keys(workload)
    if policy == BOUND:
        return replay_belady(workload, order, keys, capacity)
    shared = (setup.concurrency, setup.seed, setup.unit_tokens, setup.known_only, setup.predictor)
    belongs = (id(workload), id(setup.train), *shared)
    if setup.memo.order != belongs:
        setup.memo.order, setup.memo.learned = belongs, None
        setup.memo.forecasts.clear()
    times: dict[str, list[float]] = {}
    for item in order:
        times.setdefault(workload.runs[item.run].run_id, []).append(item.at_s)
    return replay_order(workload, order, keys, make_driver(policy, capacity, setup, times), capacity)


def loop(policy: str, fraction: float, setup: Setup, limit: int | Literal["auto"] | None) -> Outcome:
    """One policy in the closed or open loop; limit "auto" is core.admission's."""
    if setup.cost is None:
        raise ConfigError("a replay with timing needs a cost model; give --cost MODEL/GPU")
    capacity = setup.capacity(fraction)
    bound = None if limit == "auto" else limit
    scheduler = replace(setup.scheduler, concurrency=setup.concurrency, limit=bound)
    return Simulation(
        setup.workload,
        setup.keys(setup.workload),
        make_driver(policy, capacity, setup),
        setup.cost,
        capacity,
        scheduler,
        setup.arrivals,
        setup.waits,
        setup.seed,
        _admission(capacity, setup) if limit == "auto" else None,
    ).run()


def _admission(capacity: int, setup: Setup) -> Admission:
    rule = Admission(capacity * setup.unit_tokens, setup.admission)
    for run in setup.train.runs if setup.train else ():
        rule.ended(run.footprint_tokens, len(run.calls), run.prompt_tokens)
    return rule


def best_limit(policy: str, fraction: float, setup: Setup) -> tuple[int, Outcome]:
    """The limit with the least mean completion time: a climb from the number of runs whose footprint fits."""
    limits = [n for n in LIMITS if n < setup.concurrency] + [setup.concurrency]
    seen: dict[int, Outcome] = {}

    def value(i: int) -> float:
        if limits[i] not in seen:
            seen[limits[i]] = loop(policy, fraction, setup, limits[i])
        return float(np.mean(completions(seen[limits[i]])))

    fits = max(1, int(fraction * setup.concurrency))
    at = min(range(len(limits)), key=lambda i: abs(limits[i] - fits))
    for step in (1, -1):
        while 0 <= at + step < len(limits) and value(at + step) < value(at):
            at += step
    return limits[at], seen[limits[at]]


def completions(outcome: Outcome) -> list[float]:
    """Seconds from the submission of each run to its end, waits for admission included."""
    return [times.ended_s - times.submitted_s for times in outcome.runs.values()]


def spread(values: Sequence[float]) -> Json:
    if not values:
        return {"mean": None, "p50": None, "p99": None}
    p50, p99 = np.percentile(values, [50, 99])
    return {"mean": round(float(np.mean(values)), 4), "p50": round(float(p50), 4), "p99": round(float(p99), 4)}


def hits_json(hits: Hits) -> Json:
    return {
        "device_hit": round(hits.device_hit, 5),
        "host_hit": round(hits.host_hit, 5),
        "recomputed_tokens": hits.recomputed,
        "evicted_tokens": hits.evicted,
        "refused_calls": hits.refused_calls,
        "agent_hit": {a: round(d / max(1, p), 5) for a, (p, d) in sorted(hits.by_agent.items())},
    } | ({"shadow": hits.overseen} if hits.overseen else {})


def outcome_json(outcome: Outcome) -> Json:
    """As `pbkv bench policies` reports, in simulated seconds, and what only a simulation can say."""
    times = list(outcome.runs.values())
    sizes = np.array([t.prompt_tokens for t in times])
    lived = np.array([t.ended_s - t.started_s for t in times])
    edges = np.quantile(sizes, [0.25, 0.5, 0.75])
    quarter = np.searchsorted(edges, sizes, side="left")
    return hits_json(outcome.hits) | {
        "run_seconds": spread(lived.tolist()),
        "completion_seconds": spread(completions(outcome)),
        "ttft_seconds": spread(outcome.ttft_s),
        "prefetch": {f"{fate}_tokens": outcome.prefetched.get(fate, 0) for fate in ("useful", "late", "wasted")},
        "wall_seconds": round(outcome.makespan_s, 3),
        "prefill_share": round(outcome.prefill_share, 4),
        "load_wait_seconds": round(outcome.load_s, 3),
        "mean_runs_in_flight": round(outcome.running_s / max(1e-9, outcome.makespan_s), 2),
        "run_seconds_by_size": [
            {"upto_prompt_tokens": int(sizes[quarter == q].max()), "mean": round(float(lived[quarter == q].mean()), 3)}
            for q in range(4)
            if (quarter == q).any()
        ],
    }


def replay(
    choices: Sequence[Choice],
    fractions: Sequence[float],
    setup: Setup,
    mode: Mode,
    progress: Callable[[str], None] = lambda text: None,
) -> Json:
    """The JSON of `pbkv replay`. Hits at the fixed order are under "fixed_order" when there is a loop as well."""
    pools: Json = {}
    for fraction in fractions:
        policies: Json = {}
        bound = fixed(BOUND, fraction, setup) if mode != "loop" else None
        known: dict[str, Json] = {}
        for choice in choices:
            began = time.perf_counter()
            entry: Json = {}
            if bound is not None and choice.limit is None:
                hits = bound if choice.policy == BOUND else fixed(choice.policy, fraction, setup)
                known[choice.name] = hits_json(hits) | {
                    "share_of_belady": round(hits.device_hit / max(1e-12, bound.device_hit), 4)
                }
            if mode == "fixed" or choice.policy == BOUND:
                entry = known.get(choice.name, {})
            else:
                if choice.limit == "best":
                    limit, outcome = best_limit(choice.policy, fraction, setup)
                    entry = outcome_json(outcome) | {"limit": limit}
                else:
                    entry = outcome_json(loop(choice.policy, fraction, setup, choice.limit))
                if choice.name in known:
                    entry["fixed_order"] = known[choice.name]
            entry["cpu_seconds"] = round(time.perf_counter() - began, 2)
            policies[choice.name] = entry
            progress(f"pool {fraction:g}: {choice.name}")
        pools[f"{fraction:g}"] = {"policies": policies, "pool_tokens": setup.capacity(fraction) * setup.unit_tokens}
    workload = setup.workload
    return {
        "pools": pools,
        "setup": {
            "trace": workload.name,
            "runs": len(workload),
            "calls": sum(len(run.calls) for run in workload.runs),
            "prompt_tokens": workload.prompt_tokens,
            "footprint_tokens": round(workload.footprint_tokens),
            "concurrency": setup.concurrency,
            "trained_on_runs": len(setup.train) if setup.train else 0,
            "unit_tokens": setup.unit_tokens,
            "outputs": setup.outputs,
            "host_ratio": setup.host_ratio,
            "write_policy": setup.write_policy,
            "cost": None if setup.cost is None else setup.cost.name,
            "arrivals": setup.arrivals.kind,
            "mode": mode,
            "seed": setup.seed,
            "noise": setup.noise,
            "predictor": setup.predictor,
            "shadow": setup.shadow,
            "K": setup.steps,
            "gamma": setup.gamma,
            "rho": setup.rho,
        },
    }
