"""The gateway's flags."""

from __future__ import annotations

import json

import pytest

from libs.config import parse, to_args
from services.gateway.config import GatewayConfig


def test_names_and_keys_may_be_repeated():
    config = parse(
        GatewayConfig,
        [
            "--served-model-name=a",
            "--served-model-name=b",
            "--api-key=k",
            "--port=9",
            "--tokenizer-address=unix:/x",
            "--allowed-origins=https://a",
            "--allow-credentials",
        ],
        prog="gateway",
    )
    assert (config.model_names, config.api_key, config.port, config.tokenizer_address) == (["a", "b"], ["k"], 9, ["unix:/x"])
    assert config.allow_credentials


def test_without_a_name_there_is_one():
    assert GatewayConfig().model_names == ["default"]


def test_flags_survive_being_handed_to_a_child_process():
    config = GatewayConfig(served_model_name=["a b"], api_key=["-x"], request_timeout=1.5, uds="/tmp/x")
    args = to_args(config, list(GatewayConfig.model_fields))
    assert parse(GatewayConfig, args, prog="gateway").model_dump() == config.model_dump()


@pytest.mark.parametrize(
    "flag", ["--port=70000", "--max-body-bytes=10", "--slow-reader-timeout=0", "--drain-timeout=-1", "--no-such-flag=1"]
)
def test_values_out_of_range_and_unknown_flags_end_the_process(flag):
    with pytest.raises(SystemExit):
        parse(GatewayConfig, [flag], prog="gateway")


@pytest.mark.parametrize("key", ["", " ", "s3 cret", " s3cret", "s3cret\n", "s3cret\x00", "s3cret\udcff"])
def test_a_key_that_no_client_could_send_or_everybody_does_stops_the_start_and_is_not_shown(tmp_path, key, capsys):
    (tmp_path / "mesh.yaml").write_text(json.dumps({"api-key": ["fine", key]}))
    with pytest.raises(SystemExit):
        parse(GatewayConfig, [f"--config={tmp_path}/mesh.yaml"], prog="gateway")
    told = capsys.readouterr().err
    assert "api-key[1]: a" in told
    assert "s3" not in told


def test_every_field_says_what_it_is():
    assert all(field.description for field in GatewayConfig.model_fields.values())
