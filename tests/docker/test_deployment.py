"""The minimal profile on a real engine, from a clean start to a drained end. The tests run in order, on one deployment."""

import json
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.docker.chat import ask, stream
from tests.docker.deployment import OTHER_MODEL, Deployment, docker, eventually, inspect, metric

pytestmark = pytest.mark.docker

SERVED = ("gateway", "tokenizer", "scheduler", "worker", "redis", "envoy")
HTTP_OK = 200
HTTP_NOT_FOUND = 404


def encoded(container: str) -> float:
    """Prompts that a tokenizer's container has encoded."""
    return metric(container, 9100, "tokenloom:tokenizer_requests_total")


def answered(container: str) -> float:
    """Requests that a gateway's container has answered."""
    return metric(container, 8000, "tokenloom:http_requests_total")


def test_it_comes_up_healthy_from_clean_with_two_tokenizers_and_the_model_imported_once(mesh: Deployment):
    states = [json.loads(line) for line in mesh.compose("ps", "--all", "--format", "json").splitlines()]
    running = sorted(state["Service"] for state in states if state["State"] == "running" and state["Health"] == "healthy")
    assert running == sorted([*SERVED, "tokenizer"])
    [job] = [state for state in states if state["Service"] == "model"]
    assert (job["State"], job["ExitCode"]) == ("exited", 0)
    assert "imported into /models/served" in mesh.compose("logs", "model")


@pytest.mark.parametrize("service", SERVED)
def test_a_container_is_confined_and_its_processes_are_nobody_special(mesh: Deployment, service):
    for container in mesh.containers(service):
        found = inspect(container)
        host = found["HostConfig"]
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        assert "no-new-privileges:true" in host["SecurityOpt"]
        assert host["Memory"] > 0
        assert host["LogConfig"]["Config"]["max-size"]
        assert host["RestartPolicy"]["Name"] == "unless-stopped"
        assert "root" not in docker("top", container, "-eo", "user,pid").split()
        assert found["State"]["Health"]["Status"] == "healthy"


def test_a_chat_streams_through_envoy_chunk_by_chunk(mesh: Deployment):
    got = stream(mesh.url, "Tell me of looms.", max_tokens=64)
    assert got.done
    assert got.finish_reason == "length"
    assert len(got.text) > 20
    spread = got.arrivals[-1] - got.arrivals[0]
    gaps = [later - earlier for earlier, later in zip(got.arrivals, got.arrivals[1:], strict=False)]
    print(f"{len(got.text)} chunks over {spread:.2f} s, the longest gap {max(gaps):.2f} s")
    # Held back anywhere, they would all come at once at the end.
    assert sum(gap > 0.001 for gap in gaps) > len(gaps) / 2
    assert max(gaps) < spread / 2


def test_two_tokenizers_share_the_load(mesh: Deployment):
    replicas = mesh.containers("tokenizer")
    before = [encoded(replica) for replica in replicas]
    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(lambda number: ask(mesh.url, f"Number {number}"), range(40)))
    shares = [encoded(replica) - earlier for replica, earlier in zip(replicas, before, strict=True)]
    print(f"shares of 40 prompts: {shares}")
    assert set(statuses) == {HTTP_OK}
    assert len(shares) == 2
    assert sum(shares) >= 40
    assert min(shares) >= 4


def test_a_killed_tokenizer_costs_no_request_and_comes_back(mesh: Deployment):
    victim = mesh.containers("tokenizer")[0]
    stop, statuses = threading.Event(), []

    def keep_asking(name: int) -> None:
        number = 0
        while not stop.is_set():
            statuses.append(ask(mesh.url, f"Client {name}, question {number}"))
            number += 1

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(keep_asking, name) for name in range(4)]
        try:
            eventually(lambda: len(statuses) >= 8, "requests before the tokenizer is killed")
            # Its process, not the container: `docker kill` would keep the engine from starting it anew.
            subprocess.run(["kill", "-9", str(inspect(victim)["State"]["Pid"])], check=True)
            killed_at = len(statuses)
            eventually(lambda: len(statuses) >= killed_at + 16, "requests while one tokenizer is gone")
            eventually(lambda: inspect(victim)["RestartCount"] == 1, "the engine starts it anew")
            eventually(lambda: inspect(victim)["State"]["Health"]["Status"] == "healthy", "it is healthy again")
        finally:
            stop.set()
        for one in asking:
            one.result()
    print(f"{len(statuses)} requests, {len(statuses) - killed_at} of them after the kill: {set(statuses)}")
    assert set(statuses) == {HTTP_OK}


def test_scaling_to_four_tokenizers_and_two_gateways_is_picked_up_without_a_restart(mesh: Deployment):
    before = {container for service in SERVED for container in mesh.containers(service)}
    mesh.up("--scale", "tokenizer=4", "--scale", "gateway=2")
    tokenizers, gateways = mesh.containers("tokenizer"), mesh.containers("gateway")
    assert (len(tokenizers), len(gateways)) == (4, 2)
    assert before < {container for service in SERVED for container in mesh.containers(service)}

    def all_have_served() -> bool:
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(lambda number: ask(mesh.url, f"Question {number}"), range(8))) == {HTTP_OK}
        return all(encoded(one) for one in tokenizers) and all(answered(one) for one in gateways)

    eventually(all_have_served, "each replica has served something")
    print(f"prompts of each tokenizer: {[encoded(one) for one in tokenizers]}")
    print(f"requests of each gateway: {[answered(one) for one in gateways]}")


def test_compose_stop_lets_running_streams_finish(mesh: Deployment):
    containers = {container: service for service in SERVED for container in mesh.containers(service)}
    begun = [threading.Event() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream, mesh.url, f"A long story, number {n}", max_tokens=160, begun=event) for n, event in enumerate(begun)]
        for event in begun:
            assert event.wait(60)
        stopping_at = time.monotonic()
        mesh.compose("stop", timeout=240)
        print(f"stopped in {time.monotonic() - stopping_at:.1f} s")
        finished = [one.result() for one in streams]
    for got in finished:
        after = sum(at > stopping_at for at in got.arrivals)
        print(f"a stream of {len(got.text)} chunks, {after} of them after the stop began: {got.finish_reason}")
        assert got.done
        assert got.finish_reason == "length"
        assert got.arrivals[-1] > stopping_at
    exits = {(service, inspect(container)["State"]["ExitCode"]) for container, service in containers.items()}
    assert {code for _, code in exits} == {0}, exits


def test_a_second_start_finds_the_model_there_and_serves_again(mesh: Deployment):
    mesh.up()
    assert "is already at /models/served" in mesh.compose("logs", "model").splitlines()[-1]
    assert ask(mesh.url, "Hello again") == HTTP_OK


def test_another_model_from_the_mounted_folder_replaces_the_first_everywhere(mesh: Deployment):
    mesh.settings["MODEL"] = OTHER_MODEL
    mesh.up()
    assert f"{OTHER_MODEL} imported into /models/served" in mesh.compose("logs", "model")
    assert ask(mesh.url, "Hello", OTHER_MODEL) == HTTP_OK
    assert ask(mesh.url, "Hello") == HTTP_NOT_FOUND
