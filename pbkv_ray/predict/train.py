"""Train the net on runs, and keep it as a folder: `config.json` (options, agents, metrics, data hash) and tensors."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from pbkv_ray.core.forecast import Array
from pbkv_ray.errors import ConfigError, InputError
from pbkv_ray.predict import features, metrics
from pbkv_ray.predict.calibration import fit_temperature, scale
from pbkv_ray.predict.dataset import MASKED, Ints, Run, labels, vocabulary
from pbkv_ray.predict.graphsage import GraphSage, Inputs, NetOptions, transition_matrix
from pbkv_ray.predict.inference import FORMAT


@dataclass(frozen=True, slots=True)
class TrainOptions:
    epochs: int = 30
    patience: int = 5  # epochs without a better validation loss
    updates: int = 40  # per epoch, as far as batches of 32 to 512 allow
    learning_rate: float = 2e-3
    weight_decay: float = 1e-3
    hide_agent: float = 0.1  # share of batches in which one agent is taken for unknown, so that new ones are learned
    hide_call: float = 0.3  # share of samples whose last call has only begun: no token counts, no hidden states
    hide_decode: float = 0.2  # share whose last call has been prefilled only: no token counts, no state at its end
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "patience", "updates"):
            if getattr(self, name) < 1:
                raise ConfigError(f"TrainOptions.{name} is {getattr(self, name)}; it must be at least 1")


@dataclass
class Model:
    """A trained net with what it needs to speak: agents' names, transitions, temperature [K], and its history."""

    net: GraphSage
    agents: tuple[str, ...]
    transitions: Tensor
    temperature: Array
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.net.eval()
        rows = torch.arange(len(self.agents) + 1)
        with torch.no_grad():
            self._states = self.net.agents(rows, self.transitions)

    @torch.inference_mode()
    def probability(self, inputs: Inputs) -> Array:
        """[n, K, agents + 1], END last, temperature not applied."""
        parts = []
        for rows in torch.arange(len(inputs)).split(4_096):
            logits = _known(self.net, self._states, inputs[rows], len(self.agents))
            parts.append(torch.softmax(logits, -1))
        return np.asarray(torch.cat(parts).double().numpy())

    def forecast(self, inputs: Inputs) -> Array:
        """[n, K, agents + 1], calibrated."""
        return scale(self.probability(inputs), self.temperature)


def _known(net: GraphSage, states: Tensor, inputs: Inputs, agents: int) -> Tensor:
    """Logits over the known agents and END: the unknown agent can be seen but not asked for."""
    logits = net(states, inputs, torch.arange(agents + 1))
    return torch.cat((logits[..., :agents], logits[..., agents + 1 :]), -1)


def inputs_of(runs: Sequence[Run], agents: Sequence[str], signals: Sequence[str] = ()) -> Inputs:
    """All positions of `runs`, in order. InputError when a run lacks one of the `signals`."""
    index = {agent: i for i, agent in enumerate(agents)}
    current, earlier, vectors = [], [], []
    for run in runs:
        path = np.array([index.get(agent, len(agents)) for agent in run.agents])
        one_hot = np.eye(len(agents) + 1, dtype=np.float32)[path]
        current.append(path)
        earlier.append(np.cumsum(one_hot, 0) - one_hot)
        prompts, outputs = run.prompt_tokens.tolist(), run.output_tokens.tolist()
        vectors.append(features.path_features(agents, run.agents, prompts, outputs).vectors)
        for name in signals:
            if name not in run.hidden:
                raise InputError(f"run {run.run_id} has no hidden state {name!r}; record it or train without it")
    return Inputs(
        torch.from_numpy(np.concatenate(current)),
        torch.from_numpy(np.concatenate(earlier)),
        torch.from_numpy(np.concatenate(vectors)),
        {name: torch.from_numpy(np.concatenate([run.hidden[name] for run in runs])) for name in signals},
    )


def begun(inputs: Inputs) -> Inputs:
    """The same positions at the start of the last call: neither its token counts nor its hidden states are known."""
    return _without(inputs, tuple(inputs.signals))


def prefilled(inputs: Inputs) -> Inputs:
    """The same positions when the last call has been prefilled: what is known at its end only is not."""
    return _without(inputs, ("decode",))


def _without(inputs: Inputs, signals: Sequence[str]) -> Inputs:
    vectors = inputs.features.clone()
    vectors[:, -features.LENGTHS :] = 0.0
    kept = {name: torch.zeros_like(value) if name in signals else value for name, value in inputs.signals.items()}
    return Inputs(inputs.current, inputs.earlier, vectors, kept)


def labels_of(runs: Sequence[Run], agents: Sequence[str], horizon: int) -> Ints:
    return np.concatenate([labels(run, agents, horizon) for run in runs])


