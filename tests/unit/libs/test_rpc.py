"""libs.rpc over a real server in this process: what leaves one side as an error of the table arrives as the same row."""

import asyncio
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from libs import rpc
from libs.errors import ErrorCode, TokenloomError
from tokenloom.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

SERVICE = tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name


class Refusing(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """A tokenizer service that answers everything with one error, in one of three ways."""

    def __init__(self, error):
        self.error = error

    async def GetTextTable(self, request, context):
        if isinstance(self.error, TokenloomError):
            await rpc.abort(context, self.error)
        if isinstance(self.error, grpc.StatusCode):
            await context.abort(self.error, "plain words")
        raise self.error


@asynccontextmanager
async def serving(address, error=None):
    server = rpc.new_server([SERVICE])
    tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(Refusing(error), server.server)
    bound = await rpc.listen(server, address)
    try:
        async with rpc.connect(bound) as channel:
            yield server, channel
    finally:
        await server.stop(0)


async def error_from(channel, **options):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await tokenizer_pb2_grpc.TokenizerServiceStub(channel).GetTextTable(tokenizer_pb2.GetTextTableRequest(), timeout=10)
    return rpc.error_of(raised.value, **options)


@pytest.fixture
def address(tmp_path):
    return f"unix:{tmp_path}/service.sock"


@pytest.mark.parametrize("code", list(ErrorCode), ids=lambda code: code.name)
async def test_every_row_crosses_a_call_with_its_message_and_parameter(address, code):
    sent = TokenloomError(code, "the prompt has 9000 tokens, é", param="messages[0].content", retry_after_ms=250)
    async with serving(address, sent) as (_, channel):
        arrived = await error_from(channel)
    assert (arrived.code, arrived.message, arrived.param, arrived.retry_after_ms) == (code, sent.message, sent.param, 250)


async def test_what_was_absent_stays_absent(address):
    async with serving(address, TokenloomError(ErrorCode.INTERNAL, "")) as (_, channel):
        arrived = await error_from(channel)
    assert (arrived.param, arrived.retry_after_ms) == (None, None)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, ErrorCode.INVALID_REQUEST),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ErrorCode.DEADLINE_EXCEEDED),
        (grpc.StatusCode.UNIMPLEMENTED, ErrorCode.UNSUPPORTED),
        (grpc.StatusCode.UNAVAILABLE, ErrorCode.UNAVAILABLE),
        (grpc.StatusCode.DATA_LOSS, ErrorCode.INTERNAL),
    ],
)
async def test_a_status_without_details_finds_its_row(address, status, code):
    async with serving(address, status) as (_, channel):
        arrived = await error_from(channel)
    assert (arrived.code, arrived.message) == (code, "plain words")


async def test_an_exception_of_the_server_is_internal(address):
    async with serving(address, ValueError("a bug")) as (_, channel):
        assert (await error_from(channel)).code is ErrorCode.INTERNAL


async def test_a_peer_that_is_not_there_is_what_the_caller_calls_it(tmp_path):
    async with rpc.connect(f"unix:{tmp_path}/nobody.sock") as channel:
        arrived = await error_from(channel, unavailable=ErrorCode.TOKENIZER_UNAVAILABLE)
    assert arrived.code is ErrorCode.TOKENIZER_UNAVAILABLE
    assert arrived.message


async def test_health_follows_set_ready_for_the_server_and_for_each_service(address):
    async with serving(address) as (server, channel):
        stub = health_pb2_grpc.HealthStub(channel)

        async def statuses():
            return {name: (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)).status for name in ("", SERVICE)}

        assert set((await statuses()).values()) == {health_pb2.HealthCheckResponse.NOT_SERVING}
        await server.set_ready(True)
        assert set((await statuses()).values()) == {health_pb2.HealthCheckResponse.SERVING}
        await server.set_ready(False)
        assert set((await statuses()).values()) == {health_pb2.HealthCheckResponse.NOT_SERVING}


async def test_a_server_that_is_not_ready_is_alive_all_the_same(address):
    async with serving(address) as (_, channel):
        check = health_pb2_grpc.HealthStub(channel).Check
        assert (await check(health_pb2.HealthCheckRequest(service=rpc.LIVE), timeout=10)).status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_lists_the_service_and_health(address):
    async with serving(address) as (_, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name async for answer in call for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_port_0_is_bound_to_a_real_port():
    async with serving("127.0.0.1:0") as (server, _):
        host, _, port = server.address.rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0


async def test_an_address_that_is_taken_is_an_os_error():
    async with serving("127.0.0.1:0") as (server, _):
        other = rpc.new_server([SERVICE])
        with pytest.raises(OSError, match="cannot listen on"):
            await rpc.listen(other, server.address)
        await other.server.stop(0)


async def test_a_channel_outlives_a_restart_of_its_server(address):
    async with rpc.connect(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for _ in range(2):
            async with serving(address):
                answer = await check(health_pb2.HealthCheckRequest(), timeout=10, wait_for_ready=True)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            # A call made before the channel has seen its connection close is written into the closed socket, and fails.
            await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), 10)


@pytest.mark.parametrize("text", ["b" * 100_000, "é" * 100_000, "\N{DESERT ISLAND}" * 100_000, "half \ud800 of a character"], ids="abcd")
async def test_whatever_an_error_quotes_crosses_a_call_as_that_error(address, text):
    sent = TokenloomError(ErrorCode.TEMPLATE_ERROR, text, param=text)
    async with serving(address, sent) as (_, channel):
        for _ in range(5):  # gRPC refuses what is between its soft and its hard limit now and then
            arrived = await error_from(channel)
            assert (arrived.code, arrived.message, arrived.param) == (ErrorCode.TEMPLATE_ERROR, sent.message, sent.param)


_PINGS = """
import asyncio, os, sys
from libs import rpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

PINGS = 200


def woken():
    told = 0
    for task in os.listdir("/proc/self/task"):
        folder = f"/proc/self/task/{task}/"
        if open(folder + "comm").read().strip() == "event_engine":
            told += sum(int(line.split()[1]) for line in open(folder + "status") if line.startswith("voluntary"))
    return told


async def main():
    server = rpc.new_server([])
    address = await rpc.listen(server, sys.argv[1])
    async with rpc.connect(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(service=rpc.LIVE))
        before = woken()
        for _ in range(PINGS):
            await stub.Check(health_pb2.HealthCheckRequest(service=rpc.LIVE))
        print(woken() - before)
    await server.stop(0)


asyncio.run(main())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts wake-ups as Linux tells them")
def test_a_message_wakes_no_pool_of_threads_on_its_way(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    command = [sys.executable, "-c", _PINGS, f"unix:{tmp_path}/socket"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert int(ran.stdout) < 200, "of 200 messages"
