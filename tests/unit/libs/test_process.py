"""libs.process with real processes."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from libs.process import instance_name

SERVICE = """
import asyncio, os, sys
from libs.process import run_service

async def main(stop):
    print(os.getpid(), flush=True)
    await stop.wait()
    print("draining", flush=True)
    if "slow" in sys.argv:
        await asyncio.sleep(600)
    return 7

sys.exit(run_service(main))
"""
PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, "TOKENLOOM_PARENT_PID": str(os.getpid())})
time.sleep(600)
"""


def started(*command, **options):
    process = subprocess.Popen([sys.executable, "-c", *command], stdout=subprocess.PIPE, text=True, **options)
    return process, int(process.stdout.readline())


@pytest.fixture
def service():
    process, _ = started(SERVICE)
    yield process
    process.kill()
    process.wait(10)
    process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_service_finish_and_its_exit_code_is_the_processs(service, number):
    service.send_signal(number)
    assert service.stdout.readline() == "draining\n"
    assert service.wait(20) == 7


def test_a_service_whose_background_task_breaks_drains_and_ends():
    broken = SERVICE.replace(
        "    await stop.wait()", "    task = guard(asyncio.create_task(broken(), name='registry'))\n    await stop.wait()"
    )
    broken = broken.replace("import run_service", "import guard, run_service\n\nasync def broken():\n    raise ValueError('no such row')")
    done = subprocess.run([sys.executable, "-c", broken], capture_output=True, text=True, timeout=60)
    assert done.returncode == 7
    assert "draining" in done.stdout
    assert "registry" in done.stdout + done.stderr
    assert "no such row" in done.stdout + done.stderr


def test_a_second_signal_ends_a_service_that_drains_too_long():
    process, _ = started(SERVICE, "slow")
    with process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM


def test_a_service_dies_with_the_process_that_started_it():
    parent, pid = started(PARENT, SERVICE)
    with parent:
        service = psutil.Process(pid)
        parent.kill()
        parent.wait(20)
        deadline = time.monotonic() + 20
        while service.is_running() and service.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the service outlived its parent"
            time.sleep(0.01)


def test_a_service_whose_parent_died_before_it_could_ask_ends_at_once():
    environment = {**os.environ, "TOKENLOOM_PARENT_PID": "1" if os.getpid() != 1 else "2"}
    done = subprocess.run([sys.executable, "-c", SERVICE], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_service_started_by_hand_outlives_the_shell_that_started_it():
    parent, pid = started(PARENT.replace('"TOKENLOOM_PARENT_PID"', '"UNRELATED"'), SERVICE)
    with parent:
        service = psutil.Process(pid)
        parent.kill()
        parent.wait(20)
        assert service.is_running()
        service.kill()


def test_a_process_is_named_by_its_pid_unless_it_is_told_its_name():
    assert instance_name("worker", "") == f"worker-{os.getpid()}"
    assert instance_name("worker", "left") == "left"


def test_replicas_in_containers_have_different_names_although_all_of_them_are_pid_1(monkeypatch):
    monkeypatch.setattr("os.getpid", lambda: 1)
    monkeypatch.setattr("socket.gethostname", lambda: "1adc58c9460c")
    assert instance_name("worker", "") == "worker-1adc58c9460c"
