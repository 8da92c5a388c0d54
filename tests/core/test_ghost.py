"""Learned reuse, told as prompts: who really uses again what, counted from block hashes alone."""

import numpy as np
import pytest

from pbkv_ray.core.ghost import LearnedReuse, block_hashes, common
from pbkv_ray.core.rates import BACK, DEPTHS, KINDS, OLDER, SHARED, STALE, STAY, Rates, depth_class


class Prompts:
    """Prompts as strings, one chained block a letter: "sabc" begins like "sab" and shares nothing with "xabc"."""

    def __init__(self, **bounds: int) -> None:
        self.learned = LearnedReuse(16, **bounds)
        self.paths: dict[str, tuple[str, ...]] = {}

    def call(self, run: str, agent: str, prompt: str) -> int:
        """Leading blocks that other runs' prompts have too."""
        blocks = [hash(tuple(map(ord, prompt[: i + 1]))) for i in range(len(prompt))]
        shared, self.leaves = self.learned.observe("flow", run, agent, self.paths.get(run, ()), blocks)
        self.paths[run] = (*self.paths.get(run, ()), agent)
        self.learned.check_invariants()
        return shared // 16

    def rates(self, *agents: str, run: str = "") -> Rates:
        """What is known of the agents in any call of the run, or in the next one of `run`."""
        return self.learned.rates("flow", agents, self.paths.get(run, ()), run)


def test_chained_hashes_agree_on_a_prefix_and_nowhere_else() -> None:
    a, b = list(range(100)), [*range(40), -1, *range(41, 100)]
    first, second = block_hashes(a, 16), block_hashes(b, 16)
    assert (len(first), common(first, second)) == (6, 2)
    assert [x == y for x, y in zip(first, second, strict=True)] == [True, True, False, False, False, False]


@pytest.mark.parametrize("n", [0, 1, 5, 6])
def test_common_finds_the_length_of_the_common_prefix(n: int) -> None:
    assert common([*range(n), *range(50, 56 - n)], range(6)) == n


def test_deeper_nodes_are_in_higher_classes() -> None:
    assert [depth_class(t) for t in (0, 1_023, 1_024, 4_095, 4_096, 20_000)] == [0, 0, 1, 1, 2, 3]
    assert DEPTHS[0] == 0


def test_a_chat_that_grows_uses_everything_again() -> None:
    prompts = Prompts()
    for run in range(30):
        for turn in range(1, 4):
            prompts.call(f"r{run}", "chat", f"{run:02}" + "abcdef"[: 2 * turn])
    assert prompts.rates("chat").kind[STAY, 0, 0] > 0.95


def test_an_intern_that_starts_afresh_uses_its_old_context_while_the_visit_lasts() -> None:
    """HyperAgent: contiguous 1.0, after a gap 0.0; its planner goes on with its own context either way."""
    prompts = Prompts()
    for run in range(40):
        for visit in "xyz":
            prompts.call(f"r{run}", "planner", f"P{run:02}" + "xyz"[: "xyz".index(visit) + 1])
            for turn in ("", "ab", "abcd"):
                prompts.call(f"r{run}", "intern", f"I{visit}{run:02}{turn}")
    kind = prompts.rates("planner", "intern").kind
    assert kind[BACK, 0, 0] > 0.9
    assert kind[BACK, 0, 1] < 0.1
    assert kind[STAY, 0, 1] > 0.9


def test_what_a_prompt_left_behind_is_stale() -> None:
    prompts = Prompts()
    for run in range(30):
        for draft in "abcdef":
            prompts.call(f"r{run}", "writer", 2 * chr(1_000 + run) + f"{draft}xx")
    kind = prompts.rates("writer").kind
    assert kind[STALE, 0, 0] < 0.1
    assert kind[STAY, 0, 0] == pytest.approx(2 / 5, abs=0.1)  # the two blocks of the run's own beginning


def test_an_agent_with_two_contexts_in_turn_comes_back_to_the_older_one() -> None:
    """ChatDev: the latest prompt is continued in .22 of its blocks, the one before in .47, others in .02."""
    prompts = Prompts()
    for run in range(30):
        for turn in range(8):
            prompts.call(f"r{run}", "twin", f"{run:02}" + ("aaaa" if turn % 2 else "bbbb"))
            assert prompts.leaves == (turn > 0)
    assert prompts.rates("twin").kind[OLDER, 0, 0] > 0.9


