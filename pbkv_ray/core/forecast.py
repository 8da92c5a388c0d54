"""Forecasts: which agents a run calls in its next K steps, and what that makes of an agent's value."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pbkv_ray.core.wire import Record

Array = npt.NDArray[np.float64]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Forecast(Record):
    """One run's next K calls (paper section 4.1).

    agents: the names behind the columns.
    step:   [K, len(agents) + 1]; row k is the distribution of call k + 1 given that the run has not ended
            before it; the last column is END, a hazard. Rows sum to one.
    wait_s: [K] expected seconds from the forecast to the start of call k + 1, if that is known.
    """

    agents: tuple[str, ...]
    step: Array
    wait_s: Array | None = None

    def __reduce__(self) -> tuple[Callable[..., "Forecast"], tuple[Any, ...]]:
        """The arrays as bytes: Ray sends every array beside the rest, which costs more than all that is in them."""
        wait = None if self.wait_s is None else np.asarray(self.wait_s, np.float64).tobytes()
        return _arrived, (self.agents, np.asarray(self.step, np.float64).tobytes(), len(self.step), wait)

    def mass(self) -> Array:
        """[K, agents]: s^(k) P^(k)[agent], the probability that call k is made and made by that agent."""
        alive = np.concatenate(([1.0], np.cumprod(1.0 - self.step[:-1, -1])))
        return np.asarray(self.step[:, :-1] * alive[:, None])

    def values(self, gamma: float, horizon: int | None = None) -> Array:
        """[agents]: sum over k of gamma^(k-1) s^(k) P^(k)[agent] (paper Eq. 2, one run's share)."""
        mass = self.mass()[:horizon]
        return np.asarray(gamma ** np.arange(len(mass)) @ mass)


def _arrived(agents: tuple[str, ...], step: bytes, steps: int, wait: bytes | None) -> Forecast:
    return Forecast(
        agents,
        np.frombuffer(step, np.float64).reshape(steps, len(agents) + 1),
        None if wait is None else np.frombuffer(wait, np.float64),
    )


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What is known of a run's last call, beyond its agent. `hidden`: signal name -> [width]."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    hidden: Mapping[str, npt.NDArray[np.floating]] = field(default_factory=dict)


class Predictor(Protocol):
    """Learns from the calls of runs, and forecasts. `history` is the run's agents so far, oldest first."""

    def prior(self, workflow: str, agents: Sequence[str], edges: Iterable[tuple[str, str]]) -> None:
        """The workflow's graph: what there is to go by before the first observation. Idempotent."""

    def observe(
        self,
        workflow: str,
        history: Sequence[str],
        following: str | None,
        run_id: str = "",
        answers: Sequence[int | None] = (),
    ) -> None:
        """After `history` the run called `following`, or ended (None). `run_id`: whose forecasts it judges. `answers`:
        output tokens of the last calls of `history`, None where they are not known."""

    def observe_wait(self, workflow: str, agent: str, following: str, seconds: float) -> None:
        """A call of `following` started so long after its run's call of `agent` had."""

    def forecast(self, workflow: str, history: Sequence[str], horizon: int) -> Forecast | None:
        """None when nothing is known: the engine then keeps to recency."""

    def refined(self, workflow: str, agent: str, tokens: int, forecast: Forecast) -> Forecast:
        """`forecast`, made when `agent` was called, once it has answered with so many tokens."""


class Guarded:
    """A predictor that may raise, as one that does not: it then has learned nothing, or knows nothing.

    `counts["predictor_errors"]` says how often.
    """

    def __init__(self, predictor: Predictor, counts: Counter[str]) -> None:
        self._predictor = predictor
        self._counts = counts

    def prior(self, workflow: str, agents: Sequence[str], edges: Iterable[tuple[str, str]]) -> None:
        self._try(lambda: self._predictor.prior(workflow, agents, edges))

    def observe(
        self,
        workflow: str,
        history: Sequence[str],
        following: str | None,
        run_id: str = "",
        answers: Sequence[int | None] = (),
    ) -> None:
        self._try(lambda: self._predictor.observe(workflow, history, following, run_id, answers))

    def observe_wait(self, workflow: str, agent: str, following: str, seconds: float) -> None:
        self._try(lambda: self._predictor.observe_wait(workflow, agent, following, seconds))

    def forecast(self, workflow: str, history: Sequence[str], horizon: int) -> Forecast | None:
        return self._try(lambda: self._predictor.forecast(workflow, history, horizon))

    def refined(self, workflow: str, agent: str, tokens: int, forecast: Forecast) -> Forecast:
        return self._try(lambda: self._predictor.refined(workflow, agent, tokens, forecast)) or forecast

    def forecasts(self, workflow: str, histories: Sequence[Sequence[str]], horizon: int) -> list[Forecast | None]:
        """Many runs of one workflow; they cost little more than one where the predictor has a method for them."""
        many = getattr(self._predictor, "forecasts", None)
        if many is None:
            return [self.forecast(workflow, history, horizon) for history in histories]
        return self._try(lambda: list(many(workflow, histories, horizon))) or [None] * len(histories)

    def _try(self, ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except Exception:
            self._counts["predictor_errors"] += 1
            return None
