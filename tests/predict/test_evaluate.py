"""`pbkv train` and `pbkv evaluate` from file to figures."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pbkv_ray.errors import InputError
from pbkv_ray.predict import cli
from pbkv_ray.predict.dataset import load
from pbkv_ray.predict.evaluate import SERVED, evaluate
from pbkv_ray.predict.folder import ModelFolder
from pbkv_ray.predict.serving import Served
from pbkv_ray.predict.train import TrainOptions
from tests.predict.traces import runs, write

QUICK = TrainOptions(epochs=2, updates=5)


def test_every_position_is_tested_once_and_certain_paths_are_learned(tmp_path: Path) -> None:
    trace = load(write(tmp_path / "swe.gz", runs(*["pctct"] * 20)))
    figures = evaluate(trace, 4, ["majority", "counts of order 1", "variable-order counts"])
    counts = figures["models"]["variable-order counts"]
    assert counts["top1"] == [1.0] * 5 + [None] * 5
    assert counts["samples"] == [100, 80, 60, 40, 20, 0, 0, 0, 0, 0]
    assert counts["end_recall"] == 1.0
    majority = figures["models"]["majority"]
    assert majority["top1"][0] == 0.4 and majority["end_recall"] == 0.0
    # p c t c t END: after t comes c once and END once; order 1 cannot know which.
    assert figures["models"]["counts of order 1"]["top1"][0] == 0.8
    assert counts["nll"][0] < figures["models"]["counts of order 1"]["nll"][0] < majority["nll"][0]
    assert figures["workflows"]["swe"]["models"] == figures["models"]


def test_workflows_are_fitted_apart_and_pooled(tmp_path: Path) -> None:
    made = runs(*["ab"] * 10, workflow="one") + runs(*["ba"] * 10, workflow="two")
    figures = evaluate(load(write(tmp_path / "t.gz", made)), 2, ["counts of order 1"])
    for workflow in ("one", "two"):
        assert figures["workflows"][workflow]["models"]["counts of order 1"]["top1"][:2] == [1.0, 1.0]
    assert figures["models"]["counts of order 1"]["samples"][0] == 40


def test_all_models_are_compared(tmp_path: Path) -> None:
    made = runs(*["pctct", "pct"] * 10, signal=True)
    trace = load(write(tmp_path / "swe.gz", made))
    figures = evaluate(trace, 2, train=QUICK)
    assert set(figures["models"]) == {
        "majority",
        "counts of order 1",
        "counts of order 2",
        "counts of order 3",
        "variable-order counts",
        "variable-order counts at the end of a call",
        "mlp",
        "path only",
        "graphsage",
        "graphsage at the start of a call",
        "served (counts and graphsage)",
        "served at the start of a call",
    }
    for model in figures["models"].values():
        assert {"top1", "nll", "ece", "end_recall", "nll_scaled", "ece_scaled"} <= set(model)
        assert all(len(model[name]) == 10 for name in ("top1", "nll", "ece"))
    with pytest.raises(InputError, match="'markov' is unknown; this trace allows majority"):
        evaluate(trace, 2, ["markov"])


def test_the_commands_write_a_model_that_serves_and_figures(tmp_path: Path) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("train")(cli.train)
    app.command("evaluate")(cli.evaluate)
    file = str(write(tmp_path / "swe.gz", runs(*["pctct", "pct"] * 20)))
    out = tmp_path / "models" / "swe"
    result = CliRunner().invoke(app, ["train", "--trace", file, "--out", str(out), "--epochs", "2"])
    assert result.exit_code == 0, result.output
    config = json.loads((out / "config.json").read_text())
    assert config["workflow"] == "swe" and config["data_sha256"] == load(Path(file)).sha256
    assert len(config["mixture"]) == 10 and config["metrics"]["top1"][0] > 0.3
    served = Served()
    for workflow, net in ModelFolder(tmp_path / "models").fresh().items():
        served.install(workflow, net)
    for i, following in enumerate(["p", "c", "t", None]):
        served.forecast("swe", "pct"[:i], 10)
        served.observe("swe", "pct"[:i], following)
    assert served.gates()["swe"].judged > 0
    assert served.counters["net_errors"] == 0

    figures = tmp_path / "figures.json"
    arguments = ["evaluate", "--trace", file, "--folds", "2", "--json", str(figures), "--epochs", "1"]
    result = CliRunner().invoke(app, [*arguments, "--instances", "20", "--model", SERVED])
    assert result.exit_code == 0, result.output
    assert list(json.loads(figures.read_text())["models"]) == [SERVED]
    wrong = CliRunner().invoke(app, ["train", "--trace", file, "--out", str(out), "--workflow", "hover"])
    assert isinstance(wrong.exception, InputError)
