"""What to do, as data. `core.controller.Controller.handle` returns actions; `control.actor` performs them."""

from dataclasses import dataclass

from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.wire import Record


@dataclass(frozen=True, slots=True)
class PublishForecast(Record):
    """Tell the engines what `run_id` calls next. A later `version` of the same run replaces an earlier one."""

    run_id: str
    version: int
    forecast: Forecast
    at_s: float


@dataclass(frozen=True, slots=True)
class RetireRun(Record):
    """The run has ended: its nodes go first."""

    run_id: str
    at_s: float


Action = PublishForecast | RetireRun
