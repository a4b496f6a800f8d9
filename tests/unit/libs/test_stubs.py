"""One minor of grpcio-tools makes the stubs; the runtime's floors in pyproject.toml must satisfy what it writes."""

import importlib
import re
import tomllib
from pathlib import Path

import google.protobuf
import grpc
import pytest

import tokenloom

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
STUBS = Path(tokenloom.__path__[0])
GRPC_MODULES = sorted(path for path in STUBS.rglob("*_pb2_grpc.py"))
MESSAGE_MODULES = sorted(path for path in STUBS.rglob("*_pb2.py"))


def minor(version):
    return tuple(map(int, version.split(".")[:2]))


def floor(requirements, name):
    """The lower bound that a list of requirements gives a package."""
    found = [re.match(rf"{re.escape(name)}>=([\d.]+)", line) for line in requirements]
    return next(match[1] for match in found if match)


def test_the_build_pins_one_minor_of_grpcio_tools():
    pins = [line for line in PROJECT["build-system"]["requires"] if line.startswith("grpcio-tools")]
    lower, upper = re.fullmatch(r"grpcio-tools>=([\d.]+),<([\d.]+)", pins[0]).groups()
    assert minor(upper) == (minor(lower)[0], minor(lower)[1] + 1)


def test_development_uses_the_builds_minor():
    build = floor(PROJECT["build-system"]["requires"], "grpcio-tools")
    assert minor(floor(PROJECT["project"]["optional-dependencies"]["dev"], "grpcio-tools")) == minor(build)


@pytest.mark.parametrize("package", ["grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status"])
def test_the_runtimes_floor_is_the_builds_minor(package):
    build = floor(PROJECT["build-system"]["requires"], "grpcio-tools")
    assert minor(floor(PROJECT["project"]["dependencies"], package)) == minor(build)


@pytest.mark.parametrize("path", GRPC_MODULES, ids=lambda path: path.stem)
def test_generated_grpc_code_accepts_the_floor_of_grpcio(path):
    generated = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", path.read_text())[1]
    assert minor(generated) <= minor(floor(PROJECT["project"]["dependencies"], "grpcio"))
    assert minor(generated) <= minor(grpc.__version__)


@pytest.mark.parametrize("path", MESSAGE_MODULES, ids=lambda path: path.stem)
def test_generated_messages_accept_the_floor_of_protobuf(path):
    match = re.search(r"ValidateProtobufRuntimeVersion\(\s*[\w.]+,\s*(\d+),\s*(\d+),\s*(\d+)", path.read_text())
    generated = tuple(map(int, match.groups()))
    wanted = tuple(map(int, floor(PROJECT["project"]["dependencies"], "protobuf").split(".")))
    assert generated <= wanted
    assert generated <= tuple(map(int, google.protobuf.__version__.split(".")[:3]))


def test_every_proto_has_its_stubs():
    protos = {path.relative_to(ROOT / "protos").with_suffix("") for path in (ROOT / "protos").rglob("*.proto")}
    stubs = {path.relative_to(STUBS.parent).with_name(path.stem.removesuffix("_pb2")) for path in MESSAGE_MODULES}
    assert protos == stubs


def test_stubs_import_under_their_protos_names():
    for path in (*MESSAGE_MODULES, *GRPC_MODULES):
        importlib.import_module(".".join(path.relative_to(STUBS.parent).with_suffix("").parts))
