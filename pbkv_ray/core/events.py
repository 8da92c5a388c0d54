"""What happened, as data. Shells make events; `core.controller.Controller.handle` takes them.

`at_s` is seconds since the epoch on the clock of the process that saw the event. Agents travel by name.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from pbkv_ray.core.calls import CacheReport
from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.wire import Record

Outcome = Literal["completed", "failed", "cancelled", "interrupted", "expired"]


@dataclass(frozen=True, slots=True)
class RunStarted(Record):
    """`agents` and `edges` are the LangGraph graph's own, the forecast's prior; empty for foreign harnesses.

    Runners repeat the event while a run lives: it starts the lease anew, and tells a restarted controller. `again`
    then, since what was before is not said again.
    """

    run_id: str
    workflow: str
    at_s: float
    agents: tuple[str, ...] = ()
    edges: tuple[tuple[str, str], ...] = ()
    parent_run_id: str | None = None
    again: bool = False


@dataclass(frozen=True, slots=True)
class AgentEntered(Record):
    run_id: str
    agent: str
    step: int
    at_s: float


@dataclass(frozen=True, slots=True)
class AgentLeft(Record):
    run_id: str
    agent: str
    step: int
    at_s: float


@dataclass(frozen=True, slots=True)
class ToolWaiting(Record):
    """The run left the LLM for a graph node that calls none, a tool, or a human (`name` says which)."""

    run_id: str
    name: str
    step: int
    at_s: float


@dataclass(frozen=True, slots=True)
class CallStarted(Record):
    run_id: str
    agent: str
    step: int
    call_id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class CallFinished(Record):
    run_id: str
    agent: str
    step: int
    call_id: str
    at_s: float
    reason: Literal["stop", "length", "abort", "error"]
    prompt_tokens: int = 0
    output_tokens: int = 0
    device_cached_tokens: int = 0
    host_cached_tokens: int = 0
    seconds: float = 0.0
    replica: str = ""
    report: CacheReport | None = None  # for the record of the run; it does not travel to the controller
    first_token_s: float = 0.0  # seconds until its first token, waiting included; 0: not known


@dataclass(frozen=True, slots=True, eq=False)
class CallState(Record):
    """What the engine held inside a call: the hidden state (core.states.compact) of its last prefill token ("prefill")
    or of its last decoded one ("decode"). With "prefill" also `blocks`: prefix-chained hashes of the prompt's full
    blocks (core.ghost.block_hashes)."""

    call_id: str
    signal: Literal["prefill", "decode"]
    vector: npt.NDArray[np.float16]
    blocks: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Reforecast(Record):
    """A better forecast than the one at the start of the call, made off the loop; `calls`: how many the run had made
    then, `answered`: whether it knows how long the answer was. One that comes after the run's next call is too late,
    and so is one that does not know the answer once it is there."""

    run_id: str
    calls: int
    forecast: Forecast
    at_s: float
    answered: bool = False


@dataclass(frozen=True, slots=True)
class RunEnded(Record):
    run_id: str
    outcome: Outcome
    at_s: float


@dataclass(frozen=True, slots=True)
class ReplicaJoined(Record):
    """`epoch` is new at every engine start: an engine that came back is empty."""

    replica: str
    epoch: str
    at_s: float


@dataclass(frozen=True, slots=True)
class ReplicaLeft(Record):
    replica: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Residency(Record):
    """Tokens that a replica holds: run -> (device tokens, host tokens). A whole report, not a difference."""

    replica: str
    epoch: str
    at_s: float
    tokens: dict[str, tuple[int, int]] = field(default_factory=dict)
    queued_prefill_tokens: int = 0
    prefill_tokens_s: float = 0.0  # rates as measured; 0: not yet
    load_tokens_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Tick(Record):
    at_s: float


Event = (
    RunStarted
    | AgentEntered
    | AgentLeft
    | ToolWaiting
    | CallStarted
    | CallFinished
    | CallState
    | Reforecast
    | RunEnded
    | ReplicaJoined
    | ReplicaLeft
    | Residency
    | Tick
)


@dataclass(frozen=True, slots=True)
class Batch(Record):
    """Events of one source in order. `sequence` numbers the first one; duplicates and gaps are harmless."""

    source: str
    sequence: int
    events: tuple[Event, ...]
    dropped: int = 0
