"""The paper's theory (appendix G) on random instances: what its score means, and what a wrong forecast can cost.

Its abstractions hold here: unit nodes, one agent a step, an evicted node stays out, past access is future use.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbkv_ray.core.forecast import Array, Forecast
from pbkv_ray.core.rates import certain
from pbkv_ray.core.scores import Outlook, PaperScore, Uses


@dataclass(frozen=True)
class Instance:
    """W workflows over A agents, K steps, N nodes."""

    truth: Array  # [W, K, A + 1] step distributions given survival, END last
    guess: Array  # the same, as predicted
    reads: Array  # [N, W, A] bool: agent a of workflow w has accessed node n
    gamma: float

    def score(self, steps: Array) -> Array:
        """[N] the product's own paper score under these forecasts."""
        kinds, horizon = self.reads.shape[0], steps.shape[1]
        paper = PaperScore(horizon, self.gamma)
        total = np.zeros(kinds)
        for w in range(steps.shape[0]):
            outlook = Outlook(steps[w, :, :-1], steps[w, :, -1], None, certain(steps.shape[2] - 1))
            ever = self.reads[:, w]
            uses = Uses(ever, ever, np.zeros_like(ever), np.zeros(kinds, bool), np.zeros(kinds, np.int64))
            total += paper.weights(outlook, uses) @ (self.gamma ** np.arange(horizon))
        return total

    def error(self) -> Array:
        """[N] epsilon_c^gamma of Eq. 7: over the workflows that have accessed the node."""
        epsilon = np.abs(self.truth - self.guess).sum(2)  # [W, K]
        discounted = epsilon @ (self.gamma ** np.arange(epsilon.shape[1]))
        return np.asarray(self.reads.any(2) @ discounted)

    def constant(self) -> float:
        horizon = self.truth.shape[1]
        return (1 - self.gamma**horizon) / (2 * (1 - self.gamma))


def draw(seed: int, noise: float = 0.5) -> Instance:
    rng = np.random.default_rng(seed)
    workflows, agents, horizon, nodes = (
        int(rng.integers(low, high)) for low, high in ((1, 6), (2, 6), (1, 7), (2, 30))
    )
    truth = rng.dirichlet(np.full(agents + 1, rng.choice([0.2, 1.0])), (workflows, horizon))
    other = rng.dirichlet(np.full(agents + 1, 0.5), (workflows, horizon))
    share = noise * rng.random((workflows, horizon, 1))
    reads = rng.random((nodes, workflows, agents)) < rng.choice([0.2, 0.5])
    return Instance(truth, (1 - share) * truth + share * other, reads, float(rng.uniform(0.3, 0.95)))


seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("seed", range(5))
def test_score_is_the_expected_discounted_number_of_misses(seed: int) -> None:
    """Lemma G.1, by Monte Carlo: let the workflows run on, and count who would have needed the evicted node."""
    instance, trials = draw(seed), 20_000
    rng = np.random.default_rng(seed)
    workflows, horizon, width = instance.truth.shape
    misses = np.zeros((trials, len(instance.reads)))
    for w in range(workflows):
        alive = np.ones(trials, bool)
        for k in range(horizon):
            called = (rng.random((trials, 1)) > np.cumsum(instance.truth[w, k])[:-1]).sum(1)
            alive &= called < width - 1
            hit = instance.reads[:, w][:, np.minimum(called, width - 2)].T
            misses += instance.gamma**k * (hit & alive[:, None])
    error = misses.std(0) / np.sqrt(trials) + 1e-12
    assert (np.abs(misses.mean(0) - instance.score(instance.truth)) < 5 * error + 1e-9).all()


@given(seeds)
def test_a_forecast_error_moves_a_score_by_at_most_the_bound(seed: int) -> None:
    """Lemma G.2."""
    instance = draw(seed)
    moved = np.abs(instance.score(instance.truth) - instance.score(instance.guess))
    assert (moved <= instance.constant() * instance.error() + 1e-9).all()
    assert instance.constant() <= 1 / (2 * (1 - instance.gamma))


@given(seeds)
def test_a_clear_ranking_survives_small_errors(seed: int) -> None:
    """Corollary G.3."""
    instance = draw(seed, noise=0.05)
    true, guessed, bound = (
        instance.score(instance.truth),
        instance.score(instance.guess),
        instance.constant() * instance.error(),
    )
    clear = true[:, None] - true[None, :] > bound[:, None] + bound[None, :] + 1e-12
    assert (guessed[:, None] > guessed[None, :])[clear].all()


@given(seeds, st.floats(0, 1))
@settings(max_examples=200)
def test_regret_is_bounded_by_the_errors_of_the_nodes_at_the_boundary(seed: int, share: float) -> None:
    """Theorem 5.1 (G.4), its whole chain of inequalities."""
    instance = draw(seed)
    true, guessed = instance.score(instance.truth), instance.score(instance.guess)
    budget = round(share * len(true))
    chosen = set(np.argsort(guessed, kind="stable")[:budget].tolist())
    optimal = set(np.argsort(true, kind="stable")[:budget].tolist())
    regret = sum(true[c] for c in chosen) - sum(true[c] for c in optimal)
    boundary = sorted(chosen ^ optimal)
    moved = float(np.abs(true - guessed)[boundary].sum())
    errors = float(instance.error()[boundary].sum())
    assert -1e-9 <= regret <= moved + 1e-9
    assert moved <= instance.constant() * errors + 1e-9
    assert instance.constant() * errors <= errors / (2 * (1 - instance.gamma)) + 1e-9


def test_the_bound_is_not_empty() -> None:
    """A forecast that swaps two agents costs a regret that is not far below the bound."""
    truth = np.tile([0.9, 0.1, 0.0], (1, 3, 1))
    guess = np.tile([0.1, 0.9, 0.0], (1, 3, 1))
    instance = Instance(truth, guess, np.array([[[True, False]], [[False, True]]]), 0.7)
    true, guessed = instance.score(truth), instance.score(guess)
    np.testing.assert_allclose(true, [0.9 * 2.19, 0.1 * 2.19])
    regret = true[np.argmin(guessed)] - true.min()
    bound = instance.constant() * instance.error().sum()
    assert 0 < regret <= bound < 5 * regret


def test_survival_is_the_product_of_hazards() -> None:
    """The forecast's own arithmetic: s^(k) P^(k) of three steps with an END hazard of one half."""
    step = np.tile([0.5, 0.0, 0.5], (3, 1))
    np.testing.assert_allclose(Forecast(("a", "b"), step).mass()[:, 0], [0.5, 0.25, 0.125])
