"""Tells LangChain's handlers of our calls, as a chat model of LangChain's would: LangGraph's "messages" stream,
`astream_events` and tracers then show an agent's tokens as they come. Where nobody listens, a call pays one look.

What a handler raises is LangChain's to log; a call never fails for it.
"""

from collections.abc import Sequence
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ChatMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, LLMResult
from langchain_core.runnables.config import get_async_callback_manager_for_config, var_child_runnable_config

from pbkv_ray.core.calls import Call, Message, Reply

NAME = "pbkv"  # of the chat model, where tracers show one


class Listeners:
    """Of one call. The message's id is the call's."""

    def __init__(self, told: AsyncCallbackManagerForLLMRun, call: Call) -> None:
        self._told = told
        self._call = call
        self._pieces: list[str] = []

    @classmethod
    async def of(cls, call: Call) -> Self | None:
        """None if nobody listens to what models say."""
        config = var_child_runnable_config.get()
        if not config or not config.get("callbacks"):
            return None
        manager = get_async_callback_manager_for_config(config)
        if all(handler.ignore_llm for handler in manager.handlers):
            return None
        (told,) = await manager.on_chat_model_start({"name": NAME}, [_messages(call.messages)], name=NAME)
        return cls(told, call)

    async def piece(self, text: str) -> None:
        self._pieces.append(text)
        chunk = ChatGenerationChunk(message=AIMessageChunk(content=text, id=self._call.call_id))
        await self._told.on_llm_new_token(text, chunk=chunk)

    async def ended(self, reply: Reply) -> None:
        usage = {
            "input_tokens": reply.prompt_tokens,
            "output_tokens": reply.output_tokens,
            "total_tokens": reply.prompt_tokens + reply.output_tokens,
        }
        said: Any = AIMessage("".join(self._pieces), id=self._call.call_id, usage_metadata=usage)
        await self._told.on_llm_end(LLMResult(generations=[[ChatGeneration(message=said)]]))

    async def failed(self, error: BaseException) -> None:
        await self._told.on_llm_error(error)


def _messages(messages: Sequence[Message]) -> list[BaseMessage]:
    kinds: dict[str, type[BaseMessage]] = {"system": SystemMessage, "user": HumanMessage, "assistant": AIMessage}
    return [
        kinds[message.role](message.content)
        if message.role in kinds
        else ChatMessage(content=message.content, role="tool")
        for message in messages
    ]
