"""Whether a new run may begin now: `core.admission`'s limit, in service. Never holds back a call of a running run.

What a run holds is taken from its calls: per agent the latest prompt and output, system prompts counted once an agent.
While that fits the pool nobody waits, whatever the limit says. Runs begin in the order in which they came, and one
may always run: none starves.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np

from pbkv_ray.core.admission import Admission, AdmissionOptions
from pbkv_ray.core.events import CallFinished

_LOST = ("evicted", "retired")  # causes of misses: the tier had held it
_RATES = 64  # calls from which the speed of prefill is taken
_LEAST_COMPUTED = 64  # tokens; below it a call says nothing of that speed


@dataclass(slots=True)
class _Live:
    calls: int = 0
    prompt_tokens: int = 0  # of all its calls
    agents: dict[str, int] = field(default_factory=dict)  # -> tokens of the latest prompt and output

    @property
    def tokens(self) -> int:
        return sum(self.agents.values())


class Gate:
    """One runner's. pool_tokens: device tokens of all engines; engines: how many share the runs. Single-threaded."""

    def __init__(
        self, pool_tokens: int, engines: int = 1, options: AdmissionOptions | None = None, *, max_agents: int = 64
    ) -> None:
        self.rule = Admission(pool_tokens, options)
        self._pool = pool_tokens
        self._engines = engines
        self._max_agents = max_agents
        self._live: OrderedDict[str, _Live] = OrderedDict()
        self._speeds: deque[float] = deque(maxlen=_RATES)
        self._usual = 0.0  # tokens that a run holds when it ends, mean
        self._ended = 0

    def called(self, event: CallFinished) -> None:
        """A call of a run in flight has ended."""
        live = self._live.setdefault(event.run_id, _Live())
        again = _again(event, live.agents.get(event.agent, 0))
        live.calls += 1
        live.prompt_tokens += event.prompt_tokens
        if event.agent in live.agents or len(live.agents) < self._max_agents:
            live.agents[event.agent] = event.prompt_tokens + event.output_tokens
        computed = event.prompt_tokens - event.device_cached_tokens - event.host_cached_tokens
        if computed >= _LEAST_COMPUTED and event.first_token_s > 0:
            self._speeds.append(computed / event.first_token_s)
        if self._speeds:
            # Calls that waited in a queue make prefill look slow: the faster ones say how fast it is.
            token_s = 1.0 / float(np.quantile(self._speeds, 0.75)) / self._engines
            self.rule.called(again * token_s, computed * token_s, token_s, event.at_s, len(self._live))

    def ended(self, run_id: str) -> None:
        """The run has ended, or this runner has lost it."""
        live = self._live.pop(run_id, None)
        if live is None or not live.calls:
            return
        self._ended = min(self._ended + 1, round(self.rule.options.memory))
        self._usual += (live.tokens - self._usual) / self._ended
        self.rule.ended(live.tokens, live.calls, live.prompt_tokens)

    def held(self, in_flight: int) -> str | None:
        """Why no new run may begin beside so many; None: one may."""
        if in_flight < self.rule.limit:
            return None
        known = [live.tokens for live in self._live.values()]
        fresh = max(0, in_flight - len(known))
        holds = sum(known) + round((fresh + 1) * self._usual / 2)  # a run holds half of it on average
        if holds <= self._pool:
            return None
        return (
            f"{in_flight} runs are in flight, and with one more they would hold about {holds} tokens of a cache of "
            f"{self._pool}; {self.rule.limit} may run until one ends. {self.rule.thrash:.0%} of the engines' time goes "
            "into computing again what was evicted"
        )


def _again(event: CallFinished, before: int) -> int:
    """Tokens of the prompt that had been computed before and were computed again. before: the agent's last context."""
    if event.report is not None and event.report.missed:
        return sum(span.end - span.start for span in event.report.missed if span.cause in _LOST)
    grown = before if event.prompt_tokens >= before else 0  # a shorter prompt is another one
    return max(0, grown - event.device_cached_tokens - event.host_cached_tokens)
