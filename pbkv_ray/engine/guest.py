"""The `sglang.Engine` as a guest: in a process whose signals and whose end are not SGLang's. Imports SGLang.

Left alone, SGLang's tokenizer manager takes over SIGTERM and SIGQUIT of the main thread's loop, and kills the whole
process when a child fails or its own loop does. Here the process keeps its signals, and the failure is told.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager
from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)


def start(arguments: dict[str, Any], on_failure: Callable[[str], None]) -> Any:
    """Make the engine. `on_failure` hears, in the engine's loop, that SGLang's receiving task has ended."""

    class GuestTokenizerManager(TokenizerManager):
        def auto_create_handle_loop(self) -> None:
            if getattr(self, "event_loop", None) is not None:
                return
            loop = asyncio.get_running_loop()
            self.event_loop: Any = loop
            task = loop.create_task(self.handle_loop())
            self.asyncio_tasks.add(task)
            task.add_done_callback(ended)

    def ended(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("SGLang's tokenizer manager failed", exc_info=error)
            on_failure(f"the tokenizer manager failed: {type(error).__name__}: {error}")

    def initialise(server_args: Any, port_args: Any) -> Any:
        return init_tokenizer_manager(server_args, port_args, GuestTokenizerManager)

    class GuestEngine(Engine):
        init_tokenizer_manager_func = staticmethod(initialise)

    return GuestEngine(**arguments)
