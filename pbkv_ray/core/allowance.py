"""So many a second and no more: a bucket that is as large as a second's worth."""


class Allowance:
    """`rate` a second, on the caller's clock. Starts full."""

    def __init__(self, rate: float) -> None:
        self._rate = self._left = rate
        self._at_s = 0.0

    def take(self, at_s: float) -> bool:
        """Whether there is one left at `at_s`; takes it."""
        self._left = min(self._rate, self._left + self._rate * max(0.0, at_s - self._at_s))
        self._at_s = max(self._at_s, at_s)
        if self._left < 1:
            return False
        self._left -= 1
        return True
