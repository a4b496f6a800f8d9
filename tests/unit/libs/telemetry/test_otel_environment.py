"""OpenTelemetry's variables: what each does to the export, and that what cannot be honoured is refused by its name."""

from __future__ import annotations

import grpc
import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased

from libs.errors import ErrorCode, TokenloomError
from libs.telemetry.otel_environment import DEFAULT_ENDPOINT, ExportSettings, read_environment
from libs.telemetry.tracing import TraceParent, Tracer, _resource

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


def test_nothing_is_exported_where_nothing_is_named():
    assert read_environment({}) == ExportSettings()
    assert ExportSettings().endpoint is None


@pytest.mark.parametrize(
    ("variables", "endpoint"),
    [
        ({ENDPOINT: "http://all:4317"}, "http://all:4317"),
        ({ENDPOINT: "http://all:4317", TRACES_ENDPOINT: "http://traces:4317"}, "http://traces:4317"),
        ({ENDPOINT: "http://all:4317", TRACES_ENDPOINT: ""}, "http://all:4317"),
        ({ENDPOINT: "http://all:4317", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, DEFAULT_ENDPOINT),
        ({"OTEL_TRACES_EXPORTER": "none"}, None),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, None),
    ],
)
def test_the_more_special_variable_names_the_endpoint(variables, endpoint):
    assert read_environment(variables).endpoint == endpoint


def test_a_disabled_sdk_disables_everything_and_reads_nothing_else():
    settings = read_environment({"OTEL_SDK_DISABLED": "True", ENDPOINT: "http://a:4317", "OTEL_TRACES_EXPORTER": "zipkin"})
    assert settings.disabled
    assert not Tracer("gateway", "g", ["unix:/nowhere"], settings=settings).enabled


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({}, 10.0),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "3000"}, 3.0),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "3000", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "500"}, 0.5),
        ({"OTEL_BSP_EXPORT_TIMEOUT": "2000"}, 2.0),
    ],
)
def test_timeouts_are_milliseconds_and_the_shortest_counts(variables, seconds):
    assert read_environment(variables).timeout_seconds == seconds


def test_the_batch_processors_variables_are_taken():
    settings = read_environment(
        {"OTEL_BSP_MAX_QUEUE_SIZE": "64", "OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "gzip"}
    )
    assert (settings.queue_size, settings.batch_size, settings.delay_ms) == (64, 64, 50)
    assert settings.compression is grpc.Compression.Gzip
    assert read_environment({"OTEL_EXPORTER_OTLP_COMPRESSION": "none"}).compression is grpc.Compression.NoCompression


@pytest.mark.parametrize(
    ("variables", "name", "code"),
    [
        ({ENDPOINT: "ftp://a:4317"}, ENDPOINT, ErrorCode.INVALID_REQUEST),
        ({ENDPOINT: "http://a:4317", TRACES_ENDPOINT: "not an address"}, TRACES_ENDPOINT, ErrorCode.INVALID_REQUEST),
        ({ENDPOINT: "http://"}, ENDPOINT, ErrorCode.INVALID_REQUEST),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "a=1,secret"}, "OTEL_EXPORTER_OTLP_HEADERS", ErrorCode.INVALID_REQUEST),
        ({"OTEL_EXPORTER_OTLP_TRACES_HEADERS": "two words=1"}, "OTEL_EXPORTER_OTLP_TRACES_HEADERS", ErrorCode.INVALID_REQUEST),
        ({"OTEL_RESOURCE_ATTRIBUTES": "a=1,,b"}, "OTEL_RESOURCE_ATTRIBUTES", ErrorCode.INVALID_REQUEST),
        ({"OTEL_RESOURCE_ATTRIBUTES": "=1"}, "OTEL_RESOURCE_ATTRIBUTES", ErrorCode.INVALID_REQUEST),
        ({"OTEL_TRACES_EXPORTER": "console"}, "OTEL_TRACES_EXPORTER", ErrorCode.UNSUPPORTED),
        ({"OTEL_TRACES_EXPORTER": "otlp,jaeger"}, "OTEL_TRACES_EXPORTER", ErrorCode.UNSUPPORTED),
        ({"OTEL_TRACES_EXPORTER": "otlp,none"}, "OTEL_TRACES_EXPORTER", ErrorCode.INVALID_REQUEST),
        ({ENDPOINT: "http://a", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL", ErrorCode.UNSUPPORTED),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
            ErrorCode.UNSUPPORTED,
        ),
        ({"OTEL_EXPORTER_OTLP_COMPRESSION": "zstd"}, "OTEL_EXPORTER_OTLP_COMPRESSION", ErrorCode.UNSUPPORTED),
        ({"OTEL_EXPORTER_OTLP_CERTIFICATE": "/no/such.pem"}, "OTEL_EXPORTER_OTLP_CERTIFICATE", ErrorCode.INVALID_REQUEST),
        ({"OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY": "/no.key"}, "OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY", ErrorCode.INVALID_REQUEST),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "10"}, "OTEL_EXPORTER_OTLP_TIMEOUT", ErrorCode.INVALID_REQUEST),
        ({"OTEL_BSP_SCHEDULE_DELAY": "soon"}, "OTEL_BSP_SCHEDULE_DELAY", ErrorCode.INVALID_REQUEST),
        ({"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "9000"}, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", ErrorCode.INVALID_REQUEST),
        ({"OTEL_TRACES_SAMPLER": "jaeger_remote"}, "OTEL_TRACES_SAMPLER", ErrorCode.UNSUPPORTED),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"}, "OTEL_TRACES_SAMPLER_ARG", ErrorCode.INVALID_REQUEST),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "x"}, "OTEL_TRACES_SAMPLER_ARG", ErrorCode.INVALID_REQUEST),
    ],
)
def test_what_cannot_be_honoured_stops_the_start_by_its_name(variables, name, code):
    with pytest.raises(TokenloomError, match=f"^{name}: ") as raised:
        read_environment(variables)
    assert (raised.value.param, raised.value.code) == (name, code)


