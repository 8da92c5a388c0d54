"""Which replica takes a call: what each one would cost, in seconds, with every term kept.

    cost = compute + load + queue + crowd

compute  prompt tokens that the replica has in no tier, over its prefill rate
load     prompt tokens that it has in its host tier only, over its load rate
queue    prompt tokens that wait there already, over its prefill rate
crowd    what the runs at home there are expected to send next, times the chance that it comes first

A run stays at home unless another replica is cheaper by a margin: a move computes the context anew, and the estimate
is rough. Pure functions of their arguments; `core.routes` keeps the state.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pbkv_ray.core.wire import Record
from pbkv_ray.errors import ConfigError

Reason = Literal["home", "family", "placed", "moved", "left", "drained"]


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """prefill_tokens_s, load_tokens_s: of a replica that has not told its own.

    move_s, move_share: a move must save so many seconds, and so large a share of what staying costs.
    crowd: chance that a run at home calls while a new call waits; it spreads runs while all queues are empty.
    max_runs, max_replicas: bounds of the tables.
    """

    prefill_tokens_s: float = 4_000.0
    load_tokens_s: float = 100_000.0
    move_s: float = 0.1
    move_share: float = 0.2
    crowd: float = 0.25
    max_runs: int = 20_000
    max_replicas: int = 1_024

    def __post_init__(self) -> None:
        if min(self.prefill_tokens_s, self.load_tokens_s, self.max_runs, self.max_replicas) <= 0:
            raise ConfigError(f"{self}: rates and bounds must be above zero")
        if min(self.move_s, self.move_share, self.crowd) < 0:
            raise ConfigError(f"{self}: move_s, move_share and crowd must not be negative")


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What is known of a replica now. Tokens are prompt tokens that must be computed; a rate of 0 is not known.

    expected_tokens: sum over the runs at home of what the next call of each will bring.
    """

    queued_tokens: float = 0.0
    expected_tokens: float = 0.0
    prefill_tokens_s: float = 0.0
    load_tokens_s: float = 0.0
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Held(Record):
    """Tokens of a run's context that a replica holds."""

    device: int = 0
    host: int = 0


NOTHING = Held()


@dataclass(frozen=True, slots=True)
class CallSize:
    """Tokens. fresh: what the run's calls bring anew each time, whatever is cached; it is part of `prompt`."""

    prompt: int
    fresh: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one replica, in seconds."""

    replica: str
    compute_s: float
    load_s: float
    queue_s: float
    crowd_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.load_s + self.queue_s + self.crowd_s


@dataclass(frozen=True, slots=True)
class Decision:
    """`costs` has every replica, cheapest first. tokens: what the chosen one will have to compute.

    reason: "home" it stays; "family" it follows the runs of its family; "placed" a new run; "moved" home was too
    dear; "left" home is gone; "drained" home takes no more.
    """

    replica: str
    reason: Reason
    tokens: int
    costs: tuple[Cost, ...]


def cost_of(
    replica: str, size: CallSize, held: Held, facts: ReplicaFacts, options: RoutingOptions, own_tokens: float = 0.0
) -> Cost:
    """own_tokens: the part of `facts.expected_tokens` that is the calling run's own."""
    rate = facts.prefill_tokens_s or options.prefill_tokens_s
    compute = to_compute(size, held)
    load = max(0, min(held.host, size.prompt - held.device - compute))
    crowd = max(0.0, facts.expected_tokens - own_tokens)
    return Cost(
        replica,
        compute / rate,
        load / (facts.load_tokens_s or options.load_tokens_s),
        facts.queued_tokens / rate,
        options.crowd * crowd / rate,
    )


def to_compute(size: CallSize, held: Held) -> int:
    """Tokens, at least one: the first output token needs it."""
    return max(1, min(size.fresh, size.prompt), size.prompt - held.device - held.host)


def decide(
    size: CallSize,
    replicas: Mapping[str, ReplicaFacts],
    held: Mapping[str, Held],
    options: RoutingOptions,
    *,
    home: str | None = None,
    family: str | None = None,
    own_tokens: float = 0.0,
) -> Decision | None:
    """The replica for one call; None when there is none. Ties go to the lower id.

    home: where the run's calls went so far. family: where those of its parent and siblings went, for a run without a
    home. A draining replica keeps nothing and gets nothing, unless all of them drain.
    """
    if not replicas:
        return None
    costs = sorted(
        (
            cost_of(name, size, held.get(name, NOTHING), facts, options, own_tokens if name == home else 0.0)
            for name, facts in replicas.items()
        ),
        key=lambda cost: (cost.total_s, cost.replica),
    )
    best = next((cost for cost in costs if not replicas[cost.replica].draining), costs[0])
    anchor = home or family
    stay = next((cost for cost in costs if cost.replica == anchor), None)
    reason: Reason
    if stay is None:
        chosen, reason = best, "placed" if home is None else "left"
    elif replicas[stay.replica].draining and best is not stay and not replicas[best.replica].draining:
        chosen, reason = best, "drained"
    elif stay.total_s - best.total_s > max(options.move_s, options.move_share * stay.total_s):
        chosen, reason = best, "moved" if home else "placed"
    else:
        chosen, reason = stay, "home" if home else "family"
    return Decision(chosen.replica, reason, to_compute(size, held.get(chosen.replica, NOTHING)), tuple(costs))
