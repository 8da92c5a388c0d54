"""The command explains itself, all of it, and says what is wrong in a sentence."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pbkv_ray.cli import build_app

COMMANDS = (
    "", "serve", "demo", "submit", "runs", "runs list", "runs show", "runs cancel", "train", "evaluate", "replay",
    "policy", "policy show", "policy set",
    "traces", "traces import", "traces export", "traces record", "traces stats",
    "bench", "bench evict", "bench policies", "bench overhead", "bench controller", "report",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str):
    result = CliRunner().invoke(build_app(), [*command.split(), "--help"])
    assert result.exit_code == 0, result.exception
    assert "Usage:" in result.output


def test_nobody_at_the_address_is_said_in_one_line_and_ends_with_1():
    pbkv = Path(sys.executable).parent / "pbkv"
    result = subprocess.run([pbkv, "runs", "list", "--url", "http://127.0.0.1:9"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert "nothing answers at http://127.0.0.1:9" in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr


def test_a_fresh_home_gets_a_ray_token_that_only_its_owner_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from pbkv_ray.cli.local import prepare_environment

    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    prepare_environment()
    token = tmp_path / ".ray" / "auth_token"
    made = token.read_text()
    assert (len(made), oct(token.stat().st_mode)[-3:]) == (64, "600")
    prepare_environment()
    assert token.read_text() == made


def test_a_start_that_is_interrupted_stops_what_has_started(monkeypatch: pytest.MonkeyPatch):
    from pbkv_ray.cli.local import free_port, serving

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    stopped = list[str]()
    monkeypatch.setattr("deployments.app.run_local", interrupted)
    monkeypatch.setattr("deployments.app.stop_local", lambda: stopped.append("all"))
    with pytest.raises(KeyboardInterrupt), serving({}, "127.0.0.1", free_port()):
        pass
    assert stopped == ["all"]
