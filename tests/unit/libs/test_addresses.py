"""What a service tells others about where it is."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from libs import addresses
from libs.addresses import advertised


@pytest.mark.parametrize(
    ("bound", "given", "expected"),
    [
        ("unix:/run/w.sock", "", "unix:/run/w.sock"),
        ("10.0.0.7:50051", "", "10.0.0.7:50051"),
        ("127.0.0.1:41234", "", "127.0.0.1:41234"),
        ("worker:50051", "", "worker:50051"),
        ("[fd00::7]:50051", "", "[fd00::7]:50051"),
        ("0.0.0.0:50051", "10.1.2.3", "10.1.2.3:50051"),
        ("0.0.0.0:50051", "10.1.2.3:6", "10.1.2.3:6"),
        ("[::]:50051", "fd00::7", "[fd00::7]:50051"),
        ("[::]:50051", "[fd00::7]", "[fd00::7]:50051"),
        ("[::]:50051", "[fd00::7]:6", "[fd00::7]:6"),
        ("0.0.0.0:50051", "worker-0.worker.mesh.svc", "worker-0.worker.mesh.svc:50051"),
        ("0.0.0.0:50051", "worker-0:7", "worker-0:7"),
        ("0.0.0.0:50051", "unix:/shared/w.sock", "unix:/shared/w.sock"),
    ],
)
async def test_what_is_given_wins_and_what_can_be_dialled_stays(bound: str, given: str, expected: str):
    assert await advertised(bound, given) == expected


@pytest.mark.parametrize("bound", ["0.0.0.0:50051", "[::]:50051", ":50051"])
@pytest.mark.parametrize("towards", ["", "127.0.0.1", "no-such-host.invalid"])
async def test_of_every_interface_it_is_one_that_others_can_dial(bound: str, towards: str):
    address = await advertised(bound, towards=towards)
    host, _, port = address.rpartition(":")
    assert port == "50051"
    assert host not in ("", "0.0.0.0", "[::]")


async def test_of_several_networks_it_is_the_one_with_the_store(monkeypatch: pytest.MonkeyPatch):
    def leaving_by(family: int, where: tuple[object, ...]) -> str:
        return "172.20.0.5" if where[0] == "172.20.0.2" else "10.9.9.9"

    monkeypatch.setattr(addresses, "_leaving_by", leaving_by)
    assert await advertised("0.0.0.0:50051", towards="172.20.0.2") == "172.20.0.5:50051"
    assert await advertised("0.0.0.0:50051") == "10.9.9.9:50051"


async def test_a_store_on_this_machine_does_not_make_the_service_local(monkeypatch: pytest.MonkeyPatch):
    own = {"127.0.0.1": "127.0.0.1"}
    monkeypatch.setattr(addresses, "_leaving_by", lambda family, where: own.get(where[0], "10.9.9.9"))
    assert await advertised("0.0.0.0:50051", towards="127.0.0.1") == "10.9.9.9:50051"


async def test_a_host_without_a_route_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(addresses, "_leaving_by", lambda family, where: "")
    assert await advertised("0.0.0.0:50051") == f"{socket.gethostname()}:50051"


async def test_an_ipv6_address_of_its_own_stands_in_brackets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(addresses, "_leaving_by", lambda family, where: "fd00::5" if family == socket.AF_INET6 else "")
    address = await advertised("[::]:50051")
    assert ipaddress.ip_address(address[1 : address.index("]")]) == ipaddress.ip_address("fd00::5")
