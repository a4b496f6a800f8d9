"""The tokenizer service as a process: the whole contract over gRPC, with the real model."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode
from tokenizers import Tokenizer

from libs.blocks import block_hashes
from libs.clock import SystemClock
from libs.errors import ErrorCode
from libs.models.directory import ModelDirectory
from libs.packing import pack_ids, unpack_ids
from libs.rpc import connect, error_of, listen, new_server
from libs.telemetry.tracing import TraceParent, Tracer
from libs.text.build import build_text_table
from libs.text.table import TextTable
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.encoder import load_tokenizer
from services.tokenizer.metrics import TokenizerMetrics
from services.tokenizer.pool import EncoderPool
from services.tokenizer.server import TokenizerServicer, encoder_command
from tokenloom.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

NAME = "tokenloom.tokenizer.v1.TokenizerService"
USER = json.dumps([{"role": "user", "content": "Count to 10.\n\n1."}]).encode()


async def healthy(channel: grpc.aio.Channel, process: subprocess.Popen[bytes]) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(60):
        while True:
            assert process.poll() is None, "the service ended at start"
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=NAME), wait_for_ready=True, timeout=30)
            except grpc.RpcError:
                continue
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return


@pytest.fixture(scope="module")
def service(model_dir, tmp_path_factory):
    """A running service: its address and process; it must end by itself on SIGTERM."""
    address = f"unix:{tmp_path_factory.mktemp('tokenizer')}/s"
    command = [sys.executable, "-m", "services.tokenizer", "--model", str(model_dir), "--listen", address]
    process = subprocess.Popen([*command, "--tokenizer-pool-size", "2", "--drain-timeout", "5"])
    yield address, process
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


@pytest.fixture
async def stub(service):
    address, process = service
    async with connect(address) as channel:
        await healthy(channel, process)
        yield tokenizer_pb2_grpc.TokenizerServiceStub(channel)


async def refusal(call) -> tuple[ErrorCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    error = error_of(caught.value)
    return error.code, error.message


async def test_it_describes_the_model_it_has_loaded(stub, model_dir):
    answer = await stub.Describe(tokenizer_pb2.DescribeRequest())
    assert answer.fingerprints.tokenizer == ModelDirectory(model_dir).tokenizer_fingerprint
    assert (answer.vocab_size, answer.block_size) == (49152, 16)
    assert answer.has_chat_template
    assert answer.text_table_verified
    assert (answer.tool_format, answer.template_knows_tools) == ("hermes", False)


async def test_a_chat_becomes_the_ids_that_the_model_was_trained_on(stub, model_dir):
    answer = await stub.Encode(
        tokenizer_pb2.EncodeRequest(chat=tokenizer_pb2.Chat(messages_json=USER, add_generation_prompt=True), hash_salt=b"s")
    )
    ids = unpack_ids(answer.token_ids)
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nCount to 10.\n\n1.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids == Tokenizer.from_file(str(ModelDirectory(model_dir).tokenizer_file)).encode(text, add_special_tokens=False).ids
    assert answer.block_hashes == b"".join(block_hashes(ids, b"s"))
    assert answer.render_us > 0
    decoded = await stub.Decode(tokenizer_pb2.DecodeRequest(token_ids=answer.token_ids))
    assert decoded.text == text


async def test_decoding_skips_special_tokens_when_asked(stub):
    ids = pack_ids([1, 4093, 198, 2])
    assert (await stub.Decode(tokenizer_pb2.DecodeRequest(token_ids=ids, skip_special_tokens=True))).text == "user\n"
    assert (await stub.Decode(tokenizer_pb2.DecodeRequest(token_ids=ids))).text == "<|im_start|>user\n<|im_end|>"
    assert (await stub.Decode(tokenizer_pb2.DecodeRequest())).text == ""


async def test_a_long_text_decodes_whole(stub):
    ids = [10813, 242, 218] * 5000
    assert (await stub.Decode(tokenizer_pb2.DecodeRequest(token_ids=pack_ids(ids)))).text == "😀" * 5000


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (tokenizer_pb2.EncodeRequest(text=""), ErrorCode.EMPTY_PROMPT, ["empty"]),
        (tokenizer_pb2.EncodeRequest(text="12345", max_tokens=4), ErrorCode.PROMPT_TOO_LONG, ["5 tokens", "4"]),
        (tokenizer_pb2.EncodeRequest(token_ids=tokenizer_pb2.TokenIds(ids=pack_ids([49152]))), ErrorCode.INVALID_REQUEST, ["49152"]),
        (tokenizer_pb2.EncodeRequest(), ErrorCode.INVALID_REQUEST, ["no input"]),
    ],
)
async def test_refusals_keep_their_code_and_words_over_the_wire(stub, request_, code, words):
    found, message = await refusal(stub.Encode(request_))
    assert found is code
    assert all(word in message for word in words)


async def test_decoding_refuses_ids_out_of_range_and_broken_lists(stub):
    assert "50000 is out of range" in (await refusal(stub.Decode(tokenizer_pb2.DecodeRequest(token_ids=pack_ids([50000])))))[1]
    assert (await refusal(stub.Decode(tokenizer_pb2.DecodeRequest(token_ids=b"\0"))))[0] is ErrorCode.INVALID_REQUEST


async def test_the_text_table_is_the_one_that_the_tokenizer_gives(stub, model_dir):
    model = ModelDirectory(model_dir)
    table = TextTable.from_proto(await stub.GetTextTable(tokenizer_pb2.GetTextTableRequest()))
    assert table == build_text_table(load_tokenizer(model), model.tokenizer_fingerprint)


async def test_reflection_names_the_service(service, stub):
    async with connect(service[0]) as channel:
        calls = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        async for answer in calls:
            assert NAME in {found.name for found in answer.list_services_response.service}
            break


class Collected(SpanExporter):
    """Keeps what is exported."""

    def __init__(self) -> None:
        self.spans = []

    def export(self, spans):
        self.spans.extend(spans)
        return SpanExportResult.SUCCESS


async def test_each_encode_is_one_span_below_its_callers(tiny_llama_dir, tmp_path):
    exporter, metrics, clock = Collected(), TokenizerMetrics(), SystemClock()
    model = ModelDirectory(tiny_llama_dir)
    tracer = Tracer("tokenizer", "t", exporters=[exporter])
    command = encoder_command(TokenizerConfig(model=str(tiny_llama_dir)))
    pool = EncoderPool(command, size=1, max_waiting=4, time_limit=10, clock=clock, metrics=metrics)
    await pool.start()
    table = build_text_table(load_tokenizer(model), model.tokenizer_fingerprint)
    server = new_server([NAME])
    servicer = TokenizerServicer(model, table, pool, tracer=tracer, clock=clock, metrics=metrics)
    tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(servicer, server.server)
    address = await listen(server, f"unix:{tmp_path}/s")
    parent = TraceParent.new()
    async with connect(address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        metadata = (("traceparent", str(parent)),)
        await stub.Encode(tokenizer_pb2.EncodeRequest(text="abc"), metadata=metadata)
        await refusal(stub.Encode(tokenizer_pb2.EncodeRequest(text=""), metadata=metadata))
        await stub.Encode(tokenizer_pb2.EncodeRequest(text="abc"))
    await server.stop(1)
    await pool.close()
    tracer.shutdown()
    good, bad = exporter.spans
    name = "tokenloom.tokenizer.v1.TokenizerService/Encode"
    assert (good.name, good.context.trace_id, good.parent.span_id) == (name, parent.trace_id, parent.span_id)
    assert (good.kind, good.attributes["rpc.method"], good.attributes["rpc.response.status_code"]) == (SpanKind.SERVER, name, "OK")
    assert good.attributes["tokenloom.prompt_tokens"] == 3
    assert good.end_time - good.start_time >= good.attributes["tokenloom.encode_us"] * 1000
    assert bad.attributes["error.type"] == "empty_prompt"
    assert bad.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert bad.status.status_code is StatusCode.UNSET, "its caller's mistake"
    sample = metrics.registry.get_sample_value
    assert sample("tokenloom:tokenizer_requests_total", {"kind": "text", "outcome": "ok"}) == 2
    assert sample("tokenloom:tokenizer_requests_total", {"kind": "text", "outcome": "empty_prompt"}) == 1
    assert sample("tokenloom:tokenizer_tokens_total") == 6


@pytest.fixture
def draining_service(tiny_llama_dir, tmp_path, unused_tcp_port):
    """A service of its own, to be stopped by the test; its process, address and metrics URL."""
    address = f"unix:{tmp_path}/s"
    command = [sys.executable, "-m", "services.tokenizer", "--model", str(tiny_llama_dir), "--listen", address]
    process = subprocess.Popen([*command, "--metrics-port", str(unused_tcp_port), "--log-level", "error"])
    yield process, address, f"http://127.0.0.1:{unused_tcp_port}/metrics"
    process.kill()
    process.wait()


async def test_sigterm_lets_running_prompts_end_and_takes_the_encoders_along(draining_service):
    process, address, metrics = draining_service
    async with connect(address) as channel, httpx.AsyncClient() as client:
        await healthy(channel, process)
        children = psutil.Process(process.pid).children()
        assert len(children) == 2
        assert "tokenloom:tokenizer_pool_size 2.0" in (await client.get(metrics)).text
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        running = asyncio.ensure_future(_encode(stub, "in the hall " * 100_000))
        while "pool_busy 1.0" not in (await client.get(metrics)).text:
            assert not running.done(), "the prompt is too short to be caught running"
        process.send_signal(signal.SIGTERM)
        assert len((await running).token_ids) > 4 * 100_000
    assert await asyncio.to_thread(process.wait, 20) == 0
    assert not any(child.is_running() for child in children)


async def _encode(stub, text: str) -> tokenizer_pb2.EncodeResponse:
    answer: tokenizer_pb2.EncodeResponse = await stub.Encode(tokenizer_pb2.EncodeRequest(text=text))
    return answer


async def test_the_operator_s_template_renders_and_is_described(tiny_llama_dir, tmp_path):
    template = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}{{ messages[0].content }}!"
    command = encoder_command(TokenizerConfig(model=str(tiny_llama_dir), chat_template=template))
    metrics, clock = TokenizerMetrics(), SystemClock()
    pool = EncoderPool(command, size=1, max_waiting=4, time_limit=10, clock=clock, metrics=metrics)
    await pool.start()
    try:
        model = ModelDirectory(tiny_llama_dir, template)
        messages = tokenizer_pb2.Chat(messages_json=USER)
        answer = await pool.encode(tokenizer_pb2.EncodeRequest(chat=messages, want_text=True, want_tokens=True))
        assert answer.text == "Count to 10.\n\n1.!"
        assert answer.tokens[0] == "C"
        assert answer.tokens[-1] == "!"
        assert answer.tokenizer_fingerprint == model.tokenizer_fingerprint != ModelDirectory(tiny_llama_dir).tokenizer_fingerprint
        table = build_text_table(load_tokenizer(model), model.tokenizer_fingerprint)
        servicer = TokenizerServicer(model, table, pool, tracer=Tracer("tokenizer", "t"), clock=clock, metrics=metrics)
        description = await servicer.Describe(tokenizer_pb2.DescribeRequest(), None)
        assert (description.tool_format, description.template_knows_tools) == ("mistral", True)
    finally:
        await pool.close()


@pytest.mark.parametrize(("template", "words"), [("nowhere.jinja", "cannot be read"), ("{% for %}", "cannot start")])
def test_an_operator_s_template_that_is_none_ends_the_service_with_a_reason(tiny_llama_dir, tmp_path, template, words):
    command = [sys.executable, "-m", "services.tokenizer", "--model", str(tiny_llama_dir), "--listen", f"unix:{tmp_path}/s"]
    done = subprocess.run([*command, f"--chat-template={template}"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert words in done.stderr


def test_a_model_that_is_none_ends_the_service_with_a_reason(tmp_path):
    command = [sys.executable, "-m", "services.tokenizer", "--model", str(tmp_path), "--listen", f"unix:{tmp_path}/s"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "is no model directory" in done.stderr
