"""What an engine has said of itself, as the plain numbers that `core.live` shows."""

from collections.abc import Mapping

from pbkv_ray.engine.facts import Evicted, Fact, Overseen, Pools, Prefetched

_PREFETCH = ("useful", "late", "wasted")


class Vitals:
    """The newest of each kind of fact; `heard` on the receiver's thread, `numbers` on the replica's loop."""

    def __init__(self) -> None:
        self._numbers: dict[str, float] = {}
        self.lru_in_charge = False  # by the guard, or by an operator's order

    def heard(self, fact: Fact) -> None:
        match fact:
            case Pools():
                found: Mapping[str, float] = fact.tokens
            case Prefetched():
                found = {f"prefetch_{name}": fact.tokens.get(name, 0) for name in _PREFETCH}
            case Evicted():
                found = {f"evicted_{tier}_tokens": sum(by.values()) for tier, by in fact.tokens.items()}
            case Overseen():
                self.lru_in_charge = fact.state != "policy"
                found = {"shadow_prompt_tokens": fact.prompt, "shadow_cached_tokens": fact.lru} if fact.watches else {}
            case _:
                return
        self._numbers = {**self._numbers, **found}  # replaced as a whole: the other thread reads it

    def numbers(self) -> Mapping[str, float]:
        return self._numbers
