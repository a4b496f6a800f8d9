"""deploy/envoy/envoy.yaml against the code that it stands before: what must agree, and what must never slip."""

from __future__ import annotations

import re
import subprocess
from typing import Any

from libs.errors import ErrorCode
from services.gateway.api.endpoint import NOT_BEGUN
from services.gateway.config import GatewayConfig
from services.gateway.connection import BODY_TIMEOUT
from services.gateway.http_server import KEEP_ALIVE_SECONDS
from services.tokenizer.config import TokenizerConfig
from tests.support.envoy import CONFIG, FOLDER, differences, load, moved
from tests.support.envoy import LISTENERS as NAMES

STATIC = load()["static_resources"]
LISTENERS = {listener["name"]: listener for listener in STATIC["listeners"]}
CLUSTERS = {cluster["name"]: cluster for cluster in STATIC["clusters"]}


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


def manager(listener: str) -> dict[str, Any]:
    """The listener's HTTP connection manager."""
    return LISTENERS[listener]["filter_chains"][0]["filters"][0]["typed_config"]


def routes(listener: str) -> list[dict[str, Any]]:
    return manager(listener)["route_config"]["virtual_hosts"][0]["routes"]


def port_of(cluster: str) -> int:
    (endpoint,) = CLUSTERS[cluster]["load_assignment"]["endpoints"][0]["lb_endpoints"]
    return endpoint["endpoint"]["address"]["socket_address"]["port_value"]


def default(config: type, field: str) -> Any:
    return config.model_fields[field].default


def test_connections_to_gateways_are_given_up_by_envoy_first():
    options = next(iter(CLUSTERS["gateway"]["typed_extension_protocol_options"].values()))
    assert 2 * seconds(options["common_http_protocol_options"]["idle_timeout"]) < KEEP_ALIVE_SECONDS


def test_a_stream_s_comments_come_often_enough_for_the_idle_timeout():
    assert 2 * default(GatewayConfig, "sse_keep_alive") < seconds(manager("edge")["stream_idle_timeout"])


def test_a_body_may_pause_as_long_as_the_gateway_allows():
    assert seconds(manager("edge")["request_timeout"]) > BODY_TIMEOUT


def test_the_ports_are_the_services_own():
    assert port_of("gateway") == default(GatewayConfig, "port")
    assert port_of("tokenizer") == int(default(TokenizerConfig, "listen").rpartition(":")[2])


def test_only_what_the_gateway_marks_is_tried_again_and_clients_do_not_see_the_mark():
    policy = next(route["route"]["retry_policy"] for route in routes("edge") if "route" in route)
    mark = NOT_BEGUN[0].decode()
    assert policy["retriable_headers"] == [{"name": mark, "present_match": True}]
    assert manager("edge")["route_config"]["response_headers_to_remove"] == [mark]
    # Neither resets after the request was sent nor any status: what runs must not be computed twice.
    assert set(policy["retry_on"].split(",")) == {"connect-failure", "refused-stream", "reset-before-request", "retriable-headers"}


def test_nothing_at_the_edge_ends_a_response_that_goes_on():
    for route in routes("edge"):
        assert "direct_response" in route or route["route"]["timeout"] == "0s"


def test_the_admin_listens_on_loopback_and_others_reach_two_paths_of_it():
    assert load()["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"
    assert {route["match"]["path"] for route in routes("stats")} == {"/stats/prometheus", "/ready"}
    used = {name for name in LISTENERS for route in routes(name) if route.get("route", {}).get("cluster") == "admin"}
    assert used == {"stats"}


def test_statuses_eject_nobody():
    for name in ("gateway", "tokenizer"):
        detection = CLUSTERS[name]["outlier_detection"]
        assert not any(detection[f"enforcing_{kind}"] for kind in ("consecutive_5xx", "consecutive_gateway_failure", "success_rate"))


def test_what_envoy_says_itself_has_the_codes_of_the_api():
    text = (CONFIG.parents[2] / "docs" / "api.md").read_text()
    formats = [mapper["body_format_override"]["json_format"] for mapper in manager("edge")["local_reply_config"]["mappers"]]
    assert formats
    labels = {member.spec.label for member in ErrorCode}
    for shape in formats:
        assert set(shape["error"]) == {"message", "type", "param", "code"}
        assert shape["error"]["code"] in labels or f"`{shape['error']['code']}`" in text


def test_every_bound_that_a_service_cannot_set_is_there():
    assert manager("edge")["max_request_headers_kb"]
    assert seconds(manager("edge")["request_headers_timeout"])
    for cluster in ("gateway", "tokenizer", "otel-collector"):
        (limits,) = CLUSTERS[cluster]["circuit_breakers"]["thresholds"]
        assert limits["max_requests"]
        assert limits["max_pending_requests"]
        assert CLUSTERS[cluster]["wait_for_warm_on_init"] is False


def test_the_script_is_bash_and_its_settings_are_documented():
    script = FOLDER / "envoy.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    page = (CONFIG.parents[2] / "docs" / "envoy.md").read_text()
    for name in set(re.findall(r"ENVOY_(?:DRAIN|CONCURRENCY)\w*", script.read_text())):
        assert name in page


def test_what_runs_here_differs_from_what_is_deployed_in_hosts_and_ports_alone():
    document = load()
    ports = {name: 10_000 + index for index, name in enumerate((*NAMES, "admin"))}
    backends = {"gateway": [1, 2], "tokenizer": [3, 4], "otel-collector": [5]}
    for path in differences(document, moved(document, ports, backends)):
        assert re.search(r"\.address\.socket_address\.(address|port_value)$|\.lb_endpoints$", path), path
