"""Settings of the gateway, and the rule that nothing listens beyond loopback without a key."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from pbkv_ray.config import ControllerOptions
from pbkv_ray.errors import ConfigError

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
MIN_KEY_LENGTH = 16


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Keys, bounds and times. Every replica of a gateway needs the same `salt_secret`, or tenants lose their cache.

    Raises ConfigError for a weak or unprintable key, keys without a secret, and bounds that are not positive.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    head_starts_s: Mapping[str, float] = field(default_factory=dict, repr=False)  # of keys: see auth.Tenant
    salt_secret: str = field(default="", repr=False)  # tenants' cache salts are derived from it and the key
    allowed_hosts: tuple[str, ...] = ()  # Host headers accepted without keys, beside loopback's names
    max_body_bytes: int = 4 * 1024 * 1024
    max_json_depth: int = 64
    max_batch_runs: int = 256
    max_page: int = 1_000
    max_scan: int = 10_000  # threads looked at for a count or a sort that the store does not do itself
    max_open_requests: int = 2_048  # streams included
    max_foreign_runs: int = 4_096
    foreign_lease_s: float = ControllerOptions().lease_s
    heartbeat_s: float = 15.0
    live_every_s: float = 1.0  # how old what the live page shows may be
    live_rows: int = 500  # runs of a snapshot, the oldest in flight
    live_page: int = 50
    max_live_viewers: int = 200
    metrics_timeout_s: float = 2.0
    metrics_max_bytes: int = 8 * 1024 * 1024  # of one part's text

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if len(key) < MIN_KEY_LENGTH or not (key.isascii() and key.isprintable()) or " " in key:
                raise ConfigError(
                    f"an API key has {len(key)} characters; a key is at least {MIN_KEY_LENGTH} printable ASCII "
                    "characters without spaces, for example the output of `openssl rand -hex 24`"
                )
        for seconds in self.head_starts_s.values():
            if not 0 <= seconds < float("inf"):
                raise ConfigError(f"the head start of an API key is {seconds} s; it must be 0 or more, and finite")
        if self.api_keys and len(self.salt_secret) < MIN_KEY_LENGTH:
            raise ConfigError(
                "api_keys are set and salt_secret is not (or is short); tenants' cache salts are derived from it, "
                f"so give one of at least {MIN_KEY_LENGTH} characters, the same for every replica"
            )
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int | float) and value <= 0:
                raise ConfigError(f"GatewayOptions.{name} is {value}; it must be above zero")


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, options: GatewayOptions) -> None:
    """Called before anything listens on `host`. Raises ConfigError when that is reachable and no key is set."""
    if not options.api_keys and not is_loopback(host):
        raise ConfigError(
            f"host {host!r} is reachable from other machines and no API key is set; "
            "set api_keys_file (--api-keys), or listen on 127.0.0.1"
        )
