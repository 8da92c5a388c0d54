"""/metrics: one exposition of many parts."""

import asyncio
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from deployments.gateway import GatewayOptions
from deployments.metrics import GatewayMetrics, exposition
from tests.shells.gateway_kit import Kit

ENGINE = """# HELP sglang:cache_hit_rate The cache hit rate.
# TYPE sglang:cache_hit_rate gauge
sglang:cache_hit_rate{model_name="tiny"} 0.5
# HELP pbkv_engine_calls_total Calls.
# TYPE pbkv_engine_calls_total counter
pbkv_engine_calls_total{replica="r0"} 3.0
# HELP sglang:seconds Seconds.
# TYPE sglang:seconds histogram
sglang:seconds_bucket{le="1.0"} 1.0
sglang:seconds_bucket{le="+Inf"} 2.0
sglang:seconds_sum 3.5
sglang:seconds_count 2.0
"""


async def _merged(parts: dict[str, Any], timeout_s: float = 5.0) -> tuple[GatewayMetrics, str]:
    metrics = GatewayMetrics()
    return metrics, (await exposition(metrics, parts, timeout_s=timeout_s, max_bytes=10_000)).decode()


def _of(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


async def test_replicas_are_merged_into_one_family_each() -> None:
    async def engines() -> dict[str, str]:
        return {"r0": ENGINE, "r1": ENGINE.replace("0.5", "0.75")}

    _, text = await _merged({"engine": engines})
    assert _of(text, "# TYPE sglang:cache_hit_rate") == ["# TYPE sglang:cache_hit_rate gauge"]
    assert _of(text, "sglang:cache_hit_rate") == [
        'sglang:cache_hit_rate{model_name="tiny",part="engine",replica="r0"} 0.5',
        'sglang:cache_hit_rate{model_name="tiny",part="engine",replica="r1"} 0.75',
    ]
    assert _of(text, "# TYPE pbkv_engine_calls") == ["# TYPE pbkv_engine_calls_total counter"]
    assert _of(text, "pbkv_engine_calls") == [
        'pbkv_engine_calls_total{part="engine",replica="r0"} 3.0',
        'pbkv_engine_calls_total{exported_replica="r0",part="engine",replica="r1"} 3.0',
    ]
    assert _of(text, "sglang:seconds")[:4] == [
        'sglang:seconds_bucket{le="1.0",part="engine",replica="r0"} 1.0',
        'sglang:seconds_bucket{le="+Inf",part="engine",replica="r0"} 2.0',
        'sglang:seconds_sum{part="engine",replica="r0"} 3.5',
        'sglang:seconds_count{part="engine",replica="r0"} 2.0',
    ]
    assert list(text_string_to_metric_families(text))


async def test_a_part_that_fails_is_counted_and_the_others_are_shown() -> None:
    async def engines() -> str:
        return ENGINE

    async def fails() -> str:
        raise ConnectionError("no controller")

    async def hangs() -> str:
        await asyncio.Event().wait()
        return ""

    async def babbles() -> str:
        return 'what{"is this'

    async def floods() -> str:
        return ENGINE * 100

    parts = {"engine": engines, "fails": fails, "hangs": hangs, "babbles": babbles, "floods": floods}
    _, text = await _merged(parts, timeout_s=0.05)
    assert _of(text, "sglang:cache_hit_rate") == ['sglang:cache_hit_rate{model_name="tiny",part="engine"} 0.5']
    counted = _of(text, "pbkv_metrics_part_failures_total")
    assert counted == [
        f'pbkv_metrics_part_failures_total{{exported_part="{name}",part="gateway"}} 1.0'
        for name in ("fails", "hangs", "babbles", "floods")
    ]


async def test_two_types_of_one_family_are_not_mixed() -> None:
    async def gauge() -> str:
        return "# TYPE load gauge\nload 1\n"

    async def counter() -> str:
        return "# TYPE load counter\nload 2\n"

    _, text = await _merged({"a": gauge, "b": counter})
    assert _of(text, "load") == ['load{part="a"} 1.0']
    assert _of(text, "pbkv_metrics_conflicts_total") == ['pbkv_metrics_conflicts_total{part="gateway"} 1.0']


async def test_the_gateways_own_counters_name_route_and_status() -> None:
    async def engines() -> dict[str, str]:
        return {"r0": ENGINE}

    kit = Kit(GatewayOptions(), parts={"engine": engines})
    async with kit.client() as client:
        await client.get("/threads/some-id")
        await client.get("/threads/another")
        await client.request("BREW", "/tea")
        answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert _of(answer.text, "pbkv_http_requests_total") == [
        'pbkv_http_requests_total{method="GET",part="gateway",route="/threads/{thread_id}",status="404"} 2.0',
        'pbkv_http_requests_total{method="other",part="gateway",route="unmatched",status="404"} 1.0',
    ]
    assert _of(answer.text, "pbkv_http_open_requests") == ['pbkv_http_open_requests{part="gateway"} 1.0']
    assert _of(answer.text, "sglang:cache_hit_rate")
    assert not _of(answer.text, "pbkv_http_requests_created")
