"""A predictor that is sure and wrong: what it costs a policy to be misled, and what its guard saves (`core.guard`)."""

from collections.abc import Sequence

import numpy as np

from pbkv_ray.core.forecast import Forecast
from pbkv_ray.predict.counts import VariableOrderCounts


class Misled(VariableOrderCounts):
    """All mass, at every step, on the agent that is least likely to call next of those that have called before."""

    def forecast(self, workflow: str, history: Sequence[str], horizon: int) -> Forecast | None:
        honest = super().forecast(workflow, history, horizon)
        if honest is None:
            return None
        seen = [i for i, agent in enumerate(honest.agents) if agent in history] or list(range(len(honest.agents)))
        wrong = min(seen, key=lambda i: float(honest.step[0, i]))
        step = np.zeros_like(honest.step)
        step[:, wrong] = 1.0
        return Forecast(honest.agents, step, honest.wait_s)
