"""Workloads of the paper's three shapes, made from a seed: fact checking with loops, coding with retries, a pipeline.

The paper gives no prompts, graphs or lengths, so every figure here is a knob; the defaults are of the size of the
public traces. Every agent has a system prompt that all runs share; its context is its own conversation (append
only), a share of what the agents before it wrote, and what its tools brought.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pbkv_ray.errors import ConfigError
from pbkv_ray.replay.workload import BLOCK_TOKENS, TraceCall, TraceRun, Workload


@dataclass(frozen=True, slots=True)
class Knobs:
    """loops: probability of another round (hover) or another retry (swe); rounds: at most so many.
    system_tokens: of every agent's system prompt, shared by all runs. input_tokens: mean of the run's own input.
    growth_tokens: mean that a step adds to the agent's context (a tool's answer). output_tokens: mean of a reply.
    extra_agents: agents that a run meets with probability one half each, at the end of a round.
    """

    loops: float = 0.6
    rounds: int = 6
    system_tokens: int = 512
    input_tokens: int = 512
    growth_tokens: int = 512
    output_tokens: int = 128
    extra_agents: int = 0
    wait_s: tuple[float, float] = (1.0, 8.0)

    @staticmethod
    def of(
        workflow: str, loops: float | None = None, growth_tokens: int | None = None, system_tokens: int | None = None
    ) -> "Knobs":
        """Defaults of a workflow, with what is given instead. Raises ConfigError for an unknown workflow."""
        defaults = {
            "hover": Knobs(loops=0.6, rounds=6, system_tokens=768, growth_tokens=384, output_tokens=64),
            "swe": Knobs(loops=0.5, rounds=5, system_tokens=1024, input_tokens=768, growth_tokens=1024),
            "finance": Knobs(loops=0.0, rounds=1, system_tokens=512, input_tokens=2048, growth_tokens=256),
        }
        if workflow not in defaults:
            raise ConfigError(f"workflow {workflow!r} is unknown; known are {', '.join(defaults)}")
        usual = defaults[workflow]
        return replace(
            usual,
            loops=usual.loops if loops is None else loops,
            growth_tokens=usual.growth_tokens if growth_tokens is None else growth_tokens,
            system_tokens=usual.system_tokens if system_tokens is None else system_tokens,
        )


def generate(workflow: str, runs: int, knobs: Knobs | None = None, seed: int = 0) -> Workload:
    """`runs` runs of "hover", "swe" or "finance". The same arguments give the same workload."""
    knobs = knobs or Knobs.of(workflow)
    agents = AGENTS.get(workflow)
    if agents is None:
        raise ConfigError(f"workflow {workflow!r} is unknown; known are {', '.join(AGENTS)}")
    names = _Blocks()
    every = (*agents, *(f"helper_{i}" for i in range(knobs.extra_agents)))
    # System prompts of different lengths, so that agents are not alike.
    rng = random.Random(f"{workflow} {seed}")
    systems = {agent: names.take(round(knobs.system_tokens * rng.uniform(0.5, 1.5))) for agent in every}
    made = []
    for number in range(runs):
        path = list(_path(workflow, knobs, random.Random(f"{workflow} {seed} {number}")))
        made.append(_run(workflow, number, path, systems, names, knobs, seed))
    return Workload(f"generated-{workflow}", tuple(made))


AGENTS = {
    "hover": ("decompose", "write_query", "analyse_evidence", "judge"),
    "swe": ("planner", "coder", "tester", "analyser", "committer"),
    "finance": ("extract", "compute", "check", "report"),
}


def _path(workflow: str, knobs: Knobs, rng: random.Random) -> Iterator[str]:
    """The agents of one run. `difficulty` is the run's own: it makes loops predictable from its past."""
    difficulty = rng.random()
    again = min(0.95, knobs.loops * (0.5 + difficulty))
    extras = [f"helper_{i}" for i in range(knobs.extra_agents)]
    if workflow == "finance":
        yield from AGENTS["finance"]
        return
    yield "decompose" if workflow == "hover" else "planner"
    for round_ in range(knobs.rounds):
        if workflow == "hover":
            yield from ("write_query", "analyse_evidence", "judge")
        else:
            yield from ("coder", "tester")
        yield from (extra for extra in extras if rng.random() < 0.5)
        if rng.random() >= again or round_ == knobs.rounds - 1:
            break
        if workflow == "swe":
            yield "analyser"
    if workflow == "swe":
        yield "committer"


def _run(
    workflow: str,
    number: int,
    path: list[str],
    systems: "dict[str, tuple[int, int]]",
    names: "_Blocks",
    knobs: Knobs,
    seed: int,
) -> TraceRun:
    rng = random.Random(f"{workflow} {seed} {number} sizes")
    task = _around(rng, knobs.input_tokens)
    contexts: dict[str, list[tuple[int, int]]] = {}
    pending: dict[str, int] = {}  # tokens that an agent has not read yet: the others' replies
    calls: list[TraceCall] = []
    for agent in path:
        fresh = agent not in contexts
        spans = contexts.setdefault(agent, [systems[agent]])
        new = pending.pop(agent, 0) + (task if fresh else 0) + _around(rng, knobs.growth_tokens)
        spans.append(names.take(new))
        tail = rng.randrange(BLOCK_TOKENS)
        prompt = sum(count for _, count in spans) * BLOCK_TOKENS + tail
        output = max(4, _around(rng, knobs.output_tokens))
        wait = rng.uniform(*knobs.wait_s)
        session = list(contexts).index(agent)
        calls.append(TraceCall(agent, session, prompt, output, tuple(spans), wait_s=wait if calls else None))
        spans.append(names.take(output + tail))  # its own reply is in its next prompt
        for other in set(path) - {agent}:
            pending[other] = pending.get(other, 0) + output
    return TraceRun(f"{workflow}-{number}", f"{workflow}-{number}", workflow, tuple(calls))


def _around(rng: random.Random, mean: int) -> int:
    """Log-normal with that mean: token counts are skewed."""
    return max(BLOCK_TOKENS, round(mean * rng.lognormvariate(-0.125, 0.5)))


class _Blocks:
    def __init__(self) -> None:
        self._next = 0

    def take(self, tokens: int) -> tuple[int, int]:
        """A span of new blocks that holds `tokens` tokens, rounded down, at least one."""
        count = max(1, tokens // BLOCK_TOKENS)
        self._next += count
        return self._next - count, count
