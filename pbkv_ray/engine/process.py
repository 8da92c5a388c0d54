"""The processes of one SGLang engine: started from a thread that lives as long, watched, ended without a trace.

SGLang's own means are too broad for a process that does more than serve one engine: its shutdown kills every
child of the process, and its watchdog ends the process itself. Both are replaced here by the engine's own
processes. What SGLang does for the other direction is kept: scheduler and detokenizer ask the kernel to be
killed when the *thread* that started them ends (PR_SET_PDEATHSIG), hence the thread here.
"""

import atexit
import contextlib
import logging
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from pbkv_ray.errors import EngineError

logger = logging.getLogger(__name__)


_one = threading.Lock()  # held by the engine that this process has: SGLang keeps an engine's settings in globals


class EngineProcesses:
    """Runs `start` (which makes an `sglang.Engine`) in a thread of its own and keeps its processes.

    `start` is given what to call when the part of the engine that is in this process has failed.

    engine: the sglang.Engine. `dead` is None while all of its processes live, else what happened to them.
    Raises EngineError when the engine does not start, or when this process has an engine already.
    """

    def __init__(self, start: Callable[[Callable[[str], None]], Any], on_death: Callable[[str], None]) -> None:
        if not _one.acquire(blocking=False):
            raise EngineError("this process has an SGLang engine; shut it down first, or use another process")
        self.dead: str | None = None
        self._reason: str | None = None
        self._on_death = on_death
        self._stop = threading.Event()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._engine: Any = None
        self._processes: dict[str, BaseProcess] = {}
        self._owned: list[psutil.Process] = []  # psutil tells a process from a later one with the same pid
        self._closing = threading.Lock()
        _survive_sigquit()
        self._thread = threading.Thread(target=self._hold, args=(start,), name="sglang-engine", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self._thread.join()
            _forget_metrics()
            _one.release()
            raise EngineError(f"the SGLang engine did not start: {self._failure}") from self._failure

    @property
    def engine(self) -> Any:
        return self._engine

    @property
    def pids(self) -> frozenset[int]:
        """The engine's own processes: schedulers and detokenizers."""
        return frozenset(process.pid for process in self._owned)

    def fail(self, reason: str) -> None:
        """Give the engine up: its processes are killed, and the watch sees it."""
        self._reason = reason
        for process in self._owned:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def shutdown(self, timeout_s: float = 30.0) -> None:
        """End the engine's processes, wait until they are gone. Safe to call again."""
        with self._closing:
            if self._stop.is_set():
                return
            self._stop.set()
            _kill(self._owned, timeout_s)
            self._thread.join(timeout_s)
            _forget_metrics()
            _one.release()

    def _hold(self, start: Callable[[Callable[[str], None]], Any]) -> None:
        before = set(psutil.Process().children())
        try:
            self._engine = start(self.fail)
        except BaseException as error:
            self._failure = error
            # A scheduler that failed leaves its siblings waiting for it.
            _kill([child for child in psutil.Process().children() if child not in before and _is_sglangs(child)], 10.0)
            self._started.set()
            return
        atexit.unregister(self._engine.shutdown)
        atexit.register(self.shutdown)
        watchdog = self._engine.tokenizer_manager._subprocess_watchdog
        self._processes = dict(zip(watchdog._names, watchdog._processes, strict=True))
        watchdog.stop()
        with contextlib.suppress(psutil.NoSuchProcess):
            self._owned = [psutil.Process(process.pid) for process in self._processes.values()]
        self._started.set()
        self._watch()
        atexit.unregister(self.shutdown)

    def _watch(self) -> None:
        while not self._stop.is_set():
            gone = wait([process.sentinel for process in self._processes.values()], timeout=0.5)
            if gone and not self._stop.is_set():
                for process in self._processes.values():
                    if process.sentinel in gone:
                        process.join(5.0)  # its files close a moment before it can be waited for
                names = [
                    f"{name} (pid {process.pid}) ended with code {process.exitcode}"
                    for name, process in self._processes.items()
                    if process.sentinel in gone
                ]
                self.dead = self._reason or "; ".join(names)
                logger.error("SGLang engine lost: %s", self.dead)
                _kill(self._owned, 10.0)  # the rest is of no use; on a GPU it holds the memory
                self._on_death(self.dead)
                self._stop.wait()  # stay: this thread is the parent the kernel watches


def _kill(processes: list[psutil.Process], timeout_s: float) -> None:
    """Kill the processes and their descendants, and wait for them."""
    doomed = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            doomed += process.children(recursive=True)
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(doomed, timeout=timeout_s)
    if alive:
        logger.error("processes %s of the SGLang engine outlived SIGKILL", [process.pid for process in alive])


def _is_sglangs(process: psutil.Process) -> bool:
    """SGLang names its processes once they run; until then they are Python's spawned ones."""
    try:
        line = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
    return line.startswith("sglang::") or "multiprocessing.spawn" in line


def _forget_metrics() -> None:
    """Unregister what SGLang's tokenizer manager registered for good; else this process could not start another."""
    from prometheus_client import REGISTRY

    names = REGISTRY._names_to_collectors
    for collector in {collector for name, collector in list(names.items()) if name.startswith("sglang:")}:
        REGISTRY.unregister(collector)


def _survive_sigquit() -> None:
    """A failing scheduler sends its parent SIGQUIT; by default that would end this process with a core dump.

    The watch thread sees the death by itself. Only the main thread may set a handler: in a Ray replica, whose
    user code runs elsewhere, the signal ends the replica, and Serve starts another.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
        signal.signal(signal.SIGQUIT, lambda *_: logger.error("a process of the SGLang engine failed (SIGQUIT)"))
