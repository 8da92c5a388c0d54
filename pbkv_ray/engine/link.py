"""HintLink: brings forecasts and endings to every rank of an engine, without ever making its caller wait.

SGLang's broadcast (`Engine.collective_rpc`) blocks, has no time-out and belongs to one thread. That thread is here:
it takes whatever has been published since the last broadcast came back, newest forecast per run, and sends it in
one message. A slow scheduler makes messages rarer and larger, a dead one makes the table full; both are counted.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pbkv_ray.core.actions import PublishForecast
from pbkv_ray.engine.hints import RPC, encode, order

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LinkCount:
    sent: int = 0  # broadcasts that came back
    failed: int = 0  # broadcasts that raised
    forecasts: int = 0  # forecasts sent
    coalesced: int = 0  # forecasts replaced by a newer one before they were sent
    dropped: int = 0  # forecasts and endings lost to the bounds


class HintLink:
    """One engine's hints. All methods but `order` and `flush` return at once; any thread may call them.

    send: delivers a payload to all ranks and returns when they have it.
    """

    def __init__(
        self,
        send: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.time,
        max_pending: int = 20_000,
        max_in_message: int = 256,
        retry_s: float = 1.0,
    ) -> None:
        self.count = LinkCount()
        self._send = send
        self._clock = clock
        self._max_pending = max_pending
        self._max_in_message = max_in_message
        self._forecasts: OrderedDict[str, PublishForecast] = OrderedDict()
        self._ended: OrderedDict[str, float] = OrderedDict()
        self._ordered: str | None = None
        self._ticked = False
        self._sending = False
        self._retry_s = retry_s
        self._closed = threading.Event()
        self._news = threading.Condition()
        self._worker = threading.Thread(target=self._run, name="pbkv-hints", daemon=True)
        self._worker.start()

    def publish(self, hint: PublishForecast) -> None:
        """Replaces an older forecast of the run that has not been sent yet; an older version is ignored."""
        with self._news:
            waiting = self._forecasts.get(hint.run_id)
            if hint.run_id in self._ended:
                return
            if waiting is not None:
                self.count.coalesced += 1
                if hint.version < waiting.version:
                    return
            self._forecasts[hint.run_id] = hint
            self._bound(self._forecasts)
            self._news.notify_all()

    def retire(self, run_id: str, at_s: float | None = None) -> None:
        """The run has ended; its nodes go first."""
        with self._news:
            self._forecasts.pop(run_id, None)
            self._ended[run_id] = self._clock() if at_s is None else at_s
            self._bound(self._ended)
            self._news.notify_all()

    def tick(self) -> None:
        """Brings the clock to the engine although nothing happened: old forecasts age. Call it about every second."""
        with self._news:
            self._ticked = True
            self._news.notify_all()

    def order(self, policy: str, timeout_s: float) -> bool:
        """Another policy from now on; a later order replaces it. True once it is delivered, False if it is not in
        time: then it is tried on, before anything else. Waits, unlike the other methods."""
        with self._news:
            self._ordered = policy
            self._news.notify_all()
            return self._news.wait_for(lambda: self._ordered is None or self._closed.is_set(), timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was published is delivered; False if it is not in time."""
        with self._news:
            return self._news.wait_for(lambda: not (self._waiting() or self._sending), timeout_s)

    def close(self, timeout_s: float = 1.0) -> None:
        """Send nothing more. A broadcast that is under way is not waited for longer than `timeout_s`."""
        self._closed.set()
        with self._news:
            self._news.notify_all()
        self._worker.join(timeout_s)

    def _bound(self, table: "OrderedDict[str, PublishForecast] | OrderedDict[str, float]") -> None:
        while len(table) > self._max_pending:
            table.popitem(last=False)
            self.count.dropped += 1

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting() or self._closed.is_set())
                if self._closed.is_set():
                    return
                ordered = self._ordered
                forecasts = [self._forecasts.popitem(last=False)[1] for _ in range(self._room(self._forecasts))]
                ended = dict(self._ended.popitem(last=False) for _ in range(self._room(self._ended)))
                self._ticked, self._sending = False, True
            try:
                if ordered is not None:
                    self._send(order(ordered))
                    self._obeyed(ordered)
                self._send(encode(forecasts, ended, self._clock()))
                self.count.sent += 1
                self.count.forecasts += len(forecasts)
            except Exception as error:
                self.count.failed += 1
                if self.count.failed & (self.count.failed - 1) == 0:  # 1, 2, 4, 8 ...
                    logger.warning("hint broadcast failed (%d so far): %s", self.count.failed, error)
                with self._news:  # a forecast is soon replaced by the next one, an ending is said only once
                    self._ended = OrderedDict(ended) | self._ended
                    self._bound(self._ended)
                self._closed.wait(self._retry_s)
            with self._news:
                self._sending = False
                self._news.notify_all()

    def _obeyed(self, policy: str) -> None:
        with self._news:
            if self._ordered == policy:  # else there is another order by now
                self._ordered = None
                self._news.notify_all()

    def _waiting(self) -> bool:
        return bool(self._forecasts or self._ended or self._ticked or self._ordered)

    def _room(self, table: "OrderedDict[str, PublishForecast] | OrderedDict[str, float]") -> int:
        return min(len(table), self._max_in_message)


def link_to(engine: object) -> HintLink:
    """A link to an `sglang.Engine`. Nobody else may use the engine's `collective_rpc` from then on."""
    return HintLink(lambda payload: engine.collective_rpc(RPC, payload=payload))  # type: ignore[attr-defined]
