"""Serves the mesh once as a user does (`make serve`), streams one chat through it, looks at its trace, and ends it with Ctrl-C.

Exit code 0 when everything that a user would see is right; else 1, with the reason and the mesh's log on stderr. Every wait is bounded.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import psutil

from tools.metrics_doc import parse
from tools.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
READY_SECONDS, CHAT_SECONDS, TRACE_SECONDS, STOP_SECONDS = 120.0, 90.0, 15.0, 45.0
MAX_TOKENS = 16
PROCESSES = ("services.gateway", "services.scheduler", "services.worker", "services.tokenizer", "cli.trace_receiver")


class SmokeError(Exception):
    """Something that a user would see is wrong."""


def check(condition: bool, message: str) -> None:
    """Raises SmokeError(message) unless `condition`."""
    if not condition:
        raise SmokeError(message)


@contextlib.contextmanager
def serving(port: int, log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """`make serve` in a process group of its own, as a shell starts it; whatever is left of it at the end is killed."""
    process = subprocess.Popen(
        ["make", "--no-print-directory", "serve", f"PORT={port}"], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # make and the supervisor; the services die with it
        process.wait(10)


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def get(port: int, path: str) -> tuple[int, bytes]:
    """Status and body of a GET; (0, b"") when nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


def wait_until_ready(process: subprocess.Popen[str], port: int) -> float:
    """Seconds until /ready answered 200."""
    started = time.monotonic()
    while time.monotonic() - started < READY_SECONDS:
        check(process.poll() is None, f"make serve ended with code {process.returncode} before it was ready")
        if get(port, "/ready")[0] == 200:
            return time.monotonic() - started
        time.sleep(0.1)
    raise SmokeError(f"not ready within {READY_SECONDS:g} s")


def stream_chat(port: int, model: str) -> str:
    """Streams one chat and checks its shape: role first, text, a finish reason, usage, [DONE]. Returns the response's id."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Name three things that are woven."}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CHAT_SECONDS)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    check(response.status == 200, f"the chat was answered with {response.status}: {text[:500]}")
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    check(bool(events) and events[-1] == "[DONE]", f"the stream does not end with [DONE]: {events[-1:]}")
    return _check_chunks([json.loads(event) for event in events[:-1]])


def _check_chunks(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    check(choices[0]["delta"].get("role") == "assistant", f"the first chunk has no role: {chunks[0]}")
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    check(len(text.split()) >= 3, f"hardly any text: {text!r}")
    check(choices[-1]["finish_reason"] in ("stop", "length"), f"no finish reason: {choices[-1]}")
    usage = chunks[-1].get("usage") or {}
    check(0 < usage.get("completion_tokens", 0) <= MAX_TOKENS and usage.get("prompt_tokens", 0) > 0, f"no usage at the end: {chunks[-1]}")
    print(f"smoke: {len(chunks)} chunks, {usage['completion_tokens']} tokens: {text!r}")
    return str(chunks[0]["id"])


def check_trace(port: int, response_id: str) -> None:
    """`tokenloom trace` knows the request and shows every service's part of it."""
    command = [str(Path(sys.executable).with_name("tokenloom")), "trace", response_id, "--port", str(port), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TRACE_SECONDS, check=False)
    check(done.returncode == 0, f"tokenloom trace: {done.stderr}")
    spans = json.loads(done.stdout)["spans"]
    services = {span["service"].removeprefix("tokenloom-") for span in spans}
    missing = {"gateway", "tokenizer", "scheduler", "worker"} - services
    check(not missing, f"the trace lacks spans of {sorted(missing)}: {[span['name'] for span in spans]}")
    print(f"smoke: trace of {len(spans)} spans: {', '.join(span['name'] for span in spans)}")


def check_metrics(port: int) -> None:
    """docs/metrics.md knows every metric that the gateway serves, and those of the other services where their ports were free."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    served = [get(port + offset, "/metrics")[1].decode() for offset in range(4)]
    check("tokenloom:time_to_first_token_seconds_count" in served[0], "the gateway serves no time to first token")
    missing = [metric.name for text in served for metric in parse(text) if f"`{metric.name}`" not in page]
    check(not missing, f"docs/metrics.md lacks {missing}; make it anew with tools/metrics_doc.py")


def interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C, as a terminal sends it: to the whole foreground group. Every process must end."""
    family = _family(process.pid)
    names = [" ".join(member.cmdline()) for member in family]
    for expected in PROCESSES:
        check(any(expected in name for name in names), f"{expected} does not run")
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        raise SmokeError(f"make serve did not end within {STOP_SECONDS:g} s of Ctrl-C") from None
    _, alive = psutil.wait_procs([member for member in family if member.pid != process.pid], timeout=5)
    left = [" ".join(member.cmdline()) for member in alive if member.status() != psutil.STATUS_ZOMBIE]
    check(not left, f"processes outlived Ctrl-C: {left}")


def main() -> int:
    """Runs the whole story once."""
    port = free_port()
    with tempfile.TemporaryFile("w+") as log:
        try:
            with serving(port, log) as process:
                print(f"smoke: ready in {wait_until_ready(process, port):.1f} s")
                model = json.loads(get(port, "/v1/models")[1])["data"][0]["id"]
                response_id = stream_chat(port, model)
                check_trace(port, response_id)
                check_metrics(port)
                interrupt(process)
        except (SmokeError, OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError) as error:
            log.seek(0)
            print(f"{log.read()[-20_000:]}\nsmoke: FAILED: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
        log.seek(0)
        check_log = log.read()
    if "Traceback" in check_log:
        print(f"{check_log[-20_000:]}\nsmoke: FAILED: a traceback in the log", file=sys.stderr)
        return 1
    print("smoke: every process ended after Ctrl-C")
    return 0


if __name__ == "__main__":
    sys.exit(main())
