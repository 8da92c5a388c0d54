"""The trained net in numpy: what serves forecasts. No torch, and microseconds for a few runs.

`graphsage.GraphSage` defines the net; a test holds both to the same numbers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file

from pbkv_ray.core.forecast import Array
from pbkv_ray.errors import InputError
from pbkv_ray.predict.calibration import softened
from pbkv_ray.predict.features import Floats, Paths

FORMAT = 1  # of the model folder
Stage = Literal["begun", "prefilled", "finished"]  # how far a run's last call has come


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """All that a forecast needs and that only changes with the workflow's graph; N = agents, the unknown one, added.

    states: [N, width] H(2) of Eq. 3; attention: [N, N] of each agent, as the current one, to each earlier one, before
    it is weighed with how often that one was called; out: [K * columns, hidden] and bias, the two outputs as one.
    """

    states: Floats
    attention: Floats
    out: Floats
    bias: Floats


@dataclass(frozen=True, slots=True, eq=False)
class ServedNet:
    """A net of one workflow, as `pbkv train` left it.

    agents: its columns; temperature [K]; mixture [K]: weight of the net against the counts at the start of a call;
    facts: config.json, where `mixture_later` has the weights at later stages.
    """

    agents: tuple[str, ...]
    horizon: int
    signals: tuple[str, ...]
    temperature: Array
    mixture: Array
    transitions: Floats
    tensors: Mapping[str, Floats]
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> "ServedNet":
        """InputError when the folder holds no model of this format."""
        try:
            config = json.loads((folder / "config.json").read_text())
            if config.get("format") != FORMAT:
                raise InputError(f"model {folder} has format {config.get('format')}, not {FORMAT}; train it again")
            tensors = load_file(folder / Path(config["tensors"]).name)
            horizon = int(config["net"]["horizon"])
            net = cls(
                agents=tuple(config["agents"]),
                horizon=horizon,
                signals=tuple(config["net"]["signals"]),
                temperature=np.array(config["temperature"]),
                mixture=np.array(config.get("mixture", np.ones(horizon))),
                transitions=tensors.pop("transitions"),
                tensors={name.removeprefix("net."): value for name, value in tensors.items()},
                facts=config,
            )
            lengths = [len(net.temperature), len(net.mixture), *map(len, config.get("mixture_later", {}).values())]
            if set(lengths) != {horizon}:  # compiled loops would read beyond
                raise InputError(f"model {folder} has weights of {lengths} steps, not {horizon}; train it again")
            probe = net.forecast(net.placed((), {}), Paths.of(net.agents, [net.agents[:1]]))
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise InputError(f"{folder} holds no model ({error}); make one with pbkv train") from error
        if not np.isfinite(probe).all():
            raise InputError(f"model {folder} forecasts numbers that are not finite; train it again")
        return net

    def placed(self, added: Sequence[str], transitions: Mapping[str, Mapping[str, float]]) -> Placed:
        """The net's agents, the unknown one, and agents that the workflow got later, which have no embedding but a
        place in the graph: agent -> {next agent: how often}."""
        t, known = self.tensors, len(self.agents)
        states = self._states(added, transitions)
        score = (states @ t["query.weight"].T) @ states.T / states.shape[1] ** 0.5
        columns = known + len(added) + 1
        size = t["free.weight"].shape[1]
        out = np.zeros((self.horizon, columns, size), np.float32)
        bias = np.zeros((self.horizon, columns), np.float32)
        if self.facts["net"]["graph"]:
            asked = np.concatenate((states[:known], states[known + 1 :])) / states.shape[1] ** 0.5
            out[:, :-1] = np.einsum("kdh,ad->kah", t["tied.weight"].reshape(self.horizon, -1, size), asked)
            bias[:, :-1] = t["tied.bias"].reshape(self.horizon, -1) @ asked.T
        for whole, part in ((out, t["free.weight"]), (bias, t["free.bias"])):
            free = part.reshape(self.horizon, known + 1, *part.shape[1:])
            whole[:, :known] += free[:, :known]
            whole[:, -1] = free[:, known]
        attention = np.exp(score - score.max(1, keepdims=True))
        return Placed(states, attention, out.reshape(-1, size), bias.reshape(-1))

    def _states(self, added: Sequence[str], transitions: Mapping[str, Mapping[str, float]]) -> Floats:
        names = [*self.agents, "", *added]
        matrix = np.zeros((len(names), len(names)), np.float32)
        matrix[: len(self.agents) + 1, : len(self.agents) + 1] = self.transitions
        index = {name: i for i, name in enumerate(names) if name}
        for agent, following in transitions.items():
            known = [(index[name], count) for name, count in following.items() if name in index]
            total = sum(count for _, count in known)
            # Agents of the net keep their trained row unless they now call an agent that it did not know.
            if agent in index and total and (agent in added or any(name in added for name in following)):
                row = np.zeros(len(names), np.float32)
                for column, count in known:
                    row[column] = count / total
                matrix[index[agent]] = row
        embedding = self.tensors["embedding.weight"]
        state = np.concatenate((embedding, np.repeat(embedding[-1:], len(added), 0)))
        for layer in ("layers.0", "layers.1"):
            passed = (matrix @ state) @ self.tensors[f"{layer}.lin_rel.weight"].T
            own = state @ self.tensors[f"{layer}.lin_root.weight"].T
            state = np.maximum(passed + own + self.tensors[f"{layer}.lin_rel.bias"], 0)
        return np.asarray(state, np.float32)

    def weight(self, stage: Stage) -> Array:
        """[K] weight of the net against the counts."""
        return np.asarray(self.facts.get("mixture_later", {}).get(stage, self.mixture), np.float64)

    def widths(self) -> dict[str, int]:
        """Signal -> width of the hidden states that it was trained on."""
        return {name: self.tensors[f"text.{name}.0.weight"].shape[0] for name in self.signals}

    def forecast(self, placed: Placed, paths: Paths, hidden: Sequence[Mapping[str, Floats]] = ()) -> Array:
        """[paths, K, agents + added + 1], END last, calibrated. `hidden`: per path, signal -> [width], where known.

        `paths` follow this net's agents; added agents are one (the unknown) to them, and columns of their own here.
        """
        t, known = self.tensors, len(self.agents)
        parts: list[Floats] = []
        if self.facts["net"]["graph"]:
            weight = placed.attention[paths.current, : known + 1] * paths.earlier
            weight /= np.maximum(weight.sum(1, keepdims=True), 1e-9)
            context = np.asarray(weight @ placed.states[: known + 1], np.float32)
            parts += [placed.states[paths.current], context]
        if "features.0.weight" in t:
            parts.append(_dense(paths.vectors, t, "features.0"))
        for signal in self.signals:
            zero = np.zeros(t[f"text.{signal}.0.weight"].shape[0], np.float32)
            value = np.stack([np.asarray(h.get(signal, zero), np.float32) for h in hidden or [{}] * len(paths)])
            parts.append(_dense(_normal(value, t, f"text.{signal}.0"), t, f"text.{signal}.1"))
        state = _dense(np.concatenate(parts, 1), t, "head.1")
        logits = state @ placed.out.T
        logits += placed.bias
        out = np.empty((len(paths), self.horizon, len(placed.bias) // self.horizon))
        softened(logits.reshape(out.shape), self.temperature, out)
        return out


def _dense(value: Floats, tensors: Mapping[str, Floats], layer: str) -> Floats:
    out = value @ tensors[f"{layer}.weight"].T
    out += tensors[f"{layer}.bias"]
    return np.maximum(out, 0, out=out)


def _normal(value: Floats, tensors: Mapping[str, Floats], layer: str) -> Floats:
    centred = value - value.mean(1, keepdims=True)
    spread = np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
    return np.asarray(centred / spread * tensors[f"{layer}.weight"] + tensors[f"{layer}.bias"])
