"""``serve --ray`` without Ray: what is checked before it, and what is asked of it, by a stand-in."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fake_ray import Client, Cluster
from ports import free_port
from secondguess.cli import main, parser_of
from secondguess.commands.serve_ray import check_models, portable, take_port
from secondguess.config import TreeConfig
from secondguess.device import check_share
from secondguess.engine.thread import submit
from secondguess.errors import UserError
from secondguess.methods import parse_method
from secondguess.server.replicas import Address, Replica, Replicas
from secondguess.server.settings import Settings

SETTINGS = Settings(served_model_name="models/tiny", max_queue=7, request_timeout=60, drain_timeout=1)


def test_numbers_of_replicas() -> None:
    assert Replicas(replicas=2).sizes(8) == {"num_replicas": 2}
    scaling = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 8}
    assert Replicas(max_replicas=4).sizes(8) == {"autoscaling_config": scaling}
    with pytest.raises(UserError, match="max_replicas must be at least 3, got 2"):
        Replicas(replicas=3, max_replicas=2)


def test_replicas_without_ray_are_refused(capsys) -> None:
    assert main(["serve", "smollm2-135m", "--replicas", "2"]) == 2
    assert "settings of replicas are for --ray" in capsys.readouterr().err


def test_a_replica_whose_engine_hangs_is_not_well() -> None:
    going_on = threading.Event()
    stuck = submit(going_on.wait)

    async def ask() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Replica().check_health(), 0.2)
        going_on.set()
        await asyncio.wait_for(Replica().check_health(), 30)

    try:
        asyncio.run(ask())
    finally:
        going_on.set()
    assert stuck.result()


@pytest.mark.parametrize(
    ("device", "gpus", "said"),
    [
        ("auto", 0, "say with --replica-gpus how many GPUs each takes"),
        ("cuda", 0, "say with --replica-gpus how many GPUs each takes"),
        ("cpu", 1, "--replica-gpus reserves GPUs, and --device cpu uses none"),
        ("cuda", -1, "--replica-gpus must be at least 0, got -1"),
    ],
)
def test_replicas_would_all_take_the_first_gpu(device: str, gpus: float, said: str) -> None:
    check_share("cpu", 0, "--replica-gpus")
    check_share("auto", 0.5, "--replica-gpus")
    with pytest.raises(UserError, match=said):
        check_share(device, gpus, "--replica-gpus")


# Before replicas start -----------------------------------------------------------------------------------------------


def arguments(*flags: str) -> argparse.Namespace:
    return parser_of("serve")[0].parse(["target", "--device", "cpu", *flags])


def test_paths_hold_in_other_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    args = arguments("--method", "pr:m=2,drafter=./drafters/pr", "--drafter", "drafters/eagle3.1")
    found = portable(args, TreeConfig())
    assert found.target == str(folder / "target")
    assert found.drafter == str(folder / "drafters" / "eagle3.1")
    assert found.method == f"pr:m=2,drafter={folder / 'drafters' / 'pr'}"
    assert portable(arguments(), TreeConfig()).method == "pr"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--drafter", "drafters/other"], "was trained for another, not for this target"),
        (["--drafter", "nowhere"], "no drafter 'nowhere': no such folder"),
        (["--method", "eagle3.1"], "no drafter 'eagle3.1': no such drafter ships"),
        (["--method", "ar", "--drafter", "drafters/pr"], "leave --drafter out"),
        (["--drafter", "drafters/pr", "--max-model-len", "5000"], r"max_model_len must be .* in \[2, 1024\]"),
        (["--drafter", "drafters/pr", "--kv-cache-tokens", "5"], "kv_cache_tokens must be"),
        (["--drafter", "drafters/pr", "--max-batch-size", "0"], "max_batch_size must be"),
        (["--drafter", "drafters/pr", "--dtype", "float23"], "unknown dtype"),
    ],
)
def test_mistakes_are_found_before_replicas_start(
    flags: list[str], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    good = arguments("--drafter", "drafters/pr")
    check_models(good, parse_method(good.method, TreeConfig()))
    bad = arguments(*flags)
    with pytest.raises(UserError, match=said):
        check_models(bad, parse_method(bad.method, TreeConfig()))


def test_a_target_that_is_not_there_is_found_as_well() -> None:
    args = argparse.Namespace(**vars(arguments()) | {"target": "not there"})
    with pytest.raises(UserError, match="no such target: 'not there'"):
        check_models(args, parse_method("pr", TreeConfig()))


def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert take_port("127.0.0.1", 0) > 0
    assert take_port("127.0.0.1", port := free_port()) == port
    with pytest.raises(UserError, match="--port must be in"):
        take_port("127.0.0.1", 70000)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert take_port("10.0.0.1", 8000) == 8000, "the address of another machine"
    with pytest.raises(UserError, match=r"in \[1, 65535\] on a cluster, got 0"):
        take_port("10.0.0.1", 0)


# What is asked of Ray ------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster, ours = Cluster(), ("ray_cluster", "ray_inside", "ray_serve")
    for name, module in cluster.packages().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ours:
        monkeypatch.delitem(sys.modules, f"secondguess.integrations.{name}", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    before = signal.getsignal(signal.SIGTERM)
    yield cluster
    signal.signal(signal.SIGTERM, before)
    for name in ours:
        sys.modules.pop(f"secondguess.integrations.{name}", None)


def test_what_another_release_lacks_is_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Client, "http_config")
    monkeypatch.setattr(sys.modules["ray.serve"], "delete", lambda name: None)
    lacks = r"Ray 2\.99 has no ray\.serve\.delete\(_blocking\), ServeControllerClient\.http_config as Ray 2\.60 has"
    with pytest.raises(UserError, match=lacks):
        importlib.import_module("secondguess.integrations.ray_inside")


@pytest.fixture
def ray_serve(cluster: Cluster) -> ModuleType:
    pytest.importorskip("fastapi")
    return importlib.import_module("secondguess.integrations.ray_serve")


def test_ray_serve_is_told_our_limits_and_ends_with_us(cluster: Cluster, ray_serve: ModuleType) -> None:
    wanted = Address("127.0.0.1", 8123, 60)
    with ray_serve.deployed(lambda: None, Replicas(replicas=2), SETTINGS, 4, wanted) as there:
        assert there == wanted
        assert cluster.http == SimpleNamespace(host="127.0.0.1", port=8123, request_timeout_s=60)
        assert cluster.routes == {"secondguess-models-tiny": "/"}
        assert (cluster.options["max_ongoing_requests"], cluster.options["max_queued_requests"]) == (8, 7)
        assert cluster.options["backpressure_config"]["status_code"] == 429
    assert cluster.http is None
    assert not cluster.connected


def test_other_applications_stay(cluster: Cluster, ray_serve: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    cluster.http = SimpleNamespace(host="0.0.0.0", port=8000, request_timeout_s=None)
    cluster.routes["theirs"] = "/theirs"
    with ray_serve.deployed(lambda: None, Replicas(), SETTINGS, 4, Address("127.0.0.1", 8123, 60)) as there:
        assert there == Address("0.0.0.0", 8000, None)
        assert cluster.routes.keys() == {"theirs", "secondguess-models-tiny"}
    assert cluster.routes == {"theirs": "/theirs"}
    assert cluster.http.port == 8000
    [said] = caplog.messages
    assert "Ray Serve runs there already" in said
    assert "0.0.0.0:8000" in said


def test_applications_of_others_since_we_started_ray_serve_stay(cluster: Cluster, ray_serve: ModuleType) -> None:
    with ray_serve.deployed(lambda: None, Replicas(), SETTINGS, 4, Address("127.0.0.1", 8123, 60)):
        cluster.routes["theirs"] = "/theirs"
    assert cluster.routes == {"theirs": "/theirs"}
    assert cluster.http is not None


@pytest.mark.parametrize(("name", "route"), [("theirs", "/"), ("secondguess-models-tiny", "/mine")])
def test_no_other_application_is_replaced(name: str, route: str, cluster: Cluster, ray_serve: ModuleType) -> None:
    cluster.http = SimpleNamespace(host="0.0.0.0", port=8000, request_timeout_s=None)
    cluster.routes[name] = route
    address = Address("0.0.0.0", 8000, None)
    in_the_way = pytest.raises(UserError, match=f"application {name} of that cluster has the route / or the name")
    with in_the_way, ray_serve.deployed(lambda: None, Replicas(), SETTINGS, 4, address):
        pytest.fail("it is not deployed")
    assert cluster.routes == {name: route}


def test_what_cannot_start_is_deleted(cluster: Cluster, ray_serve: ModuleType) -> None:
    cluster.http = SimpleNamespace(host="0.0.0.0", port=8000, request_timeout_s=None)
    cluster.broken = True
    address = Address("0.0.0.0", 8000, None)
    with (
        pytest.raises(RuntimeError, match="deploying failed"),
        ray_serve.deployed(lambda: None, Replicas(), SETTINGS, 4, address),
    ):
        pytest.fail("it is not deployed")
    assert cluster.routes == {}
    assert cluster.http is not None
