"""The arguments of the application, as `serve run serve.yaml`, `pbkv serve` and tests give them."""

import os
import secrets
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.http.options import GatewayOptions, check_exposure
from pbkv_ray.config import ControllerOptions, EngineOptions
from pbkv_ray.errors import ConfigError
from pbkv_ray.store.database import async_url

APPLICATION = "pbkv"  # its name in Ray Serve, if no other is given
REGISTRY = "workflows.registry:REGISTRY"  # the shipped workflows
Positive = Annotated[int, Field(gt=0)]


def data_dir() -> Path:
    """Where runs and secrets lie by default: $XDG_DATA_HOME/pbkv-ray."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "pbkv-ray"


class AppArgs(BaseModel):
    """Checked when made; `checked` turns pydantic's errors into ours."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = "default"
    policy: str = "pbkv+"
    router: Literal["pbkv", "pow2"] = "pbkv"  # by cost and home of each run, or Ray Serve's default
    engine_replicas: Positive = 1
    max_engine_replicas: Positive | None = None  # above engine_replicas: Serve autoscales between the two
    scale_at_queued_tokens: Positive = 8_192  # uncached prompt tokens waiting in a replica: above it, it is behind
    scale_up_after_s: Annotated[float, Field(ge=0)] = 30.0  # so long engines must be behind before one more is started
    scale_down_after_s: Annotated[float, Field(ge=0)] = 600.0  # idle; an engine that goes takes its cache with it
    drain_s: Annotated[float, Field(gt=0)] = (
        30.0  # how long an engine that goes may finish its calls; on a cluster, the longest call
    )
    tensor_parallel: Positive = 1
    device_pool_tokens: Annotated[int, Field(ge=0)] = 16_384  # 0 on a GPU: SGLang takes what is free
    host_pool_ratio: Annotated[float, Field(ge=0)] = 2.0
    context_length: Positive = 8_192
    max_running_requests: Positive = 16
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    engine_extra: dict[str, Any] = {}  # passed to sglang.Engine as they are
    predictor_models: Path | None = None  # folder of model folders that `pbkv train` writes; renewed while it serves
    record: bool = False  # keep every run's calls, with hidden states, in the database (`pbkv traces export`)
    engine_threads: Positive | None = None  # CPU engines only; default: the machine's cores over the replicas

    runner_replicas: Positive = 1
    max_running: Positive = 64  # runs in flight, a runner
    admission: bool = False  # new runs wait while what the running ones hold in the caches does not fit
    database: str | None = None  # SQLAlchemy URL; by default a SQLite file of the application
    gateway_replicas: Positive = 1
    host: str = "127.0.0.1"  # where the proxy listens; beyond loopback, API keys are required
    api_keys_file: Path | None = None  # a line a tenant: KEY, or KEY SECONDS with its runs' head start in the queue
    allowed_hosts: tuple[str, ...] = ()  # Host headers accepted without keys, beside loopback's names
    salt_secret_file: Path | None = None  # tenants' cache salts; the same on every node
    registry: str = REGISTRY  # module:attribute, a mapping from names to WorkflowSpecs

    @classmethod
    def checked(cls, values: dict[str, Any]) -> "AppArgs":
        """Raises ConfigError for anything that could only fail later, in a replica."""
        try:
            args = cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "arguments"
            raise ConfigError(f"{where} is {first.get('input')!r}: {first['msg']}") from error
        args.engine_options()
        async_url(args.database_url(APPLICATION))
        if args.admission and args.device_pool_tokens == 0:
            raise ConfigError("admission needs device_pool_tokens: what fits a pool of unknown size cannot be told")
        check_exposure(args.host, args.gateway_options())
        if args.runner_replicas > 1 and args.database_url(APPLICATION).startswith("sqlite"):
            raise ConfigError(
                f"runner_replicas is {args.runner_replicas} and the database is SQLite, which serves one runner; "
                "name a PostgreSQL database"
            )
        return args

    def database_url(self, application: str) -> str:
        """Runners of two applications must not share a database by accident: each executes what it finds there."""
        name = "runs" if application == APPLICATION else f"runs-{quote(application, safe='')}"
        return self.database or f"sqlite+aiosqlite:///{data_dir() / name}.sqlite"

    def engine_options(self) -> EngineOptions:
        return EngineOptions(
            model=self.model,
            policy=self.policy,
            device_pool_tokens=self.device_pool_tokens,
            host_pool_ratio=self.host_pool_ratio,
            write_policy=self.write_policy,
            context_length=self.context_length,
            max_running_requests=self.max_running_requests,
            tensor_parallel=self.tensor_parallel,
            hidden_states=self.record or self.predictor_models is not None,
            extra=dict(self.engine_extra),
        )

    def controller_options(self, application: str) -> ControllerOptions:
        return ControllerOptions(
            predictor_models="" if self.predictor_models is None else str(self.predictor_models.absolute()),
            record_to=self.database_url(application) if self.record else "",
        )

    def gateway_options(self) -> GatewayOptions:
        if self.api_keys_file is None:
            return GatewayOptions(allowed_hosts=self.allowed_hosts)
        try:
            lines = self.api_keys_file.read_text().splitlines()
        except OSError as error:
            raise ConfigError(f"api_keys_file {self.api_keys_file} cannot be read: {error}") from error
        heads: dict[str, float] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            key, _, seconds = line.strip().partition(" ")
            try:
                heads[key] = float(seconds or 0)
            except ValueError:  # the line is not shown: it may be a key
                raise ConfigError(
                    f"api_keys_file {self.api_keys_file}, line {number}: behind the key stands no number; a line is "
                    "KEY, or KEY SECONDS with the head start of its runs in the queue"
                ) from None
        if not heads:
            raise ConfigError(f"api_keys_file {self.api_keys_file} holds no key; write one a line")
        return GatewayOptions(
            api_keys=tuple(heads),
            head_starts_s=heads,
            salt_secret=self._salt_secret(),
            allowed_hosts=self.allowed_hosts,
        )

    def _salt_secret(self) -> str:
        """The named file's, or one that is made once for this machine."""
        path = self.salt_secret_file or data_dir() / "salt-secret"
        if self.salt_secret_file is None and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
        try:
            return path.read_text().strip()
        except OSError as error:
            raise ConfigError(f"salt_secret_file {path} cannot be read: {error}") from error
