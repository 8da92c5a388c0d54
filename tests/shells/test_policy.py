"""The kill switch from the command line down to the engines' answers; the engines are functions here."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from typer.testing import CliRunner

from deployments.gateway import GatewayOptions, create_app
from pbkv_ray.cli import build_app
from tests.shells.fake_runs import FakeChat, FakeRunService
from tests.shells.gateway_kit import served

KEY = "operator-0123456789abcdef"


class FakeEngines:
    """Two replicas; `stubborn` does not obey."""

    def __init__(self, stubborn: str | None = None) -> None:
        self.policy = {"one": "pbkv+", "two": "pbkv+"}
        self.stubborn = stubborn

    async def __call__(self, policy: str | None, replica: str | None) -> Mapping[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name in self.policy:
            found[name] = {"prompt": 1_000, "hit": 500, "lru": 400, "fallbacks": 0, "state": "policy"}
            if policy is not None and replica in (None, name):
                if name == self.stubborn:
                    found[name]["error"] = "it does not hear"
                else:
                    self.policy[name] = policy
            found[name]["policy"] = self.policy[name]
        return found


async def pbkv(engines: Any, *command: str, key: str = KEY) -> Any:
    """The command against a gateway with a key."""
    options = GatewayOptions(api_keys=(KEY,), salt_secret="a secret of the server")
    app = create_app(FakeRunService(), FakeChat(), options, workflows={}, policies=engines)
    async with served(app) as url:
        run = CliRunner(env={"PBKV_API_KEY": key, "PBKV_URL": url}).invoke
        return await asyncio.to_thread(run, build_app(), ["policy", *command])


async def test_lru_is_put_in_charge_of_all_engines_or_of_one() -> None:
    engines = FakeEngines()
    assert (await pbkv(engines, "set", "lru")).exit_code == 0
    assert engines.policy == {"one": "lru", "two": "lru"}
    assert (await pbkv(engines, "set", "pbkv+", "--replica", "two")).exit_code == 0
    assert engines.policy == {"one": "lru", "two": "pbkv+"}


async def test_show_says_who_is_in_charge_and_what_lru_would_have_hit() -> None:
    shown = await pbkv(FakeEngines(), "show", "--json")
    state = {"prompt": 1_000, "hit": 500, "lru": 400, "fallbacks": 0, "state": "policy", "policy": "pbkv+"}
    assert json.loads(shown.output) == {"replicas": {"one": state, "two": state}}
    table = (await pbkv(FakeEngines(), "show")).output
    assert "0.500" in table and "0.400" in table


async def test_what_went_wrong_is_said() -> None:
    async def nobody(policy: str | None, replica: str | None) -> Mapping[str, dict[str, Any]]:
        return {}

    said = [
        str(answer.exception)
        for answer in (
            await pbkv(FakeEngines(), "set", "best"),
            await pbkv(FakeEngines(), "set", "lru", "--replica", "three"),
            await pbkv(FakeEngines(stubborn="two"), "set", "lru"),
            await pbkv(nobody, "set", "lru"),
            await pbkv(FakeEngines(), "set", "lru", key="another-key-0123456789"),
        )
    ]
    assert "policy 'best' is unknown; known are lru" in said[0]
    assert "replica 'three' does not exist; there are one, two" in said[1]
    assert said[2] == "two: it does not hear"
    assert "no engine answered" in said[3]
    assert "no valid API key" in said[4]
