"""Wide hidden states become narrow ones that still tell vectors apart."""

import numpy as np

from pbkv_ray.core.states import WIDTH, compact


def test_a_narrow_state_stays_and_a_wide_one_keeps_its_inner_products():
    generator = np.random.default_rng(1)
    narrow = generator.standard_normal(WIDTH).astype(np.float16)
    assert compact(narrow) is narrow
    one, other = generator.standard_normal((2, 5 * WIDTH + 7)).astype(np.float16)
    alike = (one + 0.1 * other).astype(np.float16)
    kept = [compact(vector).astype(float) for vector in (one, other, alike)]
    assert {vector.shape for vector in kept} == {(WIDTH,)}

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / np.sqrt((a @ a) * (b @ b)))

    assert cosine(kept[0], kept[2]) > 0.95
    assert abs(cosine(kept[0], kept[1])) < 0.15


def test_no_state_becomes_infinite():
    assert np.isfinite(compact(np.full(8 * WIDTH, 60_000, np.float16))).all()
