import socket

import pytest

from cli.ports import choose, is_free, reachable_host


@pytest.fixture
def taken():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_port_with_a_server_is_not_free(taken):
    assert not is_free("127.0.0.1", taken)
    assert not is_free("0.0.0.0", taken)


def test_a_port_is_free_again_once_its_server_is_gone(taken):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
    assert is_free("127.0.0.1", port)


def test_the_wished_port_is_taken_if_free_else_another(taken):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        free = other.getsockname()[1]
    assert choose("127.0.0.1", free) == free
    assert choose("127.0.0.1", free, taken=[free]) != free
    assert choose("127.0.0.1", taken) not in (taken, 0)
    assert choose("127.0.0.1", 65536) > 0


def test_a_host_that_does_not_resolve_is_an_os_error():
    with pytest.raises(OSError):
        is_free("no such host", 80)


def test_an_address_of_another_machine_is_an_os_error_and_not_a_port_in_use():
    with pytest.raises(OSError, match="Cannot assign"):
        is_free("192.0.2.1", 0)


def test_a_port_that_needs_privileges_is_an_os_error_and_never_chosen(monkeypatch):
    class Forbidding(socket.socket):
        def bind(self, address):
            if address[1]:
                raise PermissionError(13, "Permission denied")
            super().bind(address)

    monkeypatch.setattr("cli.ports.socket.socket", Forbidding)
    with pytest.raises(PermissionError):
        is_free("127.0.0.1", 80)
    assert choose("127.0.0.1", 80) not in (0, 80)


@pytest.mark.parametrize(
    ("listening", "reached"),
    [("0.0.0.0", "127.0.0.1"), ("", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("10.0.0.1", "10.0.0.1"), ("localhost", "localhost")],
)
def test_a_url_names_an_address_that_a_client_can_reach(listening, reached):
    assert reachable_host(listening) == reached
