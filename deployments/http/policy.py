"""/v1/policy: which cache policy each engine follows, and the switch that puts another, or plain LRU, in charge."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field

from deployments.http import models
from deployments.http.models import Json
from pbkv_ray.config import SERVED_POLICIES
from pbkv_ray.errors import InputError, NotFoundError, UnavailableError

# (policy or None to look only, replica or None for all) -> replica -> its state, with "error" if it did not obey
Policies = Callable[[str | None, str | None], Awaitable[Mapping[str, Json]]]


async def no_policies(policy: str | None, replica: str | None) -> Mapping[str, Json]:
    """A gateway without engines."""
    return {}


class PolicyChoice(models.Body):
    policy: Annotated[str, Field(max_length=64)]
    replica: Annotated[str | None, Field(max_length=models.MAX_ID_LENGTH)] = None


def router(policies: Policies) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/policy", tags=["server"])
    async def show() -> Json:
        """Per replica: the policy that it was started with and the one that it follows, who is in charge ("policy",
        "fallback": its guard put LRU in charge, "ordered": somebody did), and what LRU would have hit."""
        return {"replicas": dict(await policies(None, None))}

    @routes.put("/v1/policy", tags=["server"])
    async def choose(body: PolicyChoice) -> Json:
        """Puts a policy in charge at once, of one replica or of all; what the caches hold stays."""
        if body.policy not in SERVED_POLICIES:
            raise InputError(f"policy {body.policy!r} is unknown; known are {', '.join(SERVED_POLICIES)}")
        found = dict(await policies(body.policy, body.replica))
        if not found:
            raise UnavailableError("no engine answered; try again, or look at /v1/policy")
        if body.replica is not None and body.replica not in found:
            raise NotFoundError(f"replica {body.replica!r} does not exist; there are {', '.join(sorted(found))}")
        return {"replicas": found}

    return routes
