"""What the scheduler tells the outside: residency, evictions, prefetch outcomes, hidden states. Both ends.

Rank 0 pushes over a zmq socket in a directory of ours that only this user can enter; JSON and raw half-precision
vectors, no pickle. The scheduler never waits: what does not fit into the socket's queue is dropped and counted.
"""

import json
import logging
import tempfile
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import zmq

from pbkv_ray.core.events import Residency
from pbkv_ray.core.misses import Missed

logger = logging.getLogger(__name__)

_QUEUE = 1_024  # messages a socket holds before they are dropped
_MAX_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Evicted:
    """Since the engine started. tokens: tier -> reason -> tokens. recent: (tier, tokens, reason, score) of the last."""

    tokens: dict[str, dict[str, int]]
    partial: int
    fallbacks: int
    failures: int
    recent: tuple[tuple[str, int, str, float], ...] = ()
    trusted: bool = True  # False: the policy is given up until the cache is flushed, LRU decides


@dataclass(frozen=True, slots=True)
class CallMissed:
    """What a call did not find on the device, when it was admitted."""

    call_id: str
    spans: tuple[Missed, ...]


@dataclass(frozen=True, slots=True)
class Overseen:
    """Who decides what leaves the cache: "policy", "fallback" (the guard put LRU in charge) or "ordered" (an operator
    did). Tokens since the engine started: of prompts, found on the device, and what LRU would have found, while
    nobody ordered anything. rest: prompt tokens until a policy that fell back is tried again. debt, error: core.guard.
    """

    policy: str
    state: Literal["policy", "fallback", "ordered"]
    watches: bool
    prompt: int
    hit: int
    lru: int
    fallbacks: int
    returns: int
    debt: int
    rest: int
    error: float
    failures: int


@dataclass(frozen=True, slots=True)
class Prefetched:
    """Tokens since the engine started, by what became of them (core.prefetch.PrefetchCount)."""

    tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class Pools:
    """How full the tiers are (engine.pools), in tokens."""

    tokens: dict[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class HiddenState:
    """Hidden state [hidden size] of a call's last prefill token, or of its last decoded one: post-norm, or of the inner
    layers that `EngineOptions.extra` asked SGLang for. blocks: with "prefill", core.ghost.block_hashes of the prompt.
    """

    call_id: str
    token: Literal["prefill", "decoded"]
    vector: npt.NDArray[np.float16]
    blocks: npt.NDArray[np.int64] | None = None


Fact = Residency | Evicted | Overseen | Prefetched | Pools | HiddenState | CallMissed


@dataclass(slots=True)
class ReceiverCount:
    received: int = 0
    malformed: int = 0
    dropped: int = 0  # by the scheduler, as it said itself
    failed: int = 0  # facts that the listener raised on


class FactsReceiver:
    """The server's end. `listener` gets every fact on a thread of the receiver's own; it must not block."""

    def __init__(self, listener: Callable[[Fact], None], *, replica: str = "local", epoch: str = "") -> None:
        self.count = ReceiverCount()
        self._listener = listener
        self._replica = replica
        self._epoch = epoch
        self._folder = tempfile.TemporaryDirectory(prefix="pbkv-facts-")  # mode 0700
        self.endpoint = f"ipc://{self._folder.name}/facts"
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUE)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.endpoint)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pbkv-facts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._socket.close()
        self._folder.cleanup()

    def _run(self) -> None:
        while not self._closed.is_set():
            if not self._socket.poll(100):
                continue
            frames = self._socket.recv_multipart()
            try:
                fact = self._read(frames)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                self.count.malformed += 1
                logger.warning("a fact that is none of ours (%s)", error)
                continue
            self.count.received += 1
            try:
                self._listener(fact)
            except Exception:
                self.count.failed += 1
                logger.exception("the listener failed on a fact")

    def _read(self, frames: list[bytes]) -> Fact:
        body = json.loads(frames[0])
        self.count.dropped = max(self.count.dropped, int(body["dropped"]))
        match body["kind"]:
            case "residency":
                tokens = {run: (int(device), int(host)) for run, (device, host) in body["tokens"].items()}
                at_s, queued, pace = float(body["at"]), int(body["queued"]), float(body.get("pace", 0.0))
                return Residency(self._replica, self._epoch, at_s, tokens, queued, pace)
            case "evicted":
                recent = tuple((str(t), int(n), str(r), float(s)) for t, n, r, s in body["recent"])
                failed = body["fallbacks"], body["failures"]
                return Evicted(body["tokens"], body["partial"], *failed, recent, bool(body.get("trusted", True)))
            case "missed":
                return CallMissed(str(body["call"]), tuple(Missed(*span) for span in body["spans"]))
            case "overseen":
                return Overseen(**{name: body[name] for name in Overseen.__slots__})
            case "prefetched":
                return Prefetched(body["tokens"])
            case "pools":
                return Pools({str(name): int(tokens) for name, tokens in body["tokens"].items()})
            case "hidden":
                vector = np.frombuffer(frames[1], np.float16)
                blocks = np.frombuffer(frames[2], np.int64) if len(frames) > 2 else None
                return HiddenState(body["call"], body["token"], vector, blocks)
        raise ValueError(f"kind {body['kind']!r}")


@dataclass(slots=True)
class FactsSender:
    """The scheduler's end. Single-threaded, never waits."""

    endpoint: str
    interval_s: float = 1.0
    dropped: int = 0
    _due_s: float = 0.0
    _socket: Any = field(default=None)

    def __post_init__(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUE)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(self.endpoint)

    def due(self) -> bool:
        """Whether it is time for the coalesced reports; then they are not due again for `interval_s`."""
        now = time.monotonic()
        if now < self._due_s:
            return False
        self._due_s = now + self.interval_s
        return True

    def send(self, kind: str, body: dict[str, Any], *raw: bytes) -> None:
        text = json.dumps({"kind": kind, "dropped": self.dropped, **body}, separators=(",", ":"))
        try:
            self._socket.send_multipart([text.encode(), *raw], flags=zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1

    def hidden(
        self,
        call_id: str,
        token: Literal["prefill", "decoded"],
        vector: npt.NDArray[np.float16],
        blocks: "array[int] | None" = None,
    ) -> None:
        raw = [vector.tobytes()] if blocks is None else [vector.tobytes(), blocks.tobytes()]
        self.send("hidden", {"call": call_id, "token": token}, *raw)
