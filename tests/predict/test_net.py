"""The net: the paper's equations, training, the model folder, and the numpy twin that serves."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pbkv_ray.errors import ConfigError, InputError
from pbkv_ray.predict.baselines import mixtures
from pbkv_ray.predict.features import Paths
from pbkv_ray.predict.graphsage import GraphSage, NetOptions, transition_matrix
from pbkv_ray.predict.inference import ServedNet
from pbkv_ray.predict.train import TrainOptions, begun, evaluate_held, fit, inputs_of, save
from tests.predict.traces import runs

QUICK = TrainOptions(epochs=6, updates=20)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def follow(agents: tuple[str, ...], *paths: str, tokens: tuple[int, int] | None = None) -> Paths:
    made = Paths.of(agents, paths)
    if tokens:
        made.tell(0, *tokens)
    return made


def test_layers_are_equation_3() -> None:
    net = GraphSage(NetOptions(3, width=4))
    transitions = transition_matrix([[0, 1, 2], [0, 2]], 4)
    assert transitions.tolist() == [[0, 0.5, 0.5, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    state = net.embedding.weight
    for layer in net.layers:
        both = torch.cat((state, transitions @ state), 1)
        weight = torch.cat((layer.lin_root.weight, layer.lin_rel.weight), 1)
        state = torch.relu(both @ weight.T + layer.lin_rel.bias)
    torch.testing.assert_close(net.agents(torch.arange(4), transitions), state)


def test_attention_over_counts_is_equation_4_over_calls() -> None:
    net = GraphSage(NetOptions(3, width=4, path_features=False)).eval()
    states = net.agents(torch.arange(4), torch.eye(4))
    (run,) = runs("abcbba")
    inputs = inputs_of([run], ("a", "b", "c"))
    path = states[[0, 1, 2, 1, 1]]
    alpha = torch.softmax(path @ net.query(states[0]) / 2.0, 0)
    seen: list[torch.Tensor] = []
    net.head.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    net(states, inputs, torch.arange(4))
    torch.testing.assert_close(seen[0][-1], torch.cat((states[0], alpha @ path)))
    torch.testing.assert_close(seen[0][0], torch.cat((states[0], torch.zeros(4)))), "an empty past is zero"


def test_training_learns_a_loop_that_ends_after_three_turns() -> None:
    made = runs(*["pctctct", "pctctct", "pc"] * 20)
    model = fit(made[:48], made[48:], NetOptions(1, hidden=64), TrainOptions(epochs=15, updates=20))
    names = [*model.agents, "."]
    ahead = model.forecast(inputs_of(runs("pctctct"), model.agents))
    assert [names[i] for i in ahead[:, 0].argmax(1)][2:] == ["c", "t", "c", "t", "."]
    assert [names[i] for i in ahead[2].argmax(1)][:5] == ["c", "t", "c", "t", "."]
    held = evaluate_held(model, made[48:])
    assert held["top1"][0] > 0.75 and len(held["nll"]) == 7
    losses = model.facts["validation_loss"]
    assert min(losses) < losses[0] / 2


def test_training_is_deterministic_in_its_seed() -> None:
    made = runs(*["pctct", "pct"] * 10)
    inputs = inputs_of(made[:2], ("c", "p", "t"))
    once, again, other = (
        fit(made[:16], made[16:], options=replace(QUICK, epochs=2, seed=seed)).probability(inputs) for seed in (3, 3, 4)
    )
    assert (once == again).all()
    assert (once != other).any()


def test_training_stops_when_validation_does_not_improve() -> None:
    made = runs(*["ab"] * 30)
    model = fit(made[:24], made[24:], options=TrainOptions(epochs=400, patience=2))
    assert len(model.facts["validation_loss"]) < 400


def test_the_text_tells_what_the_path_cannot() -> None:
    """`x` and `y` follow `a` by a coin's toss; only the hidden state knows."""
    tosses = np.random.default_rng(0).integers(0, 2, 120)
    made = runs(*["a" + "xy"[toss] for toss in tosses], signal=True)
    blind = fit(made[:90], made[90:], options=QUICK)
    reading = fit(made[:90], made[90:], NetOptions(1, signals={"decode": 4}), replace(QUICK, epochs=12))
    assert evaluate_held(blind, made[90:])["top1"][0] < 0.9
    assert evaluate_held(reading, made[90:])["top1"][0] > 0.95
    # At the start of a call the state is not there yet: the net must not pretend.
    unread = reading.forecast(begun(inputs_of(made[90:], reading.agents, ("decode",))))
    assert unread[::2, 0].max() < 0.9
    with pytest.raises(InputError, match="has no hidden state 'decode'"):
        inputs_of(runs("ab"), reading.agents, ("decode",))


