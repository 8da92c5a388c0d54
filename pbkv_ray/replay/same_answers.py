"""`python -m pbkv_ray.replay.same_answers`: outputs never change, whatever is cached where, under any policy.

Greedy, in float32 (bf16 may differ by batch shape, not by policy), one prompt at a time: cold, from the device tier,
and after everything was pushed to the host. The cold answers of the stock engine are what all others must equal.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pbkv_ray.config import POLICIES, EngineOptions
from pbkv_ray.core.calls import Caller
from pbkv_ray.engine.hints import owner_params
from pbkv_ray.engine.models import cache_dir, tiny_model
from pbkv_ray.engine.policies import STOCK
from pbkv_ray.engine.requests import cached_tokens
from pbkv_ray.engine.server import EngineServer

OURS = tuple(policy for policy in POLICIES if policy not in STOCK)
PASSES = ("cold", "device", "host")


def prompts(count: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Token ids of `count` prompts in families that share beginnings of many lengths."""
    dice = random.Random(seed)
    families = [[dice.randrange(3, vocabulary) for _ in range(dice.randrange(40, 160))] for _ in range(count // 8 + 1)]
    made = []
    for number in range(count):
        family = families[number % len(families)]
        shared = family[: dice.randrange(16, len(family) + 1)]
        made.append([*shared, *(dice.randrange(3, vocabulary) for _ in range(dice.randrange(8, 60)))])
    return made


class Examiner:
    """Asks one engine the same prompts in three states of its cache."""

    def __init__(self, server: EngineServer, policy: str) -> None:
        self._server, self._policy = server, policy

    async def answers(self, asked: Sequence[Sequence[int]], tokens: int) -> dict[str, list[tuple[list[int], str]]]:
        """Pass -> per prompt its token ids, and where most of the prompt came from. Small groups fit the pool."""
        got: dict[str, list[tuple[list[int], str]]] = {name: [] for name in PASSES}
        group = 8
        for start in range(0, len(asked), group):
            part = asked[start : start + group]
            flushed = await self._server.manager.flush_cache(timeout_s=60.0)
            assert flushed.success, "the engine is not idle between two groups of prompts"
            for name in PASSES:
                if name == "host":
                    await self._push_out(start)
                for number, prompt in enumerate(part, start):
                    got[name].append(await self._ask(prompt, tokens, f"run{number % 4}", f"agent{number % 3}"))
        return got

    async def _push_out(self, seed: int) -> None:
        """Demotes all by filling the device with foreign prompts; the host tier is larger, and keeps the copies."""
        dice = random.Random(f"filler {seed}")
        pool = self._server.options.device_pool_tokens
        length = self._server.options.context_length - 32
        for _ in range(pool // length + 1):
            await self._ask([dice.randrange(3, 250) for _ in range(length)], 1, None, "")

    async def _ask(self, prompt: Sequence[int], tokens: int, run: str | None, agent: str) -> tuple[list[int], str]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        params: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        if run is not None:
            params["custom_params"] = owner_params(Caller(f"{self._policy}:{run}", "same", agent, 0))
        request = GenerateReqInput(
            input_ids=list(prompt),
            sampling_params=params,
            stream=False,
            session_id=run if self._policy == "session" else None,
        )
        output: dict[str, Any] = await anext(self._server.manager.generate_request(request, None))
        device, host = cached_tokens(output["meta_info"])
        return list(output["output_ids"]), "host" if host > device else "device" if device else "none"


async def examine(options: EngineOptions, policies: Sequence[str], count: int, tokens: int = 8) -> dict[str, Any]:
    """{"policies": {name: {"different": answers unlike the reference, "from": {pass: prompts served there}}}}.

    The reference is the first policy's cold pass. Policies of ours share one engine, stock ones have their own.
    """
    reference: list[list[int]] = []
    result: dict[str, Any] = {}
    server: EngineServer | None = None
    key = ""
    try:
        for policy in sorted(policies, key=lambda name: (name not in STOCK, POLICIES.index(name))):
            wanted = policy if policy in STOCK else "ours"
            if wanted != key:
                if server is not None:
                    await asyncio.to_thread(server.shutdown)
                server = await asyncio.to_thread(EngineServer, replace(options, policy=policy), replica=wanted)
                key = wanted
            assert server is not None
            if policy not in STOCK:
                await server.manager.flush_cache(timeout_s=60.0)  # waits until the engine is idle
                await server.choose_policy(policy)
            asked = prompts(count, int(server.manager.model_config.vocab_size))
            got = await Examiner(server, policy).answers(asked, tokens)
            reference = reference or [answer for answer, _ in got["cold"]]
            different = {
                name: sum(answer != expected for (answer, _), expected in zip(got[name], reference, strict=True))
                for name in PASSES
            }
            origin = {name: _count(source for _, source in got[name]) for name in PASSES}
            result[policy] = {"different": different, "from": origin}
    finally:
        if server is not None:
            await asyncio.to_thread(server.shutdown)
    return {"policies": result, "setup": {"prompts": count, "output_tokens": tokens, "dtype": options.dtype}}


def _count(sources: Any) -> dict[str, int]:
    counted = {"none": 0, "device": 0, "host": 0}
    for source in sources:
        counted[source] += 1
    return counted


def small_engine(model: Path) -> EngineOptions:
    """A pool that a group of prompts fits into and fillers push it out of, and a host tier that keeps it."""
    return EngineOptions(
        model=str(model),
        device_pool_tokens=3_072,
        context_length=1_024,
        host_pool_ratio=4.0,
        dtype="float32",
        extra={"skip_tokenizer_init": True},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    options = small_engine(tiny_model(cache_dir() / "models" / "same-answers-tiny"))
    result = asyncio.run(examine(options, chosen.policies.split(","), chosen.prompts))
    text = json.dumps(result, indent=1)
    if chosen.json is not None:
        chosen.json.write_text(text + "\n")
    print(text)
    raise SystemExit(any(any(row["different"].values()) for row in result["policies"].values()))


if __name__ == "__main__":
    main()
