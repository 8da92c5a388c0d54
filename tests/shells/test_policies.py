"""What each policy name asks of SGLang."""

from dataclasses import asdict

import pytest

from pbkv_ray.config import POLICIES
from pbkv_ray.core.scores import score_of
from pbkv_ray.engine.policies import BACKEND, STOCK, RadixOptions, policy_arguments
from pbkv_ray.errors import ConfigError


def test_lru_and_session_are_sglang_as_it_is() -> None:
    assert policy_arguments("lru") == {}
    assert policy_arguments("session") == {"enable_session_radix_cache": True}


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in STOCK])
def test_every_other_policy_is_our_backend_with_options_that_survive_the_way(policy: str) -> None:
    arguments = policy_arguments(policy)
    options = RadixOptions.of(policy)
    assert arguments == {"radix_cache_backend": BACKEND, "radix_eviction_policy_config": asdict(options)}
    assert RadixOptions(**arguments["radix_eviction_policy_config"]) == options
    assert score_of(policy).horizon >= 1


def test_the_policies_of_the_papers_prefetch_as_theirs_do_and_only_ours_cuts_leaves() -> None:
    switches = {
        policy: (RadixOptions.of(policy).prefetch, RadixOptions.of(policy).partial_tokens) for policy in POLICIES
    }
    assert switches == {
        "lru": (False, 0),
        "session": (False, 0),
        "lae": (False, 0),
        "he": (False, 0),
        "kvflow": (True, 0),
        "pbkv": (True, 0),
        "pbkv+": (True, 256),
        "oracle": (True, 256),
    }


def test_hidden_states_are_captured_only_when_asked_for() -> None:
    assert policy_arguments("pbkv", hidden_states=True)["return_hidden_states_mode"] == "last"
    assert "return_hidden_states_mode" not in policy_arguments("pbkv")


@pytest.mark.parametrize(
    "switches", [{"partial_tokens": -1}, {"max_age_s": 0.0}, {"aggressive_share": 1.0}], ids=lambda s: next(iter(s))
)
def test_a_switch_out_of_its_range_is_refused(switches: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(switches))):
        policy_arguments("pbkv", **switches)


def test_a_policy_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="lru, session, kvflow"):
        policy_arguments("belady")
