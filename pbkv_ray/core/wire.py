"""How small records travel between processes."""

from collections.abc import Callable
from typing import Any, ClassVar


class Record:
    """Base of dataclasses that are pickled by the thousand: as their class and values. What `dataclass` itself gives to
    frozen, slotted classes looks all fields up for every object, at three times the cost. No keyword-only fields."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(self), tuple([getattr(self, name) for name in self.__match_args__])
