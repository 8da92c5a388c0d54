"""Small traces made by hand: `runs("pct", "pcct")` is two runs whose letters are agents."""

import gzip
import json
from pathlib import Path

import numpy as np

from pbkv_ray.predict.dataset import Run


def runs(*paths: str, workflow: str = "swe", signal: bool = False) -> list[Run]:
    """Every path is a task instance of its own. `signal`: the hidden state says who comes next (0 for END)."""
    made = []
    for number, path in enumerate(paths):
        following = [ord(c) for c in path[1:]] + [0]
        state = np.array([[f % 7, f % 5, f % 3, 1.0] for f in following], np.float32)
        made.append(
            Run(
                run_id=f"{workflow}-{number}",
                workflow=workflow,
                instance=f"task-{number}",
                agents=tuple(path),
                prompt_tokens=np.arange(1, len(path) + 1) * 100,
                output_tokens=np.full(len(path), 20),
                hidden={"decode": state} if signal else {},
            )
        )
    return made


def write(path: Path, made: list[Run]) -> Path:
    """As a gzipped trace file."""
    with gzip.open(path, "wt") as file:
        file.write(json.dumps({"_meta": {"dataset": "made by hand"}}) + "\n")
        for run in made:
            calls = [
                {"a": a, "in": int(i), "out": int(o)}
                for a, i, o in zip(run.agents, run.prompt_tokens, run.output_tokens, strict=True)
            ]
            row = {"id": run.run_id, "inst": run.instance, "workflow": run.workflow, "calls": calls}
            file.write(json.dumps(row) + "\n")
    return path
