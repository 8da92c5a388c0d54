"""Temperature scaling per step, and mixtures of two models: fitted on held-out runs, applied in service."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pbkv_ray.core.forecast import Array
from pbkv_ray.predict.compiled import compiled

_LEAST = 1e-9
_TEMPERATURES = np.exp(np.linspace(np.log(0.25), np.log(4.0), 97))


def scale(probability: Array, temperature: Array) -> Array:
    """probability [..., K, classes] to the power of 1 / temperature [K], normalised."""
    powered = np.maximum(probability, _LEAST) ** (1.0 / temperature)[:, None]
    return np.asarray(powered / powered.sum(-1, keepdims=True))


def fit_temperature(probability: Array, label: npt.NDArray[np.int64], least: int = 50) -> Array:
    """[K] the temperature of least log loss for each step; one where fewer than `least` samples speak.

    probability [n, K, classes], label [n, K] with negative numbers masked.
    """
    steps = probability.shape[1]
    best = np.ones(steps)
    for k in range(steps):
        known = label[:, k] >= 0
        if known.sum() < least:
            continue
        logs = np.log(np.maximum(probability[known, k], _LEAST))
        own = label[known, k]
        losses = [_loss(logs / temperature, own) for temperature in _TEMPERATURES]
        best[k] = _TEMPERATURES[int(np.argmin(losses))]
    return best


def _loss(logits: Array, label: npt.NDArray[np.int64]) -> float:
    peak = logits.max(1)
    normal = peak + np.log(np.exp(logits - peak[:, None]).sum(1))
    return float((normal - logits[np.arange(len(label)), label]).mean())


def mix(first: Array, second: Array, weight: Array) -> Array:
    """Linear mixture with `weight` [K] on `second`; [..., K, classes]."""
    return np.asarray(first + weight[:, None] * (second - first))


def fit_mixture(first: Array, second: Array, label: npt.NDArray[np.int64], least: int = 50) -> Array:
    """[K] weight of `second` with the greatest held-out likelihood; zero where fewer than `least` samples speak."""
    steps = first.shape[1]
    weight = np.zeros(steps)
    grid = np.linspace(0.0, 1.0, 41)[:, None]
    for k in range(steps):
        known = np.flatnonzero(label[:, k] >= 0)
        if len(known) < least:
            continue
        one = first[known, k, label[known, k]]
        two = second[known, k, label[known, k]]
        likelihood = np.log(np.maximum(one + grid * (two - one), _LEAST)).mean(1)
        weight[k] = grid[int(np.argmax(likelihood)), 0]
    return weight


def expand(probability: Array, own: Sequence[str], agents: Sequence[str]) -> Array:
    """[..., len(own) + 1] as [..., len(agents) + 1]; agents that are not in `agents` are dropped."""
    out = np.zeros((*probability.shape[:-1], len(agents) + 1))
    index = {agent: i for i, agent in enumerate(own)}
    known = [(i, index[agent]) for i, agent in enumerate(agents) if agent in index]
    out[..., [i for i, _ in known]] = probability[..., [j for _, j in known]]
    out[..., -1] = probability[..., -1]
    return out


@compiled
def softened(logits: npt.NDArray[np.float32], temperature: Array, out: Array) -> None:
    """Fill `out` [n, K, classes] with the probabilities of `logits` at `temperature` [K]."""
    for i in range(out.shape[0]):
        for k in range(out.shape[1]):
            peak = logits[i, k, 0]
            for j in range(1, out.shape[2]):
                peak = max(peak, logits[i, k, j])
            mass, cold = 0.0, 1.0 / temperature[k]
            for j in range(out.shape[2]):
                out[i, k, j] = math.exp((logits[i, k, j] - peak) * cold)
                mass += out[i, k, j]
            share = 1.0 / mass
            for j in range(out.shape[2]):
                out[i, k, j] *= share


@compiled
def blend(first: Array, second: Array, columns: npt.NDArray[np.int64], weight: Array) -> None:
    """`mix` in place: `second` [n, .., classes] into `first` [n, K, classes], as far as it has steps.

    columns [classes]: where `second` has each class of `first`; weight [n or 1, K] of `second`.
    """
    for i in range(first.shape[0]):
        for k in range(min(first.shape[1], second.shape[1])):
            share = weight[min(i, weight.shape[0] - 1), k]
            for j in range(first.shape[2]):
                first[i, k, j] += share * (second[i, k, columns[j]] - first[i, k, j])
