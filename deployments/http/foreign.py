"""Runs of foreign harnesses, as far as their calls tell: begun by the first call, ended by a final one or the lease.

Their names get a prefix, so that nobody can speak for, or end, a run of ours. A name that is used again after its
run ended (a session resumed the next day) is a new run: the controller ignores what comes late for an ended one.
"""

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deployments.http.auth import Tenant
from deployments.http.identity import Identity
from deployments.metrics import GatewayMetrics
from pbkv_ray.core.calls import Caller
from pbkv_ray.core.events import (
    AgentEntered,
    AgentLeft,
    CallFinished,
    CallStarted,
    Event,
    RunEnded,
    RunStarted,
)

Json = dict[str, Any]
Emit = Callable[[Event], None]


@dataclass(slots=True)
class _Run:
    """`number` counts the runs of one name; `told_s` is when RunStarted was last said."""

    run_id: str
    number: int
    seen_s: float
    told_s: float = float("-inf")
    steps: int = 0
    open_calls: int = 0
    final: bool = False
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer says it cost; device and host tokens are parts of the prompt."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    device_cached_tokens: int = 0
    host_cached_tokens: int = 0
    replica: str = ""


@dataclass(frozen=True, slots=True)
class ForeignCall:
    """One open call. `caller` is None when the caller named no run; nothing is then emitted."""

    call_id: str
    caller: Caller | None
    started_s: float
    run: _Run | None = None


class ForeignRuns:
    """Knows the `capacity` names that called last; the run of one that is forgotten ends with its lease.

    `lease_s` is the controller's: a run that was silent for longer has ended there. RunStarted is repeated after
    `repeat_s`, for a controller that has restarted.
    """

    def __init__(
        self,
        emit: Emit,
        capacity: int,
        metrics: GatewayMetrics,
        *,
        lease_s: float = 600.0,
        repeat_s: float = 60.0,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._emit = emit
        self._capacity = capacity
        self._metrics = metrics
        self._lease_s = lease_s
        self._repeat_s = repeat_s
        self._clock = clock
        self._new_id = new_id
        self._runs: OrderedDict[str, _Run] = OrderedDict()

    def announce(self) -> None:
        """The controller has restarted: every run says RunStarted again with its next call."""
        for run in self._runs.values():
            run.told_s = float("-inf")

    def begin(self, who: Identity, tenant: Tenant | None) -> ForeignCall:
        now = self._clock()
        call_id = self._new_id()
        if who.run_id is None:
            return ForeignCall(call_id, None, now)
        run = self._run(_prefixed(who.run_id, tenant), now)
        workflow = f"ext:{who.workflow or 'default'}"
        parent = None if who.parent_run_id is None else _prefixed(who.parent_run_id, tenant)
        if now - run.told_s > self._repeat_s:
            run.told_s = now
            self._emit(RunStarted(run.run_id, workflow, now, parent_run_id=parent, again=run.steps > 0))
        caller = Caller(run.run_id, workflow, who.agent or "default", run.steps, parent)
        run.seen_s = now
        run.steps += 1
        run.open_calls += 1
        run.final = run.final or who.final
        self._emit(AgentEntered(run.run_id, caller.agent, caller.step, now))
        self._emit(CallStarted(run.run_id, caller.agent, caller.step, call_id, now))
        return ForeignCall(call_id, caller, now, run)

    def finish(self, call: ForeignCall, reason: str | None, usage: Usage | None = None) -> None:
        """`reason` is OpenAI's finish_reason; "error" and "abort" are ours."""
        caller, run = call.caller, call.run
        if caller is None or run is None:
            return
        now = self._clock()
        told = usage or Usage()
        self._emit(
            CallFinished(
                caller.run_id,
                caller.agent,
                caller.step,
                call.call_id,
                now,
                reason if reason in ("length", "abort", "error") else "stop",  # type: ignore[arg-type]
                told.prompt_tokens,
                told.output_tokens,
                told.device_cached_tokens,
                told.host_cached_tokens,
                now - call.started_s,
                told.replica,
            )
        )
        self._emit(AgentLeft(caller.run_id, caller.agent, caller.step, now))
        run.seen_s = now
        run.open_calls -= 1
        # The last call may overtake its siblings; the run ends when none of them is open.
        if run.final and run.open_calls == 0:
            run.ended = True
            self._emit(RunEnded(run.run_id, "cancelled" if reason == "abort" else "completed", now))

    def _run(self, name: str, now: float) -> _Run:
        """The run that `name` stands for now."""
        run = self._runs.get(name)
        if run is None:
            run = self._runs[name] = _Run(name, 1, now)
        elif run.ended or (run.open_calls == 0 and now - run.seen_s > self._lease_s):
            number = run.number + 1
            run = self._runs[name] = _Run(f"{name}~{number}", number, now)
        self._runs.move_to_end(name)
        self._forget()
        return run

    def _forget(self) -> None:
        while len(self._runs) > self._capacity:
            self._runs.popitem(last=False)
            self._metrics.foreign_forgotten.inc()
        self._metrics.foreign_runs.set(len(self._runs))


def _prefixed(name: str, tenant: Tenant | None) -> str:
    return f"ext:{tenant.label}:{name}" if tenant else f"ext:{name}"


def usage_of(answer: Json) -> Usage | None:
    """The usage of an OpenAI answer or chunk, with SGLang's tiers where it tells them; cached tokens are the
    device's where it does not."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    cached = _count(usage.get("prompt_tokens_details"), "cached_tokens")
    device, host = tiers_of(answer) or (cached, 0)
    return Usage(_count(usage, "prompt_tokens"), _count(usage, "completion_tokens"), device, host)


def tiers_of(answer: Json) -> tuple[int, int] | None:
    """Cached tokens found in the device and in the host tier, which SGLang tells in a field of its own."""
    extension = answer.get("sglext")
    tiers = extension.get("cached_tokens_details") if isinstance(extension, dict) else None
    return (_count(tiers, "device"), _count(tiers, "host")) if isinstance(tiers, dict) else None


def reason_of(answer: Json) -> str | None:
    """The first finish_reason among the choices."""
    choices = answer.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and isinstance(choice.get("finish_reason"), str):
            return str(choice["finish_reason"])
    return None


def _count(fields: object, name: str) -> int:
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
