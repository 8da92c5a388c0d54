"""Settings: one frozen dataclass a layer, checked when made. Units are in the names."""

from dataclasses import dataclass, field

from pbkv_ray.errors import ConfigError

POLICIES = ("lru", "session", "kvflow", "lae", "he", "pbkv", "pbkv+", "oracle")
SERVED_POLICIES = tuple(name for name in POLICIES if name != "oracle")  # that one needs the future of a trace
SHADOWS = ("off", "watch", "guard")


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value <= 0:
            raise ConfigError(f"{type(owner).__name__}.{name} is {value}; it must be above zero")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """One SGLang engine. Zero pool sizes let SGLang choose (GPU only); on a CPU they must be given."""

    model: str
    policy: str = "lru"
    device_pool_tokens: int = 32_768
    host_pool_ratio: float = 2.0  # below 2 a write_through host tier only mirrors the device (reference/sglang.md)
    write_policy: str = "write_through"
    page_size: int = 1
    context_length: int = 8_192
    tensor_parallel: int = 1
    max_running_requests: int = 16
    chunked_prefill_tokens: int = 2_048
    dtype: str = "auto"
    random_seed: int = 0
    shadow: str = "guard"  # policies of ours: what LRU would hit, and LRU instead of a policy that loses against it
    hidden_states: bool = False  # two vectors a call go to the controller; needs a policy of ours, not lru or session
    extra: dict[str, object] = field(default_factory=dict)  # passed to sglang.Engine as they are

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy {self.policy!r} is unknown; known are {', '.join(POLICIES)}")
        if self.shadow not in SHADOWS:
            raise ConfigError(f"shadow {self.shadow!r} is unknown; known are {', '.join(SHADOWS)}")
        if self.write_policy not in ("write_through", "write_through_selective", "write_back"):
            raise ConfigError(f"write_policy {self.write_policy!r} is none of SGLang's HiCache policies")
        _positive(self, "page_size", "context_length", "tensor_parallel", "max_running_requests")


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Bounds and times of the controller. Leases end runs whose client vanished (paper, weakness 12)."""

    horizon: int = 10  # steps forecast; the paper's score reads the first three
    lease_s: float = 600.0  # a run that is silent for so long is taken for dead
    ended_memory_s: float = 600.0  # late events of an ended run are recognised for so long
    max_runs: int = 20_000
    max_agents_per_run: int = 64
    max_history: int = 512  # agents kept of a run's path
    max_id_length: int = 256
    max_learned_per_s: int = 200  # calls that the predictor learns from
    predictor_models: str = ""  # folder of model folders (`pbkv train --out`); empty: counts alone
    record_to: str = ""  # SQLAlchemy URL of the store that keeps every run's calls; empty: nothing is recorded

    def __post_init__(self) -> None:
        _positive(self, *(name for name in self.__slots__ if not isinstance(getattr(self, name), str)))


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Bounds and times of a runner, the process that executes LangGraph graphs."""

    max_running: int = 64  # runs executed at a time by this runner
    max_pending: int = 1_000  # runs that may wait, over all runners of the store
    max_attempts: int = 3  # runners that may try a run before it is given up
    lease_s: float = 15.0  # a runner silent for so long loses its runs; clocks of all runners must agree well within
    poll_s: float = 0.5  # how often other runners' requests and orphans are looked for
    run_timeout_s: float = 3_600.0
    stop_timeout_s: float = 10.0  # how long a stopped run may take to let go
    max_steps: int = 1_000  # the highest recursion_limit that a request may ask for
    max_event_bytes: int = 4_194_304
    max_calls_per_run: int = 4_096  # kept in the record; later ones are counted only
    retention_s: float = 30 * 86_400.0  # ended runs and idle threads are deleted so long after
    prune_every_s: float = 3_600.0

    def __post_init__(self) -> None:
        _positive(self, *self.__slots__)
        if self.poll_s > self.lease_s / 3:
            raise ConfigError(f"poll_s {self.poll_s} is above a third of lease_s {self.lease_s}; leases would expire")
