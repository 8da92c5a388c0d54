"""Where runs live and what replicas have told, as the controller sends it to the routers' copies of its table."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pbkv_ray.core.routing import Held
from pbkv_ray.core.wire import Record


@dataclass(frozen=True, slots=True)
class Place(Record):
    """One run. recent: tokens that its last calls had to compute, its first call left out.

    expected: tokens that its next call will bring, for the crowd at its home.
    """

    home: str | None = None
    parent: str | None = None
    held: Mapping[str, Held] = field(default_factory=dict)
    recent: tuple[int, ...] = ()
    expected: float = 0.0
    calls: int = 0

    @property
    def fresh(self) -> int:
        return min(self.recent) if len(self.recent) > 1 else 0


@dataclass(frozen=True, slots=True)
class ReplicaNews(Record):
    """A replica as last reported. `number` grows with every report; 0: it has never reported."""

    epoch: str
    number: int = 0
    queued_tokens: float = 0.0
    prefill_tokens_s: float = 0.0
    load_tokens_s: float = 0.0
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Changes(Record):
    """What `apply` takes. `places`: None for a run that has ended; `full`: it is all there is."""

    version: int
    full: bool
    places: Mapping[str, Place | None]
    replicas: Mapping[str, ReplicaNews]
