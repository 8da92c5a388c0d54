"""What runs did, call by call, as records to keep: what training reads. Pure: events in, ended runs out.

Events of a call come from the runner and from the engine, in any order; an ended run waits a moment for the engine's.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from math import inf

from pbkv_ray.core.events import (
    CallFinished,
    CallStarted,
    CallState,
    Event,
    Outcome,
    RunEnded,
    RunStarted,
    Tick,
)


@dataclass(frozen=True, slots=True)
class JournalOptions:
    settle_s: float = 2.0  # an ended run waits so long for what is late, from the Tick after its end
    silent_s: float = 3_600.0  # a run without events for so long is left out
    max_runs: int = 4_096  # open ones, and as many ended ones that nobody has taken
    max_calls: int = 512  # of a run
    max_state_bytes: int = 256 << 20  # of all open runs
    max_early: int = 1_024  # states of calls that have not been heard of


@dataclass(slots=True)
class RecordedCall:
    """`started_s` is on the runner's clock. prefill, decode: hidden states, float16; blocks: hashes of the prompt's
    full blocks, int64; all little-endian bytes, None where the engine reported none."""

    call_id: str
    agent: str
    step: int
    started_s: float
    seconds: float = 0.0
    reason: str = ""  # empty: it has not finished
    prompt_tokens: int = 0
    output_tokens: int = 0
    device_cached_tokens: int = 0
    host_cached_tokens: int = 0
    replica: str = ""
    prefill: bytes | None = None
    decode: bytes | None = None
    blocks: bytes | None = None

    def size(self) -> int:
        return sum(len(part) for part in (self.prefill, self.decode, self.blocks) if part is not None)


@dataclass(slots=True)
class RecordedRun:
    """Calls in the order of their starts."""

    run_id: str
    workflow: str
    started_s: float
    ended_s: float = 0.0
    outcome: Outcome = "expired"
    calls: list[RecordedCall] = field(default_factory=list)


@dataclass(slots=True)
class _Open:
    run: RecordedRun
    heard_s: float = inf  # the Tick after its last event; inf: it has not come
    whole: bool = False  # heard from its start on
    ended: bool = False


class Journal:
    """`counts`: what was dropped. Time is that of the last Tick.

    An event counts as heard at the Tick after it, not at the one before: before the first Tick there is none, and one
    that comes late (a busy machine) would make all that came meanwhile look old, with what is still on its way.
    """

    def __init__(self, options: JournalOptions | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._options = options or JournalOptions()
        self._open: OrderedDict[str, _Open] = OrderedDict()  # longest silent first
        self._calls: dict[str, RecordedCall] = {}
        self._early: OrderedDict[str, dict[str, CallState]] = OrderedDict()  # call -> signal -> the last one
        self._bytes = 0
        self._now_s = 0.0

    def note(self, event: Event) -> None:
        match event:
            case RunStarted():
                first = event.run_id not in self._open
                known = self._touch(event.run_id, event.at_s)
                known.whole = known.whole or (first and not event.again)
                known.run.workflow = event.workflow
            case CallStarted():
                self._started(event)
            case CallFinished():
                self._finished(event)
            case CallState():
                self._state(event)
            case RunEnded():
                known = self._touch(event.run_id, event.at_s)
                known.ended = True
                known.run.ended_s, known.run.outcome = event.at_s, event.outcome
            case Tick():
                self._now_s = event.at_s
                for known in reversed(self._open.values()):
                    if known.heard_s != inf:
                        break
                    known.heard_s = event.at_s

    def take(self) -> list[RecordedRun]:
        """The runs that ended long enough ago, if they made a call. What is silent for too long is left out, and so is
        a run whose beginning was not heard (a controller that restarted, a run that was too many)."""
        taken: list[RecordedRun] = []
        for run_id, known in list(self._open.items()):
            silent_s = self._now_s - known.heard_s
            if silent_s < min(self._options.settle_s, self._options.silent_s):
                break  # the order is that of the last event
            if known.ended and silent_s >= self._options.settle_s:
                if known.run.calls and known.whole:
                    taken.append(known.run)
                elif known.run.calls:
                    self.counts["runs_left_out"] += 1
            elif silent_s >= self._options.silent_s:
                self.counts["runs_left_out"] += 1
            else:
                continue
            self._close(run_id)
        return taken

    def __len__(self) -> int:
        return len(self._open)

    def _touch(self, run_id: str, at_s: float) -> _Open:
        known = self._open.get(run_id)
        if known is None:
            known = self._open[run_id] = _Open(RecordedRun(run_id, "", at_s))
            while len(self._open) > self._options.max_runs:
                self.counts["runs_left_out"] += 1
                self._close(next(iter(self._open)))
        known.heard_s = inf
        self._open.move_to_end(run_id)
        return known

    def _close(self, run_id: str) -> None:
        for call in self._open.pop(run_id).run.calls:
            self._calls.pop(call.call_id, None)
            self._bytes -= call.size()

    def _started(self, event: CallStarted) -> None:
        run = self._touch(event.run_id, event.at_s).run
        if len(run.calls) >= self._options.max_calls or event.call_id in self._calls:
            self.counts["calls_left_out"] += 1
            return
        call = RecordedCall(event.call_id, event.agent, event.step, event.at_s)
        run.calls.append(call)
        self._calls[event.call_id] = call
        for state in self._early.pop(event.call_id, {}).values():
            self._state(state)

    def _finished(self, event: CallFinished) -> None:
        self._touch(event.run_id, event.at_s)
        call = self._calls.get(event.call_id)
        if call is None:
            return
        call.seconds, call.reason, call.replica = event.seconds, event.reason, event.replica
        call.prompt_tokens, call.output_tokens = event.prompt_tokens, event.output_tokens
        call.device_cached_tokens, call.host_cached_tokens = event.device_cached_tokens, event.host_cached_tokens

    def _state(self, event: CallState) -> None:
        call = self._calls.get(event.call_id)
        if call is None:
            self._early.setdefault(event.call_id, {})[event.signal] = event
            while len(self._early) > self._options.max_early:
                _, states = self._early.popitem(last=False)
                self.counts["states_left_out"] += len(states)
            return
        vector = event.vector.astype("<f2").tobytes()
        blocks = b"" if event.blocks is None else event.blocks.astype("<i8").tobytes()
        if self._bytes + len(vector) + len(blocks) > self._options.max_state_bytes:
            self.counts["states_left_out"] += 1
            return
        self._bytes -= call.size()
        if event.signal == "prefill":
            call.prefill = vector
            call.blocks = None if event.blocks is None else blocks
        else:
            call.decode = vector
        self._bytes += call.size()
