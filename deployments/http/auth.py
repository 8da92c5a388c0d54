"""API keys and what follows from them: who the tenant is, and the salt that keeps its cache apart."""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from deployments.http.errors import RefusedError
from deployments.http.options import GatewayOptions


@dataclass(frozen=True, slots=True)
class Tenant:
    """`label` names the tenant in stored metadata; neither it nor the salt tells the key.

    head_start_s: so much earlier than they come do its runs count as come, where runs wait.
    """

    label: str
    cache_salt: str = field(repr=False)
    head_start_s: float = 0.0


class Keys:
    def __init__(self, options: GatewayOptions) -> None:
        secret = options.salt_secret.encode()
        self._tenants = [
            (
                _digest(key),
                Tenant(
                    _derive(secret, "label", key)[:16],
                    _derive(secret, "salt", key),
                    options.head_starts_s.get(key, 0.0),
                ),
            )
            for key in options.api_keys
        ]

    @property
    def required(self) -> bool:
        return bool(self._tenants)

    def tenant(self, headers: Mapping[str, str]) -> Tenant | None:
        """None when keys are off. Raises RefusedError 401 when the request carries no key of ours."""
        if not self._tenants:
            return None
        given = _digest(_given(headers))
        found: Tenant | None = None
        for digest, tenant in self._tenants:  # to the end: the time must not tell which key was close
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None:
            raise RefusedError(
                401,
                "the request carries no valid API key; send one as `x-api-key: KEY` or `Authorization: Bearer KEY`",
                {"www-authenticate": "Bearer"},
            )
        return found


def _given(headers: Mapping[str, str]) -> str:
    if key := headers.get("x-api-key"):
        return key.strip()
    scheme, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _derive(secret: bytes, purpose: str, key: str) -> str:
    return hmac.new(secret, f"{purpose}:{key}".encode(), hashlib.sha256).hexdigest()[:32]
