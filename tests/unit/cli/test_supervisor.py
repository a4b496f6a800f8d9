"""The supervisor over real child processes: small Python programs that stand in for services."""

import asyncio
import io
import os
import signal
import sys
import time
from contextlib import asynccontextmanager

import psutil
import pytest

from cli.child import MAX_LINE_BYTES, Child, ServiceSpec, describe_exit
from cli.output import Output
from cli.supervisor import Backoff, Supervisor

SERVE = """
import signal, sys, time

def end(*_):
    print('ended', flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
print('up', flush=True)
time.sleep(600)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


def spec(name, code, **options):
    return ServiceSpec(name, (sys.executable, "-c", code), **options)


def wait_until_ended(pid):
    """Returns once the process is gone, or a zombie that nobody reaps; fails after 10 s."""
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.01)


class Recorder:
    """Collects lines as `Output.forward` would, and lets a test wait for one."""

    def __init__(self):
        self.lines = []
        self._changed = asyncio.Event()

    def __call__(self, service, line):
        self.lines.append((service, line))
        self._changed.set()

    async def wait_for(self, service, line, count=1):
        while self.lines.count((service, line)) < count:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 20)


class RecordingOutput(Output):
    """An Output whose log lines a test can read and wait for."""

    def __init__(self):
        super().__init__("json", out=io.StringIO(), err=io.StringIO())
        self.recorder = Recorder()
        self.events = []
        self.logged = asyncio.Event()

    def forward(self, service, line):
        self.recorder(service, line)

    def event(self, level, event, **fields):
        self.events.append((level, event, fields))
        self.logged.set()


@asynccontextmanager
async def supervised(*specs, backoff=None):
    output = RecordingOutput()
    supervisor = Supervisor(specs, output, backoff=backoff)
    supervisor.start()
    try:
        yield supervisor, output
    finally:
        supervisor.kill()
        await supervisor.stop()
        output.close()


async def test_services_run_and_end_in_the_order_given():
    async with supervised(*(spec(name, SERVE) for name in ("gateway", "scheduler", "worker"))) as (supervisor, output):
        for name in ("gateway", "scheduler", "worker"):
            await output.recorder.wait_for(name, "up")
        await supervisor.stop()
        ended = [service for service, line in output.recorder.lines if line == "ended"]
    assert ended == ["gateway", "scheduler", "worker"]


async def test_a_killed_service_is_started_again_and_the_log_says_why_and_when():
    async with supervised(spec("worker", SERVE), backoff=Backoff(first=0.01)) as (supervisor, output):
        await output.recorder.wait_for("worker", "up")
        supervisor.mark_ready()
        first = supervisor.pid("worker")
        os.kill(first, signal.SIGKILL)
        await output.recorder.wait_for("worker", "up", count=2)
        assert supervisor.pid("worker") != first
    level, event, fields = output.events[0]
    assert level == "error"
    assert "worker was killed by SIGKILL" in event
    assert fields["restart_in_seconds"] == 0.01


async def test_a_service_that_ends_before_the_mesh_is_ready_is_a_failure_with_its_last_words():
    async with supervised(spec("worker", "print('no such model'); raise SystemExit(2)"), spec("gateway", SERVE)) as (supervisor, output):
        failure = await asyncio.wait_for(supervisor.failure, 20)
    assert (failure.service, failure.reason, failure.tail) == ("worker", "ended with exit code 2", ("no such model",))
    assert not output.events


async def test_a_command_that_does_not_exist_is_a_failure_of_the_start():
    missing = ServiceSpec("worker", ("/nonexistent/program",))
    async with supervised(missing) as (supervisor, _):
        failure = await asyncio.wait_for(supervisor.failure, 20)
    assert "could not be started" in failure.reason


async def test_a_service_that_is_not_essential_is_started_again_even_before_the_mesh_is_ready():
    flaky = spec("traces", "print('up', flush=True); raise SystemExit(1)", essential=False)
    async with supervised(flaky, backoff=Backoff(first=0.01)) as (supervisor, output):
        await output.recorder.wait_for("traces", "up", count=2)
        assert not supervisor.failure.done()


async def test_a_service_deaf_to_sigterm_is_killed_after_its_bound():
    async with supervised(spec("worker", DEAF, stop_seconds=0.2)) as (supervisor, output):
        await output.recorder.wait_for("worker", "up")
        pid = supervisor.pid("worker")
        await asyncio.wait_for(supervisor.stop(), 10)
        assert not psutil.pid_exists(pid)
    assert output.events[0][1] == "worker did not end within 0.2 s and was killed"


async def test_a_second_signal_ends_a_deaf_service_at_once():
    async with supervised(spec("worker", DEAF, stop_seconds=600)) as (supervisor, output):
        await output.recorder.wait_for("worker", "up")
        stopping = asyncio.create_task(supervisor.stop())
        await asyncio.sleep(0)
        supervisor.kill()
        await asyncio.wait_for(stopping, 10)


async def test_stop_during_the_backoff_starts_nothing_again():
    async with supervised(spec("worker", SERVE), backoff=Backoff(first=600)) as (supervisor, output):
        await output.recorder.wait_for("worker", "up")
        supervisor.mark_ready()
        os.kill(supervisor.pid("worker"), signal.SIGKILL)
        await asyncio.wait_for(output.logged.wait(), 20)
        await asyncio.wait_for(supervisor.stop(), 10)
        assert output.recorder.lines.count(("worker", "up")) == 1


async def test_stop_right_after_start_leaves_no_process_behind():
    async with supervised(spec("worker", SERVE)) as (supervisor, _):
        await asyncio.sleep(0)
        await asyncio.wait_for(supervisor.stop(), 20)
        pid = supervisor.pid("worker")
        assert pid is None or not psutil.pid_exists(pid)


async def test_helpers_that_a_dead_service_left_behind_are_ended():
    code = (
        "import subprocess, sys\n"
        "helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(helper.pid, flush=True)\n"
        "raise SystemExit(1)\n"
    )
    recorder = Recorder()
    child = Child(spec("tokenizer", code), recorder)
    assert await asyncio.wait_for(child.run(), 20) == 1
    helper = int(recorder.lines[0][1])
    await asyncio.to_thread(wait_until_ended, helper)


async def test_a_child_leads_its_own_session_so_that_ctrl_c_does_not_reach_it():
    recorder = Recorder()
    child = Child(spec("worker", "import os; print(os.getsid(0) == os.getpid())"), recorder)
    await asyncio.wait_for(child.run(), 20)
    assert recorder.lines == [("worker", "True")]


async def test_output_without_a_newline_and_lines_without_end_are_forwarded_in_bounded_pieces():
    recorder = Recorder()
    code = f"import sys; sys.stdout.write('x' * {3 * MAX_LINE_BYTES}); sys.stdout.write('\\nlast')"
    await asyncio.wait_for(Child(spec("worker", code), recorder).run(), 20)
    texts = [line for _, line in recorder.lines]
    assert texts[-1] == "last"
    assert "".join(texts[:-1]) == "x" * (3 * MAX_LINE_BYTES)
    assert max(map(len, texts)) <= 2 * MAX_LINE_BYTES


def test_delays_double_up_to_half_a_minute_and_fall_back_after_a_minute_of_health():
    backoff = Backoff()
    assert [backoff.after(0) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff.after(60) == 0.5
    assert backoff.after(0) == 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (2, "ended with exit code 2"),
        (-9, "was killed by SIGKILL"),
        (-15, "was killed by SIGTERM"),
        (-200, "was killed by signal 200"),
    ],
)
def test_exit_codes_are_told_in_words(code, words):
    assert describe_exit(code) == words
