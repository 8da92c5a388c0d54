"""What every workflow promises to the server."""

import subprocess
import sys

import pytest

from pbkv_ray.errors import InputError, NotFoundError
from workflows.registry import REGISTRY, get


def test_the_three_workflows_are_known_by_name() -> None:
    assert sorted(REGISTRY) == ["finance", "hover", "swe"]
    assert get("hover") is REGISTRY["hover"]


def test_an_unknown_workflow_is_answered_with_the_known_ones() -> None:
    with pytest.raises(NotFoundError, match="workflow 'hoover' is unknown; known are finance, hover, swe"):
        get("hoover")


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_spec_fits_its_graph(name: str) -> None:
    spec = REGISTRY[name]
    app = spec.build(None).compile()
    assert set(spec.agents) < set(app.get_graph().nodes)
    schema = app.get_output_jsonschema()
    assert set(spec.input_model.model_fields) < set(schema["properties"]), "every input is a part of the state"


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_about_ten_different_samples_pass_the_input_check(name: str) -> None:
    spec = REGISTRY[name]
    samples = [spec.checked(sample) for sample in spec.samples()]
    assert len(samples) >= 10
    assert len({str(sample) for sample in samples}) == len(samples)


def test_a_wrong_input_is_refused_with_the_place_and_the_value() -> None:
    with pytest.raises(InputError) as refused:
        REGISTRY["hover"].checked({"claim": "", "hops": 3})
    assert str(refused.value) == (
        "the input of hover is wrong: claim: String should have at least 1 character (got ''); "
        "hops: Extra inputs are not permitted (got 3)"
    )


def test_another_distributions_agents_is_noticed(tmp_path) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "__init__.py").write_text("class Agent: ...\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import workflows"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "is not pbkv-ray's: another distribution with this import name" in done.stderr