def fit(
    train: Sequence[Run],
    validation: Sequence[Run],
    net: NetOptions | None = None,
    options: TrainOptions | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Model:
    """Early stopping and temperatures on `validation`; `progress` hears (epoch, validation loss). Deterministic in
    the seed on one machine. `net.agents` is set from the runs. InputError when either part is empty."""
    if not train or not validation:
        raise InputError("training needs runs to train on and runs to validate on; one part is empty")
    options = options or TrainOptions()
    agents = vocabulary(train)
    net = replace(net or NetOptions(1), agents=len(agents))
    generator = torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed)
    module = GraphSage(net)
    index = {agent: i for i, agent in enumerate(agents)}
    transitions = transition_matrix([[index[a] for a in run.agents] for run in train], len(agents) + 1)
    data = inputs_of(train, agents, tuple(net.signals))
    label = torch.from_numpy(labels_of(train, agents, net.horizon))
    held_data = inputs_of(validation, agents, tuple(net.signals))
    held_label = torch.from_numpy(labels_of(validation, agents, net.horizon))
    optimizer = torch.optim.AdamW(module.parameters(), options.learning_rate, weight_decay=options.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs, options.learning_rate / 20)
    batch = min(512, max(32, len(data) // options.updates))
    best, best_state, stale = float("inf"), module.state_dict(), 0
    losses = []
    for epoch in range(options.epochs):
        module.train()
        for rows in torch.randperm(len(data), generator=generator).split(batch):
            loss = _batch_loss(module, transitions, data[rows], label[rows], options, generator)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        module.eval()
        with torch.no_grad():
            states = module.agents(torch.arange(len(agents) + 1), transitions)
            held = float(_loss(_known(module, states, held_data, len(agents)), held_label))
        losses.append(held)
        if progress:
            progress(epoch, held)
        if held < best - 1e-4:
            best, stale = held, 0
            best_state = {name: value.clone() for name, value in module.state_dict().items()}
        else:
            stale += 1
            if stale >= options.patience:
                break
    module.load_state_dict(best_state)
    model = Model(module, agents, transitions, np.ones(net.horizon))
    model.temperature = fit_temperature(model.probability(held_data), held_label.numpy())
    model.facts = {"train": asdict(options), "validation_loss": losses, "parameters": _size(module)}
    return model


def evaluate_held(model: Model, held: Sequence[Run]) -> dict[str, list[float]]:
    """top1, nll, ece (debiased), each [K], of the calibrated forecasts on `held`; a step without samples has none."""
    label = labels_of(held, model.agents, model.net.options.horizon)
    forecast = model.forecast(inputs_of(held, model.agents, tuple(model.net.options.signals)))
    known = [(k, rows) for k in range(label.shape[1]) if len(rows := np.flatnonzero(label[:, k] >= 0))]
    measures = {
        "top1": metrics.top1,
        "nll": metrics.log_loss,
        "ece": metrics.debiased_calibration_error,
    }
    return {
        name: [round(measure(forecast[rows, k], label[rows, k]), 5) for k, rows in known]
        for name, measure in measures.items()
    }


def _batch_loss(
    module: GraphSage,
    transitions: Tensor,
    data: Inputs,
    label: Tensor,
    options: TrainOptions,
    generator: torch.Generator,
) -> Tensor:
    known = module.options.agents
    rows = torch.arange(known + 1)
    stage = torch.rand(len(data), generator=generator)
    begun, prefilled = stage < options.hide_call, stage < options.hide_call + options.hide_decode * bool(data.signals)
    data.features[prefilled, -features.LENGTHS :] = 0.0
    for name, value in data.signals.items():
        value[prefilled if name == "decode" else begun] = 0.0
    if torch.rand((), generator=generator) < options.hide_agent:
        agent = int(torch.randint(known, (), generator=generator))
        data.features = data.features[:, torch.from_numpy(features.hidden(known, agent))]
        rows[agent] = known  # keeps its place in the graph, loses its embedding and its outputs
    states = module.agents(rows, transitions)
    logits = module(states, data, rows)
    return _loss(torch.cat((logits[..., :known], logits[..., known + 1 :]), -1), label)


def _loss(logits: Tensor, label: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), label.flatten(), ignore_index=MASKED)


def _size(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def save(model: Model, folder: Path, facts: dict[str, Any]) -> None:
    """Writes beside `folder` and renames files in, `config.json` last: who reads it sees a whole model."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"net.{name}": value.contiguous() for name, value in model.net.state_dict().items()}
    tensors["transitions"] = model.transitions
    name = f"model-{os.urandom(4).hex()}.safetensors"
    save_file(tensors, folder / name)
    config = {
        "format": FORMAT,
        "tensors": name,
        "net": asdict(model.net.options),
        "agents": list(model.agents),
        "temperature": model.temperature.tolist(),
        **model.facts,
        **facts,
    }
    new = folder / ".config.json.new"
    new.write_text(json.dumps(config, indent=1) + "\n")
    new.replace(folder / "config.json")
    for old in folder.glob("model-*.safetensors"):
        if old.name != name:
            old.unlink(missing_ok=True)
