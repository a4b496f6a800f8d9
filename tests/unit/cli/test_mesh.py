"""What `tokenloom serve` makes of its flags: one command line per service, which that service's own parser takes."""

import io
import os
import stat
from pathlib import Path

import pytest
from rich.console import Console

from cli import flags
from cli.flags import SERVICES, ServeConfig, print_help, service_config
from cli.mesh import otlp_endpoints, plan, served_names
from cli.rundir import RunDirectory
from cli.serve import banner
from cli.trace_receiver import TraceReceiverConfig
from libs.config import parse
from libs.errors import TokenloomError
from services.gateway.config import GatewayConfig
from services.worker.config import WorkerConfig


@pytest.fixture
def run_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENLOOM_RUN_DIR", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    directory = RunDirectory.claim(8123)
    yield directory
    directory.release()


@pytest.fixture
def mesh_of(run_directory):
    def make(*args, model="/models/SmolLM2"):
        options = parse(ServeConfig, args, prog="tokenloom serve")
        return plan(options, Path(model), 8123, "json", run_directory)

    return make


def config_of(mesh, name, monkeypatch):
    """The configuration that a service would read from the command line and environment it is given."""
    spec = next(spec for spec in mesh.specs if spec.name == name)
    for key, value in spec.env.items():
        monkeypatch.setenv(key, value)
    kind = {**SERVICES, "traces": TraceReceiverConfig}[name]
    return parse(kind, spec.command[4:], prog=name)


def test_services_end_from_the_gateway_inwards_and_the_traces_last(mesh_of):
    assert [spec.name for spec in mesh_of().specs] == ["gateway", "scheduler", "worker", "tokenizer", "traces"]


def test_a_chat_template_reaches_the_tokenizer_and_the_worker_as_it_was_given(mesh_of, monkeypatch):
    template = "{% for m in messages %}{{ m['role'] + ', \n' }}{% endfor %}"
    mesh = mesh_of(f"--chat-template={template}")
    assert {config_of(mesh, name, monkeypatch).chat_template for name in ("tokenizer", "worker")} == {template}


def test_every_service_takes_its_command_line(mesh_of, monkeypatch):
    mesh = mesh_of()
    for spec in mesh.specs:
        assert config_of(mesh, spec.name, monkeypatch).log_format == "json"


def test_services_find_each_other_in_the_run_directory(mesh_of, monkeypatch, run_directory):
    mesh = mesh_of()
    configs = {spec.name: config_of(mesh, spec.name, monkeypatch) for spec in mesh.specs}
    assert configs["gateway"].scheduler_address == configs["scheduler"].listen == f"unix:{run_directory.path}/scheduler.sock"
    assert configs["gateway"].tokenizer_address == configs["scheduler"].tokenizer_address == [configs["tokenizer"].listen]
    assert str(configs["worker"].store) == str(configs["scheduler"].store) == f"{run_directory.path}/store.db"
    assert all(config.otlp_endpoint == [configs["traces"].listen] for name, config in configs.items() if name != "traces")
    assert len({config.metrics_port for name, config in configs.items() if name not in ("gateway", "traces")}) == 3


def test_a_flag_reaches_every_service_that_knows_it_and_no_other(mesh_of, monkeypatch):
    mesh = mesh_of("--max-num-seqs", "8", "--no-enable-chunked-prefill", "--dtype", "float32")
    assert config_of(mesh, "scheduler", monkeypatch).max_num_seqs == config_of(mesh, "worker", monkeypatch).max_num_seqs == 8
    assert config_of(mesh, "scheduler", monkeypatch).enable_chunked_prefill is False
    assert config_of(mesh, "worker", monkeypatch).dtype == "float32"
    tokenizer = next(spec for spec in mesh.specs if spec.name == "tokenizer")
    assert not any("seqs" in argument for argument in tokenizer.command)


def test_a_default_stands_in_its_service_alone(mesh_of):
    for spec in mesh_of().specs:
        assert not any(argument.startswith(("--max-num-seqs", "--dtype", "--drain-timeout")) for argument in spec.command)


def test_keys_travel_in_the_environment_and_not_in_the_process_list(mesh_of, monkeypatch):
    mesh = mesh_of("--api-key", "secret-1", "--api-key", "secret-2")
    assert not any("secret" in argument for spec in mesh.specs for argument in spec.command)
    assert config_of(mesh, "gateway", monkeypatch).api_key == ["secret-1", "secret-2"]
    assert "secret" not in banner(mesh, 1.0)