def test_who_called_last_tells_which_context_is_next() -> None:
    """A reviewer goes on after the coder, and begins anew after the tester."""
    prompts = Prompts()
    for run in range(30):
        for phase in "xyz":
            for turn in ("", "ab"):
                prompts.call(f"r{run}", "reviewer", f"{phase}{run:02}{turn}")
                prompts.call(f"r{run}", "coder", f"C{phase}{run:02}{turn}")
            prompts.call(f"r{run}", "tester", f"T{phase}{run:02}")
    prompts.call("now", "reviewer", "xnow")
    prompts.call("now", "coder", "Cxnow")
    assert prompts.rates("reviewer", run="now").next[0, 0, 0] > 0.9
    prompts.call("now", "reviewer", "xnowab")
    prompts.call("now", "coder", "Cxnowab")
    prompts.call("now", "tester", "Txnow")
    assert prompts.rates("reviewer", run="now").next[0, 0, 0] < 0.1
    prompts.call("other", "stranger", "Snow")
    assert prompts.rates("reviewer", run="other").next[0, 0, 0] == pytest.approx(
        prompts.rates("reviewer").kind[BACK, 0, 0]
    )


def test_whose_prompt_a_call_went_on_with_tells_what_the_agents_alone_do_not() -> None:
    """Reviewer and coder in turn. If the coder went on with the reviewer's prompt, so does the reviewer; if the coder
    began anew, so does the reviewer."""
    prompts = Prompts()
    after_answer, after_new = [], []
    for run in range(30):
        for turn in "xyz":
            prompts.call(f"r{run}", "reviewer", f"{turn}{run:02}")
            prompts.call(f"r{run}", "coder", f"{turn}{run:02}ab")
            after_answer.append(float(prompts.rates("reviewer", run=f"r{run}").next[0, 0, 0]))
            prompts.call(f"r{run}", "reviewer", f"{turn}{run:02}cd")
            prompts.call(f"r{run}", "coder", f"C{turn}{run:02}")
            after_new.append(float(prompts.rates("reviewer", run=f"r{run}").next[0, 0, 0]))
    assert min(after_answer[30:]) > 0.9
    assert max(after_new[30:]) < 0.1


def trail(prompts: Prompts, run: str) -> list[tuple[str, str]]:
    return list(prompts.learned._runs[run].trail)


def test_a_call_is_told_by_whose_prompt_it_went_on_with() -> None:
    prompts = Prompts()
    prompts.call("r", "coder", "SYS one")
    assert trail(prompts, "r") == [("coder", "")]
    prompts.call("r", "coder", "SYS one more")
    assert trail(prompts, "r") == [("coder", ""), ("coder", "coder")]
    prompts.call("r", "tester", "SYS one more test")
    assert trail(prompts, "r")[1] == ("tester", "coder")
    prompts.call("r", "coder", "other")
    assert trail(prompts, "r")[1] == ("coder", "")
    prompts.call("r", "coder", "SYS one moreand")  # what it had left
    assert trail(prompts, "r")[1][1] not in ("", "coder", "tester")


def test_what_all_runs_begin_with_is_nobodys_prompt() -> None:
    prompts = Prompts()
    for run in ("r1", "r2"):
        prompts.call(run, "coder", f"SYS {run}")
        prompts.call(run, "tester", f"SYS {run}t")
    prompts.call("r2", "coder", "SYS x")
    assert trail(prompts, "r2") == [("tester", "coder"), ("coder", "")]
    prompts.call("r3", "coder", "SYS a")
    prompts.call("r3", "coder", "SYS b")
    assert trail(prompts, "r3") == [("coder", ""), ("coder", "")]


def test_three_contexts_in_turn_come_back_to_what_was_left_twice() -> None:
    prompts = Prompts()
    for run in range(30):
        for turn in range(12):
            prompts.call(f"r{run}", "triple", f"{run:02}" + 4 * "abc"[turn % 3])
    kind = prompts.rates("triple").kind
    assert kind[STALE, 0, 0] > 0.9


def test_the_system_prompt_is_found_by_looking_at_another_run() -> None:
    prompts = Prompts()
    assert prompts.call("r1", "plan", "SYS one") == 0
    assert prompts.call("r2", "plan", "SYS two") == 4
    assert prompts.call("r1", "plan", "SYS one more") == 4
    assert prompts.call("r1", "code", "SYS one more") == 0  # of this agent, no other run is known


def test_a_context_handed_over_is_learned_per_pair() -> None:
    prompts = Prompts()
    for run in range(30):
        prompts.call(f"r{run}", "plan", f"{run:02}abcd")
        prompts.call(f"r{run}", "code", f"{run:02}abcdefgh")
        prompts.call(f"r{run}", "test", f"T{run:02}")
    cross = prompts.rates("plan", "code", "test").cross[0]
    assert cross[0, 1] > 0.8
    assert max(cross[0, 2], cross[1, 2]) < 0.01  # seen, and never so
    assert cross[1, 0] == pytest.approx(0.02)  # never seen: only what was learned may give credit


