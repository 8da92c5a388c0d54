"""Hidden states as they are kept: at most WIDTH numbers, whatever the model."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

WIDTH = 1_024


def compact(vector: npt.NDArray[np.float16]) -> npt.NDArray[np.float16]:
    """[n] as it is when n <= WIDTH; else [WIDTH], a count sketch: every number goes to one place with a fixed sign.

    Inner products, so what a linear layer can read, keep their expectation (Charikar et al., 2002).
    """
    if len(vector) <= WIDTH:
        return vector
    rows = -(-len(vector) // WIDTH)
    padded = np.zeros(rows * WIDTH, np.float32)
    padded[: len(vector)] = vector
    sketch = (padded * _signs(rows)).reshape(rows, WIDTH).sum(0)
    return np.asarray(np.clip(sketch, -65_504, 65_504), np.float16)


@lru_cache(maxsize=8)
def _signs(rows: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).choice(np.array([-1.0, 1.0], np.float32), rows * WIDTH)
