"""cluster.yaml and serve.yaml pass Ray's own validation, and the arguments in serve.yaml ours."""

from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from deployments.http.auth import Keys
from deployments.settings import AppArgs
from pbkv_ray.errors import ConfigError

ROOT = Path(__file__).parents[2]
KEY = "0123456789abcdef0123"


def test_the_cluster_file_passes_rays_validation():
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load((ROOT / "cluster.yaml").read_text()))
    validate_config(config)
    workers = config["available_node_types"]["gpu8"]
    assert (workers["min_workers"], workers["max_workers"]) == (1, 8)


def test_the_rayservice_passes_rays_schema_and_ours(tmp_path: Path):
    from ray.serve.schema import ServeDeploySchema

    for name in ("api-keys", "salt-secret"):
        (tmp_path / name).write_text(KEY * 2)
    text = (ROOT / "deployments" / "rayservice.yaml").read_text()
    service = yaml.safe_load(text)
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    serve = ServeDeploySchema(**yaml.safe_load(service["spec"]["serveConfigV2"].replace("/etc/pbkv", str(tmp_path))))
    (application,) = serve.applications
    assert application.import_path == "deployments.app:build"
    args = AppArgs.checked(application.args)
    assert (args.host, args.gateway_options().api_keys) == (serve.http_options.host, (f"{KEY}{KEY}",))

    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["rayVersion"] == version("ray")
    assert cluster["authOptions"] == {"mode": "token"}
    (group,) = cluster["workerGroupSpecs"]
    head, worker = cluster["headGroupSpec"]["template"]["spec"], group["template"]["spec"]
    images = {container["image"] for spec in (head, worker) for container in spec["containers"]}
    assert images == {yaml.safe_load((ROOT / "cluster.yaml").read_text())["docker"]["image"]}
    assert worker["terminationGracePeriodSeconds"] > args.drain_s
    # Every file that the arguments name is mounted, on every node.
    assert {args.api_keys_file, args.salt_secret_file} == {tmp_path / "api-keys", tmp_path / "salt-secret"}
    for spec in (head, worker):
        assert "/etc/pbkv" in {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
        assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} == {
            v["name"] for v in spec["volumes"]
        }


def test_the_image_has_what_the_application_is_made_of():
    lines = (ROOT / "deployments" / "Dockerfile").read_text().splitlines()
    copied = {line.split()[1] for line in lines if line.startswith("COPY")}
    packages = {"pbkv_ray", "agents", "workflows", "deployments"}
    assert copied >= packages | {"deployments/requirements/full.txt"}
    assert all((ROOT / path).exists() for path in copied - {"pyproject.toml"})
    assert f"-t {yaml.safe_load((ROOT / 'cluster.yaml').read_text())['docker']['image']}" in lines[0]


def test_the_serve_file_passes_rays_schema_and_ours():
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema(**yaml.safe_load((ROOT / "serve.yaml").read_text()))
    (application,) = schema.applications
    assert application.import_path == "deployments.app:build"
    assert AppArgs.checked(application.args).engine_options().policy == "pbkv+"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": 3}, "model is 3"),
        ({"modle": "x"}, "modle is 'x': Extra inputs are not permitted"),
        ({"policy": "magic"}, "policy 'magic' is unknown; known are lru, session"),
        ({"engine_replicas": 0}, "engine_replicas is 0"),
        ({"host": "0.0.0.0"}, "host '0.0.0.0' is reachable from other machines and no API key is set"),
        ({"database": "mysql://db/pbkv"}, "store URL names 'mysql'; known are sqlite:///FILE and postgresql://"),
        ({"runner_replicas": 2}, "runner_replicas is 2 and the database is SQLite"),
        ({"api_keys_file": "/no/such/file"}, "api_keys_file /no/such/file cannot be read"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_starts(values: dict[str, object], said: str):
    with pytest.raises(ConfigError) as caught:
        AppArgs.checked(values)
    assert said in str(caught.value)


def test_keys_come_from_a_file_and_share_one_salt_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    keys = tmp_path / "keys"
    keys.write_text(f"# team a\n{KEY}\n\n")
    args = AppArgs.checked({"host": "0.0.0.0", "api_keys_file": str(keys)})
    options = args.gateway_options()
    assert options.api_keys == (KEY,)
    assert (len(options.salt_secret), options.salt_secret) == (64, args.gateway_options().salt_secret)
    secret = tmp_path / "pbkv-ray" / "salt-secret"
    assert oct(secret.stat().st_mode)[-3:] == "600"
    assert KEY not in repr(options) and options.salt_secret not in repr(options)


def test_a_key_may_have_a_head_start_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\nanother-{KEY} 30\n")
    options = AppArgs.checked({"api_keys_file": str(keys)}).gateway_options()
    assert options.head_starts_s == {KEY: 0.0, f"another-{KEY}": 30.0}
    assert [Keys(options).tenant({"x-api-key": key}).head_start_s for key in options.api_keys] == [0.0, 30.0]
    for line, said in ((f"{KEY} {KEY}", "line 1: behind the key stands no number"), (f"{KEY} -1", "is -1.0 s")):
        keys.write_text(line)
        with pytest.raises(ConfigError) as caught:
            AppArgs.checked({"api_keys_file": str(keys)})
        assert said in str(caught.value) and KEY not in str(caught.value)


def test_two_applications_of_one_cluster_do_not_execute_each_others_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    args = AppArgs.checked({})
    assert args.database_url("pbkv") == "sqlite+aiosqlite:////data/pbkv-ray/runs.sqlite"
    assert args.database_url("team b/2") == "sqlite+aiosqlite:////data/pbkv-ray/runs-team%20b%2F2.sqlite"
    named = AppArgs.checked({"database": "sqlite+aiosqlite:////tmp/mine.sqlite"})
    assert named.database_url("team b/2") == "sqlite+aiosqlite:////tmp/mine.sqlite"


def test_names_of_this_server_beside_loopback_come_from_the_arguments():
    assert AppArgs.checked({"allowed_hosts": ["pbkv.lan"]}).gateway_options().allowed_hosts == ("pbkv.lan",)


def test_an_empty_file_of_keys_is_refused(tmp_path: Path):
    (tmp_path / "keys").write_text("# none yet\n")
    with pytest.raises(ConfigError, match="holds no key; write one a line"):
        AppArgs.checked({"api_keys_file": str(tmp_path / "keys")})
