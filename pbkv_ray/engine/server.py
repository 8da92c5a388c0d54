"""One SGLang engine behind `core.calls.Transport`. Knows SGLang, never Ray.

The server lives in one event loop: that of its first call (SGLang's tokenizer manager keeps its tasks there).
"""

import asyncio
import contextlib
import json
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict
from typing import Any

from pbkv_ray.config import EngineOptions
from pbkv_ray.core.actions import PublishForecast
from pbkv_ray.core.calls import Call, Caller, Chunk
from pbkv_ray.core.misses import Missed
from pbkv_ray.engine.arguments import engine_arguments, served_name
from pbkv_ray.engine.cpu_platform import has_accelerator, select_platform
from pbkv_ray.engine.facts import CallMissed, Evicted, Fact, FactsReceiver, Overseen
from pbkv_ray.engine.hints import RPC_CHOOSE, owner_params
from pbkv_ray.engine.link import link_to
from pbkv_ray.engine.metrics import EngineMetrics
from pbkv_ray.engine.models import resolve_model
from pbkv_ray.engine.openai import OpenAIChat
from pbkv_ray.engine.orphans import mark_parent
from pbkv_ray.engine.policies import STOCK, RadixOptions
from pbkv_ray.engine.process import EngineProcesses
from pbkv_ray.engine.requests import prompt_of, reply_of, request_of, translated
from pbkv_ray.errors import ConfigError, EngineError, EngineLostError, InputError

HEALTH_POLL_S = 0.05
REPORT_POLLS = 50  # 2.5 s; the engine reports once a second (engine.facts)
MAX_MISSED = 4_096  # reports that wait for the end of their calls
DEATH_NOTICE_S = 1.0  # for the errors of the calls in flight to leave the process before it may end


