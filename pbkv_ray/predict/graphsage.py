"""The paper's predictor (paper 1.2, Eq. 3 and 4), with what it lacks as optional inputs.

Learnable agent embeddings, two layers over the row-normalised transition graph, attention of the current agent over
the run's earlier ones, one linear layer per hidden state, an MLP with K softmaxes over agents and END in one pass.
Beyond the paper: path features, the hidden state at the end of decode and of an inner layer, and an output that is
tied to the agents' embeddings, so that an agent added later is predicted from its place in the graph.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch_geometric.nn import GraphConv

from pbkv_ray.errors import ConfigError
from pbkv_ray.predict import features


@dataclass(frozen=True, slots=True)
class NetOptions:
    """`signals` maps the name of a hidden state to its width; empty where a trace has none."""

    agents: int
    horizon: int = 10
    width: int = 32  # of agent embeddings; the paper does not say, its 350k parameters fit
    hidden: int = 128
    dropout: float = 0.2
    graph: bool = True  # embeddings, graph layers and attention; without them it is a plain MLP
    path_features: bool = True
    signals: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.agents < 1 or self.horizon < 1:
            raise ConfigError(f"a net of {self.agents} agents and {self.horizon} steps is none; give at least one each")
        if not (self.graph or self.path_features or self.signals):
            raise ConfigError("a net without inputs predicts nothing; give graph, path_features or signals")


@dataclass(slots=True)
class Inputs:
    """n positions of runs. Agent indexes are rows of the graph; the unknown agent is the net's row `agents`.

    current: [n] who made the last call; earlier: [n, rows] how often each agent was called before it;
    features: [n, features.width(agents)]; signals: name -> [n, width], zeros where a call has none.
    """

    current: Tensor
    earlier: Tensor
    features: Tensor
    signals: Mapping[str, Tensor]

    def __getitem__(self, rows: Tensor) -> "Inputs":
        signals = {name: value[rows] for name, value in self.signals.items()}
        return Inputs(self.current[rows], self.earlier[rows], self.features[rows], signals)

    def __len__(self) -> int:
        return len(self.current)


class GraphSage(nn.Module):
    def __init__(self, options: NetOptions) -> None:
        super().__init__()
        self.options = options
        width, hidden = options.width, options.hidden
        known = features.width(options.agents)
        inputs = 0
        self.embedding = nn.Embedding(options.agents + 1, width)  # the last row: an agent of which nothing is known
        # x W1 + (A x) W2 with A's weights on the edges is Eq. 3's [x || A x] W.
        self.layers = nn.ModuleList(GraphConv(width, width, aggr="add") for _ in range(2))
        self.query = nn.Linear(width, width, bias=False)
        if options.graph:
            inputs += 2 * width
        if options.path_features:
            self.features = nn.Sequential(nn.Linear(known, hidden), nn.ReLU(), nn.Dropout(options.dropout))
            inputs += hidden
        self.text = nn.ModuleDict(
            {
                name: nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 64), nn.ReLU())
                for name, size in options.signals.items()
            }
        )
        inputs += 64 * len(options.signals)
        self.head = nn.Sequential(
            nn.Dropout(options.dropout), nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(options.dropout)
        )
        self.free = nn.Linear(hidden, options.horizon * (options.agents + 1))
        self.tied = nn.Linear(hidden, options.horizon * width)

    def agents(self, rows: Tensor, transitions: Tensor) -> Tensor:
        """[rows, width] H(2): `rows` are embedding indexes (an agent that is new to the net: options.agents), and
        `transitions` [rows, rows] is row-normalised (a row of zeros where nothing was seen)."""
        target, source = transitions.nonzero(as_tuple=True)  # agent -> its successors; messages flow back
        weight = transitions[target, source]
        state = self.embedding(rows)
        for layer in self.layers:
            state = torch.relu(layer(state, torch.stack((source, target)), weight))
        return state

    def forward(self, agents: Tensor, inputs: Inputs, rows: Tensor) -> Tensor:
        """[n, horizon, len(rows) + 1] logits, END last; `agents` from `agents()`, for the same `rows`."""
        n, horizon, known = len(inputs), self.options.horizon, self.options.agents
        parts: list[Tensor] = []
        if self.options.graph:
            current = agents[inputs.current]
            # Eq. 4: agents repeat in a path, and the weight of a call depends on its agent alone.
            score = self.query(current) @ agents.T / agents.shape[1] ** 0.5
            weight = torch.exp(score - score.amax(1, keepdim=True)) * inputs.earlier
            weight = weight / weight.sum(1, keepdim=True).clamp_min(1e-9)
            parts += [current, weight @ agents]
        if self.options.path_features:
            parts.append(self.features(inputs.features))
        parts += [self.text[name](inputs.signals[name]) for name in self.options.signals]
        state = self.head(torch.cat(parts, 1))
        free = self.free(state).view(n, horizon, known + 1)
        # A new agent has no output of its own: only its place in the graph speaks for it.
        own = torch.cat((free[..., :known], free.new_zeros(n, horizon, 1)), 2)[..., rows]
        if self.options.graph:
            own = own + self.tied(state).view(n, horizon, -1) @ agents.T / agents.shape[1] ** 0.5
        return torch.cat((own, free[..., known:]), 2)


def transition_matrix(paths: list[list[int]], rows: int) -> Tensor:
    """[rows, rows] row-normalised transitions counted in paths of row indexes (paper 1.2, A)."""
    counts = torch.zeros(rows, rows)
    for path in paths:
        for source, target in itertools.pairwise(path):
            counts[source, target] += 1
    return counts / counts.sum(1, keepdim=True).clamp_min(1)