def test_who_called_before_tells_whose_prompt_is_handed_over() -> None:
    """The coder's prompt contains the reviewer's latest one if the reviewer has called twice, else it does not."""
    prompts = Prompts()
    for run in range(30):
        for turn in "xyz":
            prompts.call(f"r{run}", "reviewer", f"Q{turn}{run:02}")
            prompts.call(f"r{run}", "coder", f"C{turn}{run:02}")
            prompts.call(f"r{run}", "reviewer", f"{turn}{run:02}")
            prompts.call(f"r{run}", "reviewer", f"R{turn}{run:02}")
            prompts.call(f"r{run}", "coder", f"R{turn}{run:02}ab")
    agents = ["reviewer", "coder"]
    for agent, prompt in (("reviewer", "Q"), ("coder", "C"), ("reviewer", ""), ("reviewer", "R")):
        prompts.call("now", agent, f"{prompt}xnow")
    assert prompts.rates(*agents, run="now").handed[0, 1] > 0.9
    prompts.call("now", "coder", "Rxnowab")
    prompts.call("now", "reviewer", "Qynow")
    assert prompts.rates(*agents, run="now").handed[0, 1] < 0.1
    prompts.call("other", "stranger", "Snow")
    strangers = prompts.rates(*agents, run="other")
    assert strangers.handed.tolist() == strangers.cross[0].tolist()


def test_many_agents_that_hand_over_leave_room_for_what_each_comes_back_to() -> None:
    """Twelve agents in random order make more pairs than are kept; each one's own patterns are kept all the same."""
    rng, prompts = np.random.default_rng(3), LearnedReuse(16)
    agents, path = [f"a{i}" for i in range(12)], tuple[str, ...]()
    for run in range(40):
        for _ in range(40):
            agent = agents[rng.integers(12)]
            prompts.observe("flow", f"r{run}", agent, path, [run * 100 + int(agent[1:])] * 2)
            path = (*path[-1:], agent)
    for agent in agents:  # never anything again, after b
        for run in range(40, 60):
            prompts.observe("flow", f"{agent}-{run}", agent, (), [run])
            prompts.observe("flow", f"{agent}-{run}", "b", (agent,), [1_000 + run])
            prompts.observe("flow", f"{agent}-{run}", agent, (agent, "b"), [-run])
    prompts.observe("flow", "now", "b", (), [1])
    learned = prompts.rates("flow", agents, ("b",), "now").next[0, 0]
    assert (learned < 0.5).all()


def test_nothing_depends_on_what_was_evicted() -> None:
    """The ghost table is all it reads: there is no cache here to hit."""
    assert "cache" not in vars(LearnedReuse(16))


def test_unknown_agents_lean_on_their_workflow_and_unknown_workflows_on_all() -> None:
    prompts = Prompts()
    before = prompts.rates("anyone").kind[STAY, 0, 0]
    for run in range(60):
        for draft in "abc":
            prompts.call(f"r{run}", "writer", f"{draft}{run:02}")  # never anything again
    assert before == pytest.approx(0.9)
    assert prompts.rates("somebody else").kind[STAY, 0, 0] < 0.2
    assert prompts.learned.rates("other flow", ["writer"]).kind[STAY, 0, 0] < 0.3


def test_rates_keep_their_promises_on_random_prompts() -> None:
    """Falling with depth, stale least, shared most: what child <= parent rests on."""
    rng = np.random.default_rng(5)
    prompts = LearnedReuse(512)
    for i in range(600):
        start = int(rng.integers(3))
        blocks = [start * 1_000 + j for j in range(int(rng.integers(1, 60)))]
        prompts.observe("flow", f"r{rng.integers(20)}", f"a{rng.integers(4)}", (f"a{rng.integers(4)}",), blocks)
        if i % 7 == 0:
            prompts.end(f"r{rng.integers(20)}")
    prompts.check_invariants()
    rates = prompts.rates("flow", [f"a{i}" for i in range(4)])
    assert (np.diff(rates.kind, axis=1) <= 1e-12).all()
    assert (rates.kind[STALE] <= rates.kind + 1e-12).all()
    assert (rates.kind[SHARED] >= rates.kind - 1e-12).all()
    assert (rates.cross[1] >= rates.cross[0]).all()
    assert ((rates.kind >= 0) & (rates.kind <= 1)).all()


def test_tables_are_bounded_and_forgetting_is_counted() -> None:
    prompts = Prompts(max_blocks=100, max_workflows=3, max_prompt_blocks=20)
    for run in range(50):
        prompts.call(f"r{run}", "chat", f"{run:02}" + "x" * 40)
    assert (prompts.learned.blocks, prompts.learned.forgotten_runs) == (100, 45)
    for i in range(10):
        prompts.learned.observe(f"flow {i}", "r", "a", (), [i])
    prompts.learned.check_invariants()
    for run in range(50):
        prompts.learned.end(f"r{run}")
        prompts.learned.end(f"r{run}")
    prompts.learned.end("r")
    assert prompts.learned.blocks == 0


def test_more_agents_than_a_workflow_may_have_share_a_column() -> None:
    prompts = Prompts()
    for i in range(200):
        prompts.call(f"r{i % 5}", f"agent {i}", f"{i:03}abc")
    assert prompts.rates("agent 0", "agent 150", "agent 199", "never seen").kind.shape == (KINDS, len(DEPTHS), 4)
