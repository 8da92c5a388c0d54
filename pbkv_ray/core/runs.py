"""The run table: what the controller knows of every run in flight, bounded, with leases.

Theory of operation. A run is *active* from its first event until RunEnded or until its lease runs out; any event of
it starts the lease anew. An ended run is remembered for a while, so that late events (a call that finishes after the
run was cancelled) neither resurrect it nor count as errors. A run that is not known and whose event is not
RunStarted is adopted without a workflow: after a restart of the controller the next RunStarted (runners repeat it
while the run lives) fills the rest in.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from pbkv_ray.config import ControllerOptions
from pbkv_ray.core.events import Outcome
from pbkv_ray.core.forecast import Forecast

ANSWERS = 10  # calls of a run of which it is remembered how long the answer was


@dataclass(slots=True)
class Totals:
    """Sums over a run's finished calls, in tokens and seconds."""

    calls: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    device_cached_tokens: int = 0
    host_cached_tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Run:
    """`history` is the path so far, one agent a call; `calls` maps the calls in flight to (agent, step). `answers`:
    output tokens of the last calls of `history`, None where they are not known."""

    run_id: str
    started_s: float
    seen_s: float
    history: deque[str]
    workflow: str = ""
    agents: tuple[str, ...] = ()
    edges: tuple[tuple[str, str], ...] = ()
    parent_run_id: str | None = None
    entered: list[tuple[str, int]] = field(default_factory=list)
    calls: dict[str, tuple[str, int]] = field(default_factory=dict)
    waiting_for: str | None = None
    answers: deque[int | None] = field(default_factory=lambda: deque(maxlen=ANSWERS))
    called_s: float | None = None  # when the last call started
    home: str | None = None
    version: int = 0
    begun: Forecast | None = None  # what was expected when the newest call began
    newest: str = ""  # the id of that call
    totals: Totals = field(default_factory=Totals)


class RunTable:
    """Active runs, least recently seen first, and the ended ones that are still remembered."""

    def __init__(self, options: ControllerOptions) -> None:
        self._options = options
        self._active: OrderedDict[str, Run] = OrderedDict()
        self._ended: OrderedDict[str, tuple[Outcome, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._active)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._active.values())

    def get(self, run_id: str) -> Run | None:
        return self._active.get(run_id)

    def outcome(self, run_id: str) -> Outcome | None:
        """How a remembered run ended."""
        ended = self._ended.get(run_id)
        return None if ended is None else ended[0]

    def ended_s(self, run_id: str) -> float | None:
        """When a remembered run ended."""
        ended = self._ended.get(run_id)
        return None if ended is None else ended[1]

    def touch(self, run_id: str, at_s: float) -> Run:
        """The active run, adopted if unknown; its lease starts anew. The caller has ruled out ended runs."""
        run = self._active.get(run_id)
        if run is None:
            run = Run(run_id, at_s, at_s, deque(maxlen=self._options.max_history))
            self._active[run_id] = run
        run.seen_s = max(run.seen_s, at_s)
        self._active.move_to_end(run_id)
        return run

    def end(self, run_id: str, outcome: Outcome, at_s: float) -> Run | None:
        """Remember the end, known run or not; the run if it was active."""
        if run_id in self._ended:
            return None
        self._ended[run_id] = outcome, at_s
        while len(self._ended) > self._options.max_runs:
            self._ended.popitem(last=False)
        return self._active.pop(run_id, None)

    def overflow(self) -> Iterator[Run]:
        """The runs that are too many, longest silent first."""
        excess = max(0, len(self._active) - self._options.max_runs)
        return iter(list(islice(self._active.values(), excess)))  # a copy: the caller ends them

    def expired(self, now_s: float) -> list[Run]:
        """Active runs whose lease has run out, longest silent first."""
        limit_s = now_s - self._options.lease_s
        found = []
        for run in self._active.values():
            if run.seen_s > limit_s:
                break  # the order is that of the last event, up to small skews between sources
            found.append(run)
        return found

    def forget(self, now_s: float) -> None:
        """Drop ended runs that are past their memory."""
        limit_s = now_s - self._options.ended_memory_s
        while self._ended:
            run_id, (_, at_s) = next(iter(self._ended.items()))
            if at_s > limit_s:
                return
            del self._ended[run_id]
