"""The predictor of the controller actor: counts at once, and the net's better answer when it is there.

At the start of a call the controller publishes what counts expect, and again when it has been answered. The net is
asked then, again when the hidden state of the call's last prefill token is there, when the call has finished, and
when the state of its last decoded token is there; its answers come back as `Reforecast` events. Nothing of this is
waited for.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import time

import numpy as np
import numpy.typing as npt

from pbkv_ray.config import ControllerOptions
from pbkv_ray.core.controller import Controller
from pbkv_ray.core.events import CallFinished, CallStarted, CallState, Event, Reforecast
from pbkv_ray.core.forecast import CallFacts, Forecast, Predictor
from pbkv_ray.predict.background import Background
from pbkv_ray.predict.folder import ModelFolder
from pbkv_ray.predict.serving import Served

MAX_CALLS = 4_096  # calls that are followed


@dataclass(slots=True)
class _Followed:
    """A call, and how many calls its run had made with it."""

    run_id: str
    calls: int
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    hidden: dict[str, npt.NDArray[np.float16]] = field(default_factory=dict)


class Prediction:
    """`take` hears of the net's answers. `follow` connects it with the controller whose predictor it is."""

    def __init__(self, options: ControllerOptions, take: Callable[[Event], None]) -> None:
        self._options = options
        self._take = take
        self._served = Served()
        self._background = Background(self._served, self._answered, options.horizon)
        self._models = ModelFolder(Path(options.predictor_models)) if options.predictor_models else None
        self._calls: OrderedDict[str, _Followed] = OrderedDict()
        self._controller: Controller | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def predictor(self) -> Predictor:
        return self._served.at_once

    def follow(self, controller: Controller) -> None:
        self._controller = controller
        if self._models is not None:
            controller.listeners.append(self._heard)

    def start(self) -> None:
        """Safe to call again; needs the event loop."""
        if self._models is not None and not self._tasks:
            self._tasks = [
                asyncio.create_task(self._background.run(), name="pbkv-net"),
                asyncio.create_task(self._background.watch(self._models), name="pbkv-models"),
            ]

    def counts(self) -> Mapping[str, float]:
        """For /metrics; `name/workflow` is a gauge of one workflow."""
        found: dict[str, float] = {f"predictor_{name}": n for name, n in self._served.counters.items()}
        found |= {f"predictor_requests_{name}": n for name, n in self._background.counters.items()}
        found |= {f"predictor_dropped_{name}": n for name, n in self._served.counts.dropped.items()}
        if self._models is not None:
            found["predictor_models_broken"] = len(self._models.errors)
        for workflow, gate in self._served.gates().items():
            found[f"predictor_gate_open/{workflow}"] = float(gate.open)
            found[f"predictor_gate_judged/{workflow}"] = gate.judged
            found[f"predictor_gate_gain_nats/{workflow}"] = gate.net - gate.counts
        return found

    def _heard(self, event: Event) -> None:
        match event:
            case CallStarted():
                run = None if self._controller is None else self._controller.runs.get(event.run_id)
                if run is None or not self._served.has_net(run.workflow):
                    return
                self._calls[event.call_id] = _Followed(run.run_id, len(run.history))
                if len(self._calls) > MAX_CALLS:
                    self._calls.popitem(last=False)
            case CallFinished():
                if (call := self._calls.get(event.call_id)) is None:
                    return
                if event.reason in ("stop", "length"):
                    call.prompt_tokens, call.output_tokens = event.prompt_tokens, event.output_tokens
            case CallState():
                if (call := self._calls.get(event.call_id)) is None:
                    return
                call.hidden[event.signal] = event.vector
            case _:
                return
        self._ask(event.call_id)

    def _ask(self, call_id: str) -> None:
        call = self._calls[call_id]
        run = None if self._controller is None else self._controller.runs.get(call.run_id)
        if run is None or len(run.history) != call.calls:  # it has ended, or called again
            del self._calls[call_id]
            return
        facts = CallFacts(call.prompt_tokens, call.output_tokens, dict(call.hidden))
        self._background.submit(run.run_id, run.workflow, tuple(run.history), facts)

    def _answered(self, run_id: str, history: tuple[str, ...], call: CallFacts | None, forecast: Forecast) -> None:
        answered = call is not None and call.output_tokens is not None
        self._take(Reforecast(run_id, len(history), forecast, time(), answered))
