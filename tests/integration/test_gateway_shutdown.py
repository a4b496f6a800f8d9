"""SIGTERM: new requests are refused, running ones get their time, the process leaves with 0. With the real process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys

import httpx

from services.gateway.http_server import bind
from tests.support.gateway_fakes import EOS, FakeScheduler, FakeTokenizer, ids_of, silence
from tests.support.gateway_process import events_of, running_gateway, until
from tokenloom.common.v1 import common_pb2


@contextlib.asynccontextmanager
async def gateway_process(tmp_path, *flags: str):
    """A gateway process between fakes; yields it, its URL and the scheduler."""
    scheduler, tokenizer = FakeScheduler(silence), FakeTokenizer()
    addresses = [await scheduler.start(f"unix:{tmp_path}/s.sock"), await tokenizer.start(f"unix:{tmp_path}/t.sock")]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.gateway", "--port=0", f"--scheduler-address={addresses[0]}", f"--tokenizer-address={addresses[1]}", *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process, await _url_of(process), scheduler
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        await scheduler.stop()
        await tokenizer.stop()


async def _url_of(process) -> str:
    async with asyncio.timeout(20):
        while True:
            event = json.loads(await process.stderr.readline())
            if event["event"] == "the gateway listens":
                return event["url"]


async def _ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(10):
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.02)


async def test_a_drain_lets_streams_finish_and_refuses_new_requests(tmp_path):
    async with (
        gateway_process(tmp_path) as (process, url, scheduler),
        httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client,
    ):
        await _ready(client)
        running = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "stream": True}))
        session, submit = await scheduler.submitted.get()
        session.emit(submit.id, ids_of("begun, "))
        process.send_signal(signal.SIGTERM)
        refused = await _until_503(client)
        assert refused.json()["error"]["code"] == "draining"
        assert refused.headers["retry-after"]
        assert refused.headers["x-tokenloom-not-begun"]
        assert (await client.get("/health")).status_code == 200
        assert [reason["code"] for reason in (await client.get("/ready")).json()["reasons"]] == ["draining"]
        session.emit(submit.id, [*ids_of("finished"), EOS])
        session.emit(submit.id, [], ending=session.ending(submit.id))
        text = "".join(event["choices"][0]["text"] for event in events_of((await running).text)[:-1])
        assert text == "begun, finished"
        async with asyncio.timeout(10):
            assert await process.wait() == 0


async def _until_503(client: httpx.AsyncClient) -> httpx.Response:
    async with asyncio.timeout(5):
        while True:
            response = await client.post("/v1/completions", json={"prompt": [0] * 600})
            if response.status_code == 503:
                return response
            await asyncio.sleep(0.01)


async def test_in_the_drain_delay_requests_are_served_on_connections_that_close_while_ready_already_refuses(tmp_path):
    async with (
        gateway_process(tmp_path, "--drain-delay=60") as (process, url, scheduler),
        httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client,
    ):
        await _ready(client)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            while (ready := await client.get("/ready")).status_code == 200:
                await asyncio.sleep(0.01)
        assert [reason["code"] for reason in ready.json()["reasons"]] == ["draining"]
        running = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
        session, submit = await scheduler.submitted.get()
        session.emit(submit.id, [*ids_of("served"), EOS])
        session.emit(submit.id, [], ending=session.ending(submit.id))
        response = await running
        assert response.json()["choices"][0]["text"] == "served"
        assert response.headers["connection"] == ready.headers["connection"] == "close"
        process.send_signal(signal.SIGTERM)  # a second one waits for nothing
        async with asyncio.timeout(10):
            assert await process.wait() == 128 + signal.SIGTERM


async def test_a_refusal_says_whether_another_gateway_may_be_asked_instead(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        assert "x-tokenloom-not-begun" not in (await gateway.chat()).headers
        assert "x-tokenloom-not-begun" not in (await gateway.chat(temperature=-1)).headers
        gateway.mesh.leaving = gateway.mesh.draining = True
        refused = await gateway.chat()
        assert (refused.status_code, refused.headers["x-tokenloom-not-begun"]) == (503, "1")


async def test_a_request_that_a_drain_cancels_does_not_say_that_it_was_not_begun(tmp_path):
    async with running_gateway(tmp_path, FakeScheduler(silence), drain_timeout=0.0) as gateway:
        running = asyncio.create_task(gateway.chat())
        await gateway.scheduler.submitted.get()
        await gateway.mesh.drain()
        response = await running
        assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
        assert "x-tokenloom-not-begun" not in response.headers


async def test_without_a_session_another_gateway_may_be_asked(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        await gateway.scheduler.stop()
        await until(lambda: not gateway.mesh.session.up)
        refused = await gateway.chat()
        assert refused.json()["error"]["code"] == "scheduler_unavailable"
        assert refused.headers["x-tokenloom-not-begun"] == "1"


async def test_what_does_not_finish_in_time_is_cancelled(tmp_path):
    flags = ("--drain-timeout=0.2",)
    async with gateway_process(tmp_path, *flags) as (process, url, scheduler), httpx.AsyncClient(base_url=url, trust_env=False) as client:
        await _ready(client)
        running = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}, timeout=20))
        await scheduler.submitted.get()
        process.send_signal(signal.SIGTERM)
        response = await running
        assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
        assert (await scheduler.cancels.get()).reason == common_pb2.CANCEL_REASON_SHUTDOWN
        async with asyncio.timeout(10):
            assert await process.wait() == 0


async def test_an_idle_gateway_leaves_at_once_and_kept_connections_do_not_hold_it(tmp_path):
    async with gateway_process(tmp_path) as (process, url, _), httpx.AsyncClient(base_url=url, trust_env=False) as client:
        assert (await client.get("/health")).status_code == 200
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(5):
            assert await process.wait() == 0


async def test_a_taken_port_is_said_and_ends_the_process(tmp_path):
    taken, _ = bind("127.0.0.1", 0, "")
    taken.listen()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.gateway", f"--port={taken.getsockname()[1]}"), stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(20):
        _, errors = await process.communicate()
    taken.close()
    assert process.returncode == 1
    assert "cannot listen on 127.0.0.1" in errors.decode()


async def test_torch_and_the_tokenizers_stay_out_of_the_process():
    program = (
        "import services.gateway.__main__, sys; print([m for m in ('torch', 'transformers', 'tokenizers', 'numpy') if m in sys.modules])"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert output.decode().strip() == "[]"


async def test_a_unix_socket_is_served_and_a_stale_one_replaced(tmp_path):
    path = f"{tmp_path}/http.sock"
    for _ in range(2):
        listener, url = bind("", 0, path)
        assert url == f"unix:{path}"
        listener.close()
    async with running_gateway(tmp_path) as gateway:
        await until(lambda: not gateway.mesh.obstacles())
    with socket.socket(socket.AF_UNIX) as probe:
        assert probe.connect_ex(path) != 0


async def test_a_drain_refuses_before_reading_what_is_wrong_with_a_request(tmp_path):
    async with running_gateway(tmp_path) as gateway:
        gateway.mesh.draining = True
        response = await gateway.chat("hi", temperature=-1)
        assert (response.status_code, response.headers["connection"]) == (503, "close")
