"""`pbkv replay`, `pbkv traces`, `pbkv report` as a user types them."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pbkv_ray.errors import ConfigError, InputError
from pbkv_ray.replay.calibrate import fit
from pbkv_ray.replay.cli import replay_app, report_command, traces_app
from pbkv_ray.replay.cost import load_cost, pool_tokens, roofline, save_cost

app = typer.Typer()
app.add_typer(replay_app, name="replay")
app.add_typer(traces_app, name="traces")
app.command("report")(report_command)


def pbkv(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_from_a_generated_trace_to_a_report(tmp_path: Path) -> None:
    trace, out, folder = tmp_path / "swe.jsonl.gz", tmp_path / "swe.json", tmp_path / "report"
    pbkv("replay", "generate", "swe", trace, "--runs", 40, "--growth", 128)
    pbkv(
        "replay", "--trace", trace, "--policies", "lru,lae,lru@best,belady", "--pool-fraction", "0.2,0.3",
        "--concurrency", 6, "--arrivals", "backlog", "--json", out,
    )  # fmt: skip
    found = json.loads(out.read_text())
    assert list(found["pools"]) == ["0.2", "0.3"]
    entries = found["pools"]["0.2"]["policies"]
    assert list(entries) == ["lru", "lae", "lru@best", "belady"]
    wanted = {
        "device_hit",
        "host_hit",
        "run_seconds",
        "ttft_seconds",
        "recomputed_tokens",
        "prefetch",
        "evicted_tokens",
        "wall_seconds",
    }
    assert wanted <= set(entries["lru"])
    assert set(entries["lru"]["run_seconds"]) == {"mean", "p50", "p99"}
    assert entries["belady"]["share_of_belady"] == 1.0
    assert 0 < entries["lru"]["fixed_order"]["share_of_belady"] <= 1
    assert entries["lru@best"]["completion_seconds"]["mean"] <= entries["lru"]["completion_seconds"]["mean"]
    assert found["setup"]["concurrency"] == 6
    pbkv("report", out, "--out", folder)
    text = (folder / "report.md").read_text()
    assert "| 0.2 | lru@best |" in text
    assert (folder / "swe_hit_by_pool.png").stat().st_size > 5_000
    assert json.loads((folder / "report.json").read_text())["swe"] == found


def test_a_study_makes_its_replays_once(tmp_path: Path) -> None:
    trace, folder = tmp_path / "swe.jsonl.gz", tmp_path / "report"
    pbkv("replay", "generate", "swe", trace, "--runs", 24, "--growth", 64)
    first = pbkv("report", "--trace", trace, "--parts", "gamma", "--out", folder)
    made = sorted(path.name for path in folder.iterdir())
    gammas = [f"swe_gamma_{gamma}.json" for gamma in (0.5, 0.6, 0.7, 0.8, 0.9)]
    assert made == ["report.json", "report.md", *gammas, "swe_hit_by_gamma.png", "swe_hit_by_gamma.svg"]
    stamps = [(folder / name).stat().st_mtime_ns for name in gammas]
    pbkv("report", "--trace", trace, "--parts", "gamma", "--out", folder)
    assert stamps == [(folder / name).stat().st_mtime_ns for name in gammas]
    with pytest.raises(ConfigError, match="parts are pools"):
        pbkv("report", "--trace", trace, "--parts", "everything", "--out", folder)
    assert first


def test_a_trace_is_converted_and_described(tmp_path: Path) -> None:
    trace, copy = tmp_path / "hover.jsonl", tmp_path / "copy.jsonl.gz"
    pbkv("replay", "generate", "hover", trace, "--runs", 30)
    pbkv("traces", "import", trace, copy)
    pbkv("traces", "stats", copy, "--json", tmp_path / "stats.json")
    found = json.loads((tmp_path / "stats.json").read_text())
    assert found["runs"] == 30
    assert set(found["agents"]) == {"decompose", "write_query", "analyse_evidence", "judge"}
    assert found["entropy_next_bits"][0] > found["entropy_next_bits"][1]


def test_mistakes_are_named(tmp_path: Path) -> None:
    for wrong, complaint in (
        (["--trace", tmp_path / "none.jsonl"], "no trace"),
        (["--policies", "lru,best"], "unknown"),
        (["--trace", tmp_path / "none.jsonl", "--half", "both"], "tune, report"),
    ):
        with pytest.raises((ConfigError, InputError), match=complaint):
            pbkv("replay", *wrong)


def test_presets_say_what_data_sheets_say() -> None:
    """Qwen3-32B on two A6000: weights take 61 ms a step, and the KV cache is left the size that the paper hints at."""
    cost = roofline("qwen3-32b", "a6000", 2)
    assert cost.step_s == pytest.approx(0.002 + 2 * 32.8e9 / (2 * 768e9 * 0.7))
    assert cost.transfer_tokens_s == pytest.approx(2 * 20e9 / 262_144)
    assert 70_000 < pool_tokens("qwen3-32b", "a6000", 2) < 75_000
    assert cost.prefill([(2048, 0)]) < cost.prefill([(2048, 8192)])
    assert cost.decode(4, 1000, 3) == pytest.approx(sum(cost.decode_step(4, 1000 + 4 * i) for i in range(3)))
    with pytest.raises(ConfigError, match="does not fit"):
        roofline("qwen3-32b", "a6000")


def test_a_calibration_finds_the_cost_that_made_the_figures(tmp_path: Path) -> None:
    truth = roofline("qwen3-14b", "h100")
    prefill = [
        (n, d, truth.prefill_s + n * truth.token_s + n * (d + n / 2) * truth.pair_s)
        for n in (64, 1024)
        for d in (0, 4096)
    ]
    decode = [(b, c, truth.decode_step(b, b * c)) for b in (1, 8) for c in (64, 4096)]
    found = fit("x", prefill, decode)
    for name in ("prefill_s", "token_s", "pair_s", "step_s", "row_s", "context_s"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-6)
    save_cost(tmp_path / "cost.json", found, {"prefill": prefill})
    assert load_cost(str(tmp_path / "cost.json")) == found
