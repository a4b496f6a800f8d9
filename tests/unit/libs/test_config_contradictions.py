"""Settings that cannot hold together, and values that would only fail later, stop the start and name their flags."""

import pytest

from libs.config import parse
from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.tokenizer.config import TokenizerConfig
from services.worker.config import WorkerConfig

LONG = "x" * 120


@pytest.mark.parametrize(
    ("config", "args", "message"),
    [
        (GatewayConfig, ["--uds=/tmp/s", "--port=8000"], "--uds and --port"),
        (GatewayConfig, ["--uds=/tmp/s", "--host=::"], "--uds and --host"),
        (GatewayConfig, [f"--uds=/{LONG}"], "--uds: the path takes 121 bytes"),
        (GatewayConfig, ["--allow-credentials"], "--allow-credentials says nothing without --allowed-origins"),
        (GatewayConfig, ["--allow-credentials", "--allowed-origins=*"], "--allow-credentials with --allowed-origins *"),
        (GatewayConfig, ["--allowed-origins=https://a.example/"], "--allowed-origins: https://a.example/ is no origin"),
        (GatewayConfig, ['--allowed-origins=["*"]'], '--allowed-origins: ["*"] is no origin'),
        (GatewayConfig, ["--scheduler-address=scheduler"], "--scheduler-address: scheduler is no address"),
        (GatewayConfig, ["--tokenizer-address=a:1", "--tokenizer-address=b:http"], "--tokenizer-address[1]: b:http is no address"),
        (GatewayConfig, ["--tokenizer-address="], "--tokenizer-address: List should have at least 1 item"),
        (GatewayConfig, ["--api-key=good,bad one"], "--api-key[1]: a key with blanks"),
        (GatewayConfig, ["--drain-timeout=inf"], "--drain-timeout: Input should be a finite number"),
        (SchedulerConfig, ["--step-timeout=nan"], "--step-timeout: Input should be a finite number"),
        (SchedulerConfig, ["--listen="], "--listen: an empty text is no address"),
        (SchedulerConfig, ["--listen=::1:7001"], "--listen: ::1:7001: an IPv6 address stands in brackets"),
        (SchedulerConfig, ["--worker-address=a:70000"], "--worker-address[0]: a:70000 is no address"),
        (SchedulerConfig, ["--max-num-seqs=8", "--max-num-batched-tokens=4"], "--max-num-batched-tokens 4 is less than --max-num-seqs 8"),
        (SchedulerConfig, ["--advertise-address=a:1"], "--advertise-address says nothing without --store"),
        (TokenizerConfig, ["--listen=unix:"], "--listen: unix: names no socket"),
        (TokenizerConfig, [f"--listen=unix:/{LONG}"], "--listen: the socket's path takes 121 bytes"),
        (
            WorkerConfig,
            ["--model=m", "--kv-cache-memory-bytes=1G", "--gpu-memory-utilization=0.5"],
            "--kv-cache-memory-bytes and --gpu-memory-utilization",
        ),
        (WorkerConfig, ["--model=m", "--kernels=cpu", "--dtype=float16"], "--kernels cpu and --dtype float16"),
        (WorkerConfig, ["--model=m", "--quantization=int8", "--dtype=float16"], "--quantization int8 and --dtype float16"),
        (WorkerConfig, ["--model=m", "--quantization=int4", "--dtype=bfloat16"], "--quantization int4 and --dtype bfloat16"),
    ],
)
def test_a_contradiction_stops_the_start_and_names_the_flags(config, args, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(config, args, prog="service")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "args"),
    [
        (GatewayConfig, ["--uds=/tmp/s"]),
        (GatewayConfig, ["--allow-credentials", "--allowed-origins=https://a.example:8443,http://[::1]:3000"]),
        (GatewayConfig, ["--allowed-origins=*"]),
        (GatewayConfig, ["--scheduler-address=dns:///scheduler:50052", "--tokenizer-address=[::1]:7001"]),
        (SchedulerConfig, ["--max-num-batched-tokens=16"]),
        (SchedulerConfig, ["--store=s.db", "--advertise-address=a"]),
        (WorkerConfig, ["--model=m", "--kernels=cpu", "--dtype=auto", "--kv-cache-memory-bytes=1G"]),
        (WorkerConfig, ["--model=m", "--quantization=int4", "--dtype=float32", "--kernels=reference"]),
        (WorkerConfig, ["--model=m", "--kv-cache-memory-bytes=None", "--gpu-memory-utilization=0.5"]),
    ],
)
def test_what_holds_together_starts(config, args):
    assert parse(config, args, prog="service").model_fields_set


def test_a_contradiction_between_sources_is_one_too(tmp_path, monkeypatch, capsys):
    (tmp_path / "mesh.yaml").write_text("gateway: {uds: /tmp/s}")
    monkeypatch.setenv("TOKENLOOM_PORT", "8000")
    with pytest.raises(SystemExit):
        parse(GatewayConfig, [f"--config={tmp_path}/mesh.yaml"], prog="gateway")
    assert "--uds and --port" in capsys.readouterr().err


@pytest.mark.parametrize("config", [SchedulerConfig, WorkerConfig])
def test_the_default_budget_of_a_step_has_a_token_for_every_sequence(config):
    model = ["--model=m"] if config is WorkerConfig else []
    settings = parse(config, ["--max-num-seqs=512", *model], prog="service")
    assert settings.max_num_batched_tokens == 512
    assert not settings.given("max_num_batched_tokens")
    assert parse(config, model, prog="service").max_num_batched_tokens == 320