class EngineServer:
    """Starts the engine (tens of seconds) and answers calls until `shutdown`.

    Raises InputError or SetupError for a model that cannot be had, EngineError when SGLang does not start.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        replica: str = "local",
        on_death: Callable[[str], None] | None = None,
        on_fact: Callable[[Fact], None] | None = None,
        hidden_states: bool = False,
    ) -> None:
        """`on_death` is told in the server's loop, after the calls in flight got their errors.

        `on_fact` hears what the engine reports (`engine.facts`), on another thread, if the policy is one of ours;
        with `hidden_states` also two vectors a call.
        """
        self.options = options
        self.replica = replica
        self.policy = options.policy  # as ordered last
        self._on_death = on_death
        self._openai: OpenAIChat | None = None
        self._created = int(time.time())
        self._open: set[str] = set()
        self.epoch = uuid.uuid4().hex  # new at every start: an engine that came back is empty
        accelerator = has_accelerator()
        self._facts = None
        self._missed: OrderedDict[str, tuple[Missed, ...]] = OrderedDict()  # of calls that run
        self._evicted: Evicted | None = None
        if on_fact is not None and options.policy not in STOCK:
            self._facts = FactsReceiver(lambda fact: self._heard(fact, on_fact), replica=replica, epoch=self.epoch)
        switches = {} if self._facts is None else {"facts": self._facts.endpoint, "hidden_states": hidden_states}
        arguments = engine_arguments(options, resolve_model(options.model), accelerator, **switches)
        select_platform(os.environ, accelerator)
        mark_parent(os.environ)
        self.metrics = EngineMetrics()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._processes = EngineProcesses(lambda fail: _start(arguments, fail), self._engine_died)
        self._link = None if options.policy in STOCK else link_to(self.engine)
        ends = {"hints": self._link, "facts": self._facts}
        self.metrics.channels = {name: end.count for name, end in ends.items() if end is not None}

    @property
    def engine(self) -> Any:
        """The sglang.Engine, for those who need a seam of it (`engine.link`)."""
        return self._processes.engine

    @property
    def manager(self) -> Any:
        """SGLang's TokenizerManager."""
        return self.engine.tokenizer_manager

    @property
    def pids(self) -> frozenset[int]:
        return self._processes.pids

    async def stream(self, call: Call) -> AsyncGenerator[Chunk, None]:
        """Answer `call` piece by piece; leaving the iterator early aborts the call in the scheduler."""
        self.enter()
        if call.call_id in self._open:
            raise InputError(f"call {call.call_id} is running already; a call needs an id of its own")
        started = time.perf_counter()
        sent, first, output = "", 0.0, None
        self._open.add(call.call_id)
        self.metrics.running += 1
        try:
            manager = self.manager
            prompt = await asyncio.to_thread(prompt_of, call, manager.tokenizer, int(manager.max_req_input_len))
            request = request_of(call, prompt, sessions=self.options.policy == "session")
            async with contextlib.aclosing(translated(manager.generate_request(request, None))) as outputs:
                async for output in outputs:
                    first = first or time.perf_counter() - started
                    text, meta = output["text"], output["meta_info"]
                    if meta["finish_reason"] is None:
                        yield Chunk(text[len(sent) :])
                        sent = text
            if output is None or output["meta_info"]["finish_reason"] is None:
                raise EngineError(f"the engine ended call {call.call_id} without an answer")
            missed = self._missed.pop(call.call_id, None)
            reply = reply_of(output, time.perf_counter() - started, first, self.replica, missed)
            self.metrics.finished(reply)
            yield Chunk(reply.text[len(sent) :], reply)
        except (GeneratorExit, asyncio.CancelledError):
            self.metrics.left += 1
            raise
        finally:
            self.metrics.running -= 1
            self._open.discard(call.call_id)
            self.abort(call.call_id)  # does nothing for a finished call

    def abort(self, call_id: str) -> None:
        """Stop a call, if it runs: its stream ends with reason "abort"."""
        for rid in [rid for rid in self.manager.rid_to_state if rid == call_id or rid.startswith(f"{call_id}_")]:
            self.manager.abort_request(rid)

    async def openai_chat(
        self, body: dict[str, Any], caller: Caller | None, cache_salt: str | None
    ) -> dict[str, Any] | AsyncGenerator[bytes, None]:
        """OpenAI's chat completions, see `engine.openai.OpenAIChat.answer`."""
        self.enter()
        if self._openai is None:
            self._openai = OpenAIChat(self.engine, served_name(self.options.model), self.abort)
        body = body if body.get("rid") else {**body, "rid": uuid.uuid4().hex}
        return await self._openai.answer(body, None if caller is None else owner_params(caller), cache_salt)

    async def models(self) -> dict[str, Any]:
        """The served models as OpenAI's /v1/models lists them."""
        name = served_name(self.options.model)
        entry = {"id": name, "object": "model", "created": self._created, "owned_by": "pbkv-ray"}
        return {"object": "list", "data": [entry]}

    def publish(self, hint: PublishForecast) -> None:
        """What a run calls next. Returns at once; a policy that does not look ahead ignores it."""
        if self._link is not None:
            self._link.publish(hint)

    async def retire(self, run_id: str, at_s: float | None = None) -> None:
        """The run has ended. SGLang's session-aware cache hears it as the end of a session."""
        if self._link is not None:
            self._link.retire(run_id, at_s)
        elif self.options.policy == "session":
            from sglang.srt.managers.io_struct import CloseSessionReqInput

            await self.manager.close_session(CloseSessionReqInput(session_id=run_id))

    def tick(self) -> None:
        """Call about every second: forecasts of a controller that is gone grow old by it."""
        if self._link is not None:
            self._link.tick()

    async def choose_policy(self, policy: str, **switches: Any) -> None:
        """Follow another policy, from an empty cache: for benchmarks. Only an idle engine of ours can.

        Raises EngineError when it is not idle, or what was published cannot be delivered.
        """
        link, payload = self._link, json.dumps(asdict(RadixOptions.of(policy, **switches)))
        if link is None or not await asyncio.to_thread(link.flush, 60.0):
            raise EngineError(f"the engine of replica {self.replica} cannot change its policy to {policy}")
        try:
            await asyncio.to_thread(lambda: self.engine.collective_rpc(RPC_CHOOSE, payload=payload))
        except AssertionError as error:  # how collective_rpc says that a rank raised
            raise EngineError(str(error)) from error

    async def switch_policy(self, policy: str, timeout_s: float = 10.0) -> None:
        """Another policy while it serves; the cache keeps what it holds. `lru` is SGLang's own order of eviction.

        Raises ConfigError for a policy that this engine cannot have, EngineError when it does not hear of it in time.
        """
        RadixOptions.of(policy)
        if policy == "session" or self._link is None:
            if policy == self.options.policy:
                return
            raise ConfigError(
                f"the engine of replica {self.replica} was started with policy {self.options.policy}, and cannot take "
                f"{policy} while it serves; one that was started with a policy of ours can take any but `session`"
            )
        if not await asyncio.to_thread(self._link.order, policy, timeout_s):
            raise EngineError(f"the engine of replica {self.replica} has not heard of policy {policy}; it is tried on")
        self.policy = policy
        for _ in range(REPORT_POLLS):  # so that `policy_state` does not tell of before
            if self._reported(policy):
                break
            await asyncio.sleep(HEALTH_POLL_S)

    def _reported(self, policy: str) -> bool:
        overseen = self.metrics.overseen
        if overseen is None:  # it has just started
            return False
        return (overseen.state == "ordered") == (policy == "lru") and policy in ("lru", overseen.policy)

    def policy_state(self) -> dict[str, Any]:
        """Which policy is wanted here, who is in charge, and what LRU would have hit; as of the last report."""
        state = {"started_with": self.options.policy, "policy": self.policy}
        if (overseen := self.metrics.overseen) is None:
            return state
        told = asdict(overseen)
        told["shadow_error"] = told.pop("error")  # "error" is what is said of an engine that does not obey
        return {**told, **state, "follows": overseen.policy}

    async def check_health(self, timeout_s: float = 20.0) -> None:
        """Ask the scheduler for one token. Raises EngineError when it is dead or gives no sign in `timeout_s`.

        Any output counts as a sign: a scheduler that is busy ignores the question and shows it lives by its work.
        """
        from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
        from sglang.srt.managers.io_struct import GenerateReqInput

        self.enter()
        manager, asked = self.manager, time.time()
        request = GenerateReqInput(
            rid=f"{HEALTH_CHECK_RID_PREFIX}_{uuid.uuid4().hex}",
            input_ids=[0],
            sampling_params={"max_new_tokens": 1, "temperature": 0.0},
            log_metrics=False,
        )

        async def ask() -> None:
            async for _ in manager.generate_request(request, None):
                return

        task = asyncio.create_task(ask())
        try:
            while manager.last_receive_tstamp <= asked:
                if self._processes.dead is not None or time.time() - asked > timeout_s:
                    raise EngineError(self._processes.dead or f"the scheduler gave no sign of life in {timeout_s:g} s")
                await asyncio.sleep(HEALTH_POLL_S)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            manager.rid_to_state.pop(request.rid, None)

    async def load(self) -> dict[str, Any]:
        """The scheduler's own account (SGLang's LoadInfo): running requests, waiting requests and the tokens of their
        prompts that no cache holds, tokens in use."""
        self.enter()
        (found,) = (await self.manager.get_loads())[:1]
        return {
            "running": found.num_running_reqs,
            "waiting": found.num_waiting_reqs,
            "waiting_tokens": found.num_waiting_uncached_tokens,
            "used_tokens": found.num_used_tokens,
        }

    def metrics_text(self) -> str:
        """SGLang's metrics (`sglang:*`) and ours (`pbkv_engine_*`) in Prometheus text form."""
        return self.metrics.text(self.replica)

    def shutdown(self) -> None:
        """End the engine; when it returns none of its processes is left. Safe to call again."""
        if self._link is not None:
            self._link.close()
        self._processes.shutdown()
        if self._facts is not None:
            self._facts.close()

    def enter(self) -> None:
        """Called at the start of every request: the engine must live, and the loop must be the first one."""
        if self._processes.dead is not None:
            raise EngineLostError(f"the engine of replica {self.replica} is dead: {self._processes.dead}")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise EngineError("this engine belongs to another event loop; call it from the loop of its first call")

    def _heard(self, fact: Fact, pass_on: Callable[[Fact], None]) -> None:
        """On the receiver's thread."""
        if isinstance(fact, CallMissed):
            self._missed[fact.call_id] = fact.spans
            if len(self._missed) > MAX_MISSED:
                self._missed.popitem(last=False)
            return
        if isinstance(fact, Evicted):
            self._evicted = fact
        elif isinstance(fact, Overseen):
            self.metrics.overseen = fact
        pass_on(fact)

    def _engine_died(self, reason: str) -> None:
        """Runs in the watch thread: nobody else would wake the calls that wait for the lost scheduler."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail_all, reason)

    def _fail_all(self, reason: str) -> None:
        self.metrics.engine_deaths += 1
        if self._on_death is not None:
            asyncio.get_running_loop().call_later(DEATH_NOTICE_S, self._on_death, reason)
        for rid, state in list(self.manager.rid_to_state.items()):
            finish = {"type": "abort", "message": f"the engine died: {reason}", "status_code": 503, "lost": True}
            state.finished = True
            state.out_list.append({"text": "", "output_ids": [], "meta_info": {"id": rid, "finish_reason": finish}})
            state.event.set()
            del self.manager.rid_to_state[rid]


def _start(arguments: dict[str, Any], on_failure: Callable[[str], None]) -> Any:
    policy = asyncio.get_event_loop_policy()
    from pbkv_ray.engine import guest

    # SGLang makes uvloop the policy of the process when it is imported; loops that exist could no longer start
    # subprocesses.
    asyncio.set_event_loop_policy(policy)
    return guest.start(arguments, on_failure)
