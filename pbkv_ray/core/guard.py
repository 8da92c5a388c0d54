"""Never worse than LRU for long: a policy that keeps losing against the shadow hands over to LRU, and may try again.

The debt is what the policy has lost against LRU (`core.shadow`) beyond an allowance, never below zero: earlier gains
buy no later losses. At `limit` pools of tokens LRU takes over, for `rest` pools of served prompt tokens; twice as long
each time, until the policy has paid its way for as long as its next rest would be. So a policy that always loses
costs the allowance, and of n pools of prompts about log2(n / rest) times the limit. (A one-sided CUSUM: a large loss
is seen soon, a small one late.)

While LRU is in charge, what it hits in truth is compared with what the shadow says: once the tier has turned over
twice, the difference is the shadow's own error here, and is taken off its later figures.

Everything is counted in tokens, nothing in seconds: the ranks of an engine decide alike, and an idle engine waits.
"""

from dataclasses import dataclass
from typing import Literal

from pbkv_ray.errors import ConfigError

Mode = Literal["policy", "fallback"]


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """allowance: share of the prompt tokens that may be lost for good. limit, rest, most_rest: pools of tokens."""

    allowance: float = 0.01
    limit: float = 0.25
    rest: float = 32.0
    most_rest: float = 2_048.0
    most_error: float = 0.05  # of the shadow's hit rate that is believed to be its own

    def __post_init__(self) -> None:
        if not 0 <= self.allowance < 1 or self.limit <= 0 or not 0 < self.rest <= self.most_rest:
            raise ConfigError(f"a guard needs 0 <= allowance < 1, limit above 0 and 0 < rest <= most_rest, got {self}")


@dataclass(slots=True)
class GuardCount:
    """Tokens since the start. lru: what the shadow says LRU would have hit."""

    prompt: int = 0
    hit: int = 0
    lru: int = 0
    fallbacks: int = 0
    returns: int = 0


class Guard:
    """One engine's. Single-threaded."""

    def __init__(self, pool_tokens: int, options: GuardOptions | None = None) -> None:
        self.options = options or GuardOptions()
        self.count = GuardCount()
        self.mode: Mode = "policy"
        self.debt = 0.0  # tokens
        self.error = 0.0  # share of the prompt tokens by which the shadow is too high
        self._pool = pool_tokens
        self._rest = self.options.rest
        self._since = 0  # prompt tokens since the mode changed
        self._tested = self._over = 0.0  # tokens of the test of the shadow: prompts, and how much it said too many

    @property
    def rest_tokens(self) -> int:
        """Prompt tokens until the policy may try again; 0 while it is in charge."""
        return max(0, round(self._rest * self._pool) - self._since) if self.mode == "fallback" else 0

    def served(self, prompt: int, hit: int, lru: int) -> bool:
        """A call of `prompt` tokens found `hit` on the device; LRU would have found `lru`. True: the mode changes."""
        self.counted(prompt, hit, lru)
        options = self.options
        self._since += prompt
        if self.mode == "fallback":
            return self._rested(prompt, lru - hit)
        lost = lru - hit - (options.allowance + self.error) * prompt
        self.debt = max(0.0, self.debt + lost)
        if self.debt <= options.limit * self._pool:
            if self._since > self._rest * self._pool:  # it has earned a short rest should it fail again
                self._rest = options.rest
            return False
        self._turn("fallback")
        self.count.fallbacks += 1
        return True

    def counted(self, prompt: int, hit: int, lru: int) -> None:
        """As `served`, but nobody acts on it."""
        self.count.prompt += prompt
        self.count.hit += hit
        self.count.lru += lru

    def _rested(self, prompt: int, over: int) -> bool:
        if self._since > 2 * self._pool:
            self._tested += prompt
            self._over += over
        if self._since < self._rest * self._pool:
            return False
        if self._tested > 0:
            self.error = min(max(self._over / self._tested, 0.0), self.options.most_error)
        self._rest = min(2 * self._rest, self.options.most_rest)
        self._turn("policy")
        self.count.returns += 1
        return True

    def reset(self) -> None:
        """Another policy is in charge, or an operator was: nothing that was seen says anything of it."""
        self._rest = self.options.rest
        self._turn("policy")

    def _turn(self, mode: Mode) -> None:
        self.mode, self.debt, self._since = mode, 0.0, 0
        self._tested = self._over = 0.0