def test_what_serves_in_numpy_says_what_was_trained_in_torch(tmp_path: Path) -> None:
    made = runs(*["pctct", "pct"] * 10, signal=True)
    model = fit(made[:16], made[16:], NetOptions(1, signals={"decode": 4}), QUICK)
    save(model, tmp_path, {"workflow": "swe", "mixture": [0.25] * 10})
    served = ServedNet.load(tmp_path)
    assert (served.agents, served.horizon, served.signals) == (("c", "p", "t"), 10, ("decode",))
    assert served.mixture.tolist() == [0.25] * 10
    (run,) = runs("pctx", signal=True)  # x: an agent the net has never seen
    expected = model.forecast(inputs_of([run], model.agents, ("decode",)))
    placed = served.placed((), {})
    for i in range(4):
        path = follow(served.agents, "pctx"[: i + 1], tokens=(int(run.prompt_tokens[i]), 20))
        said = served.forecast(placed, path, [{"decode": run.hidden["decode"][i]}])
        np.testing.assert_allclose(said[0], expected[i], atol=1e-5)
    at_start = model.forecast(begun(inputs_of([run], model.agents, ("decode",))))
    np.testing.assert_allclose(served.forecast(placed, follow(served.agents, "pc"))[0], at_start[1], atol=1e-5)


def test_an_agent_added_later_has_a_column_and_speaks_from_its_place_in_the_graph(tmp_path: Path) -> None:
    """The net knows p, c, t. Then the workflow gets r, which is called by c, and q, which nobody has called yet."""
    made = runs(*["pctct", "pctctct", "pct"] * 20)
    save(fit(made[:48], made[48:], options=replace(QUICK, epochs=15)), tmp_path, {})
    served = ServedNet.load(tmp_path)
    placed = served.placed(("r", "q"), {"c": {"r": 20.0}, "r": {"c": 15.0}})
    said = served.forecast(placed, follow(served.agents, "pc", "pcr"))
    assert said.shape == (2, 10, 6)  # c, p, t, r, q, END
    np.testing.assert_allclose(said.sum(-1), 1.0)
    c_calls = said[0, 0]
    assert c_calls[3] > 3 * c_calls[4]
    unchanged = served.placed(("r", "q"), {}).states
    assert (unchanged[:4] == served.placed((), {}).states).all()


def test_a_folder_is_replaced_whole_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    made = runs(*["pct"] * 10)
    model = fit(made[:8], made[8:], options=replace(QUICK, epochs=1))
    save(model, tmp_path, {"data_sha256": "0" * 64})
    save(model, tmp_path, {"data_sha256": "1" * 64})
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["data_sha256"], config["agents"], config["train"]["seed"]) == ("1" * 64, ["c", "p", "t"], 0)
    (tmp_path / "config.json").write_text(json.dumps(config | {"temperature": config["temperature"][1:]}))
    with pytest.raises(InputError, match=r"has weights of \[9, 10\] steps, not 10; train it again"):
        ServedNet.load(tmp_path)
    config["format"] = 99
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="has format 99, not 1; train it again"):
        ServedNet.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="holds no model"):
        ServedNet.load(tmp_path)


def test_the_mixture_weighs_the_net_against_counts() -> None:
    made = runs(*["pctct", "pct"] * 30)
    model = fit(made[:48], made[48:], options=replace(QUICK, epochs=1))
    weight = np.array(mixtures(model, made[:48], made[48:])["mixture"])
    assert weight.shape == (10,)
    assert ((weight >= 0) & (weight <= 1)).all()
    assert weight[0] < 1.0, "an untrained net does not replace counts"


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="without inputs"):
        NetOptions(2, graph=False, path_features=False)
    with pytest.raises(ConfigError, match="epochs is 0"):
        TrainOptions(epochs=0)
    with pytest.raises(InputError, match="one part is empty"):
        fit(runs("ab"), [])