def test_the_gateway_gets_its_drain_time_before_it_is_killed(mesh_of):
    gateway = mesh_of("--drain-timeout", "100").specs[0]
    assert gateway.stop_seconds > 100


@pytest.mark.parametrize("flag", sorted(flags.DECIDED - {"model"}))
def test_what_the_mesh_decides_is_no_flag_of_serve(flag, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(ServeConfig, [f"--{flag.replace('_', '-')}=1"], prog="tokenloom serve")
    assert ended.value.code == 2
    assert f"--{flag.replace('_', '-')}" in capsys.readouterr().err


def test_a_field_that_several_services_have_means_one_thing():
    kinds = {}
    for config in SERVICES.values():
        for name, info in config.model_fields.items():
            if name in ServeConfig.model_fields and name not in flags.ServeOptions.model_fields:
                kinds.setdefault(name, set()).add(str(info.annotation))
    assert {name: kind for name, kind in kinds.items() if len(kind) > 1} == {}


def test_help_lists_every_flag_once():
    console = Console(width=200, file=io.StringIO())
    print_help(console)
    firsts = [line.split()[0] for line in console.file.getvalue().splitlines() if line.startswith(("  --", "  MODEL"))]
    assert sorted(firsts) == sorted("MODEL" if name == "model" else f"--{name.replace('_', '-')}" for name in ServeConfig.model_fields)


def test_a_value_that_a_service_refuses_is_an_error_with_its_flag():
    options = parse(ServeConfig, [], prog="tokenloom serve")
    with pytest.raises(TokenloomError, match="--port: Input should be less than or equal to 65535"):
        service_config(GatewayConfig, options, port=70000)
    with pytest.raises(TokenloomError, match="--model: Field required"):
        service_config(WorkerConfig, options)


@pytest.mark.parametrize(
    ("given", "model", "names"),
    [
        ((), "", ["SmolLM2-135M-Instruct"]),
        ((), "SmolLM2-135M-Instruct", ["dir"]),
        ((), "org/name", ["org/name"]),
        ((), "/tmp", ["dir"]),
        (("a", "b"), "org/name", ["a", "b"]),
    ],
)
def test_the_model_is_called_what_the_user_calls_it(given, model, names):
    assert served_names(given, model, Path("/cache/dir")) == names


def test_spans_go_to_the_built_in_store_and_to_what_the_user_names_while_opentelemetrys_variables_are_the_services(
    run_directory, monkeypatch
):
    options = parse(ServeConfig, ["--otlp-endpoint", "http://jaeger:4317"], prog="tokenloom serve")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317")
    assert otlp_endpoints(options, run_directory) == [run_directory.socket("traces"), "http://jaeger:4317"]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with pytest.raises(TokenloomError, match="OTLP/gRPC only"):
        otlp_endpoints(options, run_directory)


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_SERVICE_NAME", "shop"), ("OTEL_RESOURCE_ATTRIBUTES", "team=a,service.name=shop"), ("OTEL_SERVICE_NAME", "")]
)
def test_one_otel_service_name_still_makes_four_services(mesh_of, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    names = {spec.name: spec.env.get("OTEL_SERVICE_NAME") for spec in mesh_of().specs if spec.name != "traces"}
    assert names == {service: f"shop-{service}" if value else None for service in ("gateway", "scheduler", "worker", "tokenizer")}


def test_the_banner_has_a_curl_line_for_the_model_and_the_port(mesh_of):
    text = banner(mesh_of("--served-model-name", "it's mine", "--api-key", "k"), 3.21)
    assert "ready in 3.2 s" in text
    assert "http://127.0.0.1:8000/v1/chat/completions" not in text
    curl = next(line for line in text.splitlines() if "curl" in line)
    assert "http://127.0.0.1:8123/v1/chat/completions" in curl
    assert "'\"'\"'" in curl  # the quote in the name, for the shell
    assert "Bearer $API_KEY" in curl
    assert "http://127.0.0.1:8123/docs" in text
    assert "trace REQUEST_ID --port 8123" in text


def test_the_sockets_lie_where_only_the_user_can_reach_them(mesh_of):
    mesh = mesh_of()
    assert stat.S_IMODE(mesh.run_directory.stat().st_mode) == 0o700
