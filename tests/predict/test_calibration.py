"""Temperatures and mixtures find what the held-out answers say."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pbkv_ray.predict.calibration import blend, expand, fit_mixture, fit_temperature, mix, scale, softened


def test_an_overconfident_model_is_cooled_and_the_rest_left_alone() -> None:
    generator = np.random.default_rng(0)
    truth = np.array([0.7, 0.2, 0.1])
    label = generator.choice(3, (4000, 2), p=truth)
    label[20:, 1] = -1  # too few samples to say anything
    said = scale(np.tile(truth, (4000, 2, 1)), np.array([0.5, 0.5]))
    temperature = fit_temperature(said, label)
    assert abs(temperature[0] - 2.0) < 0.15
    assert temperature[1] == 1.0
    np.testing.assert_allclose(scale(said, temperature)[0, 0], truth, atol=0.03)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.25, 4.0))
def test_scaling_keeps_the_order_and_the_sum(seed: int, temperature: float) -> None:
    p = np.random.default_rng(seed).dirichlet(np.ones(4), (3, 2))
    scaled = scale(p, np.full(2, temperature))
    np.testing.assert_allclose(scaled.sum(-1), 1.0)
    assert (scaled.argmax(-1) == p.argmax(-1)).all()


def test_a_mixture_prefers_the_model_that_was_right() -> None:
    right, wrong = np.tile([0.9, 0.1], (100, 1, 1)), np.tile([0.2, 0.8], (100, 1, 1))
    label = np.zeros((100, 1), np.int64)
    assert fit_mixture(wrong, right, label) == 1.0
    assert fit_mixture(right, wrong, label) == 0.0
    assert fit_mixture(wrong[:10], right[:10], label[:10]) == 0.0, "ten samples do not decide"
    np.testing.assert_allclose(mix(right, wrong, np.array([0.5]))[0, 0], [0.55, 0.45])


def test_columns_are_matched_by_name() -> None:
    own = np.array([[0.5, 0.3, 0.2]])  # b, a, END
    assert expand(own, ("b", "a"), ("a", "x", "b")).tolist() == [[0.3, 0.0, 0.5, 0.2]]


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_logits_at_a_temperature_are_scaled_probabilities(seed: int) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 3, (4, 3, 5)).astype(np.float32)
    temperature = generator.uniform(0.5, 2.0, 3)
    out = np.empty(logits.shape)
    softened(logits, temperature, out)
    probability = np.exp(logits.astype(float))
    probability /= probability.sum(-1, keepdims=True)
    np.testing.assert_allclose(out, scale(probability, temperature), atol=1e-6)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.integers(1, 4))
def test_a_blend_is_a_mixture_of_the_steps_and_classes_that_both_have(seed: int, alike: bool, steps: int) -> None:
    generator = np.random.default_rng(seed)
    first, second = generator.dirichlet(np.ones(3), (5, 3)), generator.dirichlet(np.ones(4), (5, steps))
    columns = np.array([2, 0, 3])  # of first's classes in second, which has one more
    weight = generator.uniform(0, 1, (1 if alike else 5, 3))
    blended, shared = first.copy(), min(3, steps)
    blend(blended, second, columns, weight)
    for i in range(5):
        expected = mix(first[i, :shared], second[i, :shared][:, columns], weight[0 if alike else i, :shared])
        np.testing.assert_allclose(blended[i, :shared], expected)
    assert (blended[:, shared:] == first[:, shared:]).all()