@pytest.mark.parametrize(
    "endpoint", ["http://a:4317", "https://[::1]:4317/v1/traces", "collector:4317", "unix:/run/otel.sock", "dns:a:4317"]
)
def test_addresses_as_grpc_has_them_are_taken(endpoint):
    assert read_environment({ENDPOINT: endpoint}).endpoint == endpoint


def test_headers_and_attributes_may_hold_what_the_standard_lets_them_and_are_not_shown_when_they_do_not():
    read_environment(
        {"OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Basic%20eA==, x-tenant = a,", "OTEL_RESOURCE_ATTRIBUTES": "k8s.pod.name=a=b, c="}
    )
    with pytest.raises(TokenloomError) as raised:
        read_environment({"OTEL_EXPORTER_OTLP_HEADERS": "hunter2"})
    assert "hunter2" not in raised.value.message


def test_samplers_are_the_standards():
    assert read_environment({"OTEL_TRACES_SAMPLER": "always_on"}).sampler is ALWAYS_ON
    assert read_environment({"OTEL_TRACES_SAMPLER": "always_off"}).sampler is ALWAYS_OFF
    assert isinstance(read_environment({}).sampler, ParentBased)


SAMPLED, UNSAMPLED = TraceParent(7, 8, sampled=True), TraceParent(7, 8, sampled=False)


@pytest.mark.parametrize(
    ("sampler", "argument", "kept"),
    [
        ("parentbased_always_on", "", [True, True, False]),
        ("parentbased_always_off", "", [False, True, False]),
        ("always_on", "", [True, True, True]),
        ("always_off", "", [False, False, False]),
        ("traceidratio", "0", [False, False, False]),
        ("traceidratio", "1", [True, True, True]),
        ("parentbased_traceidratio", "0.0", [False, True, False]),
    ],
)
def test_a_sampler_decides_over_new_traces_and_over_those_of_callers(sampler, argument, kept):
    settings = read_environment({"OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": argument, ENDPOINT: "http://127.0.0.1:9"})
    tracer = Tracer("gateway", "g", settings=settings)
    try:
        contexts = [tracer.begin(parent) for parent in (None, SAMPLED, UNSAMPLED)]
    finally:
        tracer.shutdown()
    assert [context.sampled for context in contexts] == kept
    assert [context.trace_id for context in contexts[1:]] == [7, 7]
    assert all(context.span_id not in (0, 8) for context in contexts)


def test_without_a_receiver_a_callers_decision_is_handed_on():
    tracer = Tracer("gateway", "g")
    assert tracer.begin(TraceParent(7, 8, True, "vendor=1")).state == "vendor=1"
    assert [tracer.begin(parent).sampled for parent in (None, SAMPLED, UNSAMPLED)] == [False, True, False]


def test_the_resource_names_service_version_and_instance_and_the_environment_has_the_last_word(monkeypatch):
    own = _resource("worker", "worker-3").attributes
    assert (own["service.name"], own["service.namespace"], own["service.instance.id"]) == ("tokenloom-worker", "tokenloom", "worker-3")
    assert own["service.version"]
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.name=loses,service.instance.id=pod-1")
    named = _resource("worker", "worker-3").attributes
    assert (named["service.name"], named["service.instance.id"]) == ("mine", "pod-1")
    assert named["deployment.environment.name"] == "test"
