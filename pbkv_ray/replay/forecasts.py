"""The controller's part in a replay: forecasts at the start and at the end of every call, learned or true."""

from collections.abc import Mapping, Sequence

import numpy as np

from pbkv_ray.core.forecast import Forecast, Predictor

ORACLE_HORIZON = 40
FORECAST_HORIZON = 10

Made = dict[tuple[str, int, bool], Forecast | None]  # run, calls that it has made, whether the last one was answered


class Forecasts:
    """Like `core.controller`: it hears of calls and says what is expected of their runs then.

    agents:  run -> agents of its calls; with them every forecast is the truth (policy `oracle`); future: their times
             (s), as far as they are known.
    noise:   lambda of paper Eq. 5: forecasts are mixed with the uniform distribution over the agents.
    made:    forecasts of a replay in the same order of calls, which are taken as they are; `keep` is filled with
             those that are made here.
    """

    def __init__(
        self,
        predictor: Predictor,
        *,
        agents: Mapping[str, Sequence[str]] | None = None,
        future: Mapping[str, Sequence[float]] | None = None,
        noise: float = 0.0,
        made: Made | None = None,
        keep: Made | None = None,
    ) -> None:
        self.predictor = predictor
        self._agents, self._future, self._noise = agents, future, noise
        self._made, self._keep = made, keep
        self._called: dict[str, float] = {}
        self._answers: dict[str, list[int | None]] = {}

    def heard(self, run_id: str, workflow: str, history: Sequence[str], at_s: float) -> None:
        """Learns from a call. `history` ends with the agent that calls now."""
        last_s, self._called[run_id] = self._called.get(run_id), at_s
        if self._made is not None:
            return
        before, agent = history[:-1], history[-1]
        answers = self._answers.setdefault(run_id, [])
        self.predictor.observe(workflow, before, agent, answers=answers)
        answers.append(None)
        if last_s is not None:
            self.predictor.observe_wait(workflow, before[-1], agent, at_s - last_s)

    def heard_answer(self, run_id: str, tokens: int) -> None:
        if self._made is None:
            self._answers[run_id][-1] = tokens

    def started(self, run_id: str, workflow: str, history: Sequence[str], at_s: float) -> Forecast | None:
        """What is expected of the run as it calls: `heard`, and a forecast."""
        self.heard(run_id, workflow, history, at_s)
        if self._made is not None:
            return self._noisy(self._made[run_id, len(history), False])
        if self._agents is not None:
            times = None if self._future is None else self._future.get(run_id)
            forecast: Forecast | None = true_forecast(self._agents[run_id], len(history), times)
        else:
            forecast = self.predictor.forecast(workflow, history, FORECAST_HORIZON)
        return self._new((run_id, len(history), False), forecast)

    def answered(
        self, run_id: str, workflow: str, history: Sequence[str], tokens: int
    ) -> tuple[Forecast | None, float]:
        """What is expected now that the last call of `history` has got its answer, and when that call began (s).
        None: nothing else than at its start."""
        began_s = self._called[run_id]
        self.heard_answer(run_id, tokens)
        if self._agents is not None:
            return None, began_s
        if self._made is not None:
            return self._noisy(self._made[run_id, len(history), True]), began_s
        forecast = self.predictor.forecast(workflow, history, FORECAST_HORIZON)
        if forecast is not None:
            forecast = self.predictor.refined(workflow, history[-1], tokens, forecast)
        return self._new((run_id, len(history), True), forecast), began_s

    def ended(self, run_id: str, workflow: str, history: Sequence[str]) -> None:
        """Safe to call again."""
        if self._called.pop(run_id, None) is not None and self._made is None:
            self.predictor.observe(workflow, history, None, answers=self._answers.pop(run_id))

    def _new(self, key: tuple[str, int, bool], forecast: Forecast | None) -> Forecast | None:
        if self._keep is not None:
            self._keep[key] = forecast
        return self._noisy(forecast)

    def _noisy(self, forecast: Forecast | None) -> Forecast | None:
        return with_noise(forecast, self._noise) if forecast is not None and self._noise else forecast


def true_forecast(
    agents: Sequence[str], made: int, times_s: Sequence[float] | None = None, horizon: int = ORACLE_HORIZON
) -> Forecast:
    """The forecast that knows: after `made` calls the run goes on with agents[made:] at times_s[made:], then ends."""
    names = tuple(dict.fromkeys(agents))
    ahead = agents[made : made + horizon]
    k = max(1, min(horizon, len(agents) - made + 1))
    step = np.zeros((k, len(names) + 1))
    for i in range(k):
        step[i, names.index(ahead[i]) if i < len(ahead) else len(names)] = 1.0
    wait = None
    if times_s is not None:
        starts = [times_s[made + i] - times_s[made - 1] for i in range(len(ahead))]
        wait = np.array([*starts, *([starts[-1] if starts else 0.0] * (k - len(ahead)))])
    return Forecast(names, step, wait)


def with_noise(forecast: Forecast, share: float) -> Forecast:
    """Paper Eq. 5: (1 - lambda) P + lambda U, U uniform over the agents; END keeps its probability."""
    step = forecast.step.copy()
    alive = step[:, :-1].sum(1, keepdims=True)
    step[:, :-1] = (1 - share) * step[:, :-1] + share * alive / len(forecast.agents)
    return Forecast(forecast.agents, step, forecast.wait_s)
