"""A model reaches the shared volume whole or not at all, once, and another one replaces it in one step."""

from __future__ import annotations

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from libs.errors import ErrorCode, TokenloomError
from libs.models import catalog, served
from libs.models.directory import ModelDirectory
from libs.models.served import import_model
from tests.support.tiny_llama import make_tiny_llama
from tests.unit.libs.models.gguf_files import write_gguf


@pytest.fixture
def models(tmp_path):
    """Two model directories and a GGUF, as a user mounts them."""
    folder = tmp_path / "models"
    make_tiny_llama(folder / "one")
    shutil.copytree(folder / "one", folder / "team" / "two")
    write_gguf(folder / "three.gguf")
    return folder


@pytest.fixture
def target(tmp_path):
    return tmp_path / "volume" / "served"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that has every model, as a snapshot of links into blobs; returns the ids that were asked for."""
    asked: list[str] = []
    checkpoint = make_tiny_llama(tmp_path / "hub-model")

    def snapshot_download(model, *, cache_dir, allow_patterns):
        asked.append(model)
        snapshot = cache_dir / "snapshots" / "0123abcd"
        blobs = cache_dir / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for number, file in enumerate(file for file in checkpoint.iterdir() if file.is_file()):
            shutil.copyfile(file, blobs / str(number))
            (snapshot / file.name).symlink_to(f"../../blobs/{number}")
        return str(snapshot)

    monkeypatch.setattr(catalog.huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def entries(target):
    """The imports that the volume holds."""
    return [path for path in target.with_name(f".{target.name}").iterdir() if path.is_dir()]


@pytest.mark.parametrize("name", ["one", "team/two", "three.gguf"])
def test_what_lies_below_the_mounted_directory_is_imported_by_its_name(models, target, name):
    done = import_model(name, target, models)
    assert done.new
    directory = ModelDirectory(target)
    assert directory.weight_files()
    assert directory.name == name.rpartition("/")[2].removesuffix(".gguf")


def test_the_link_holds_wherever_the_volume_is_mounted(models, target, tmp_path):
    import_model("one", target, models)
    target.parent.rename(tmp_path / "elsewhere")
    assert ModelDirectory(tmp_path / "elsewhere" / "served").config


def test_the_same_model_is_not_imported_twice(models, target):
    first = import_model("one", target, models)
    said: list[str] = []
    second = import_model("one", target, models, said.append)
    assert (second.path, second.new, said) == (first.path, False, [])


def test_a_model_of_the_hub_becomes_files_and_is_not_asked_for_again(hub, target):
    assert import_model("org/tiny", target, None).new
    assert not import_model("org/tiny", target, None).new
    assert hub == ["org/tiny"]
    assert ModelDirectory(target).name == "tiny"
    assert not any(file.is_symlink() for file in target.iterdir())
    assert entries(target) == [target.resolve().parent]  # what was downloaded is not kept twice


def test_another_model_replaces_it_and_takes_its_place_on_the_disk(models, target):
    import_model("one", target, models)
    before = target.resolve()
    done = import_model("three.gguf", target, models)
    assert done.new
    assert ModelDirectory(target).name == "three"
    assert not before.exists()
    assert len(entries(target)) == 1


def test_a_change_of_the_mounted_files_is_imported_anew(models, target):
    import_model("one", target, models)
    config = models / "one" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 99}))
    assert import_model("one", target, models).new
    assert ModelDirectory(target).config.max_position_embeddings == 99


def test_files_that_change_in_place_afterwards_do_not_change_what_is_served(models, target):
    import_model("one", target, models)
    weights = ModelDirectory(models / "one").weight_files()[0]
    before = ModelDirectory(target).model_fingerprint
    with weights.open("r+b") as stream:
        stream.write(b"\0" * 64)
    assert ModelDirectory(target).model_fingerprint == before


def test_a_service_that_has_the_old_model_open_keeps_it(models, target):
    import_model("one", target, models)
    with ModelDirectory(target).weight_files()[0].open("rb") as stream:
        import_model("team/two", target, models)
        assert stream.read(8)


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_import_that_breaks_leaves_the_old_model_served_and_no_half_of_the_new_one(models, target, monkeypatch, failure):
    import_model("one", target, models)
    copied: list[object] = []

    def copy_some(source, place):
        copied.append(place)
        place.write_bytes(source.read_bytes()[:16])
        if len(copied) == 2:
            raise failure

    monkeypatch.setattr(served.shutil, "copyfile", copy_some)
    with pytest.raises(type(failure)) as raised:
        import_model("team/two", target, models)
    assert raised.value is failure
    assert ModelDirectory(target).name == "one"
    assert entries(target) == [target.resolve().parent]


def test_what_a_killed_import_left_is_removed_by_the_next_one(models, target):
    import_model("one", target, models)
    (target.with_name(".served") / "new-abandoned").mkdir()
    (target.with_name(".served.new")).symlink_to("nowhere")
    import_model("team/two", target, models)
    assert entries(target) == [target.resolve().parent]
    assert ModelDirectory(target).name == "two"


def test_a_model_that_cannot_be_served_does_not_replace_one_that_can(models, target):
    import_model("one", target, models)
    config = models / "team" / "two" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["MambaForCausalLM"]}))
    with pytest.raises(TokenloomError, match="MambaForCausalLM") as raised:
        import_model("team/two", target, models)
    assert raised.value.code is ErrorCode.UNSUPPORTED
    assert ModelDirectory(target).name == "one"


def test_a_damaged_import_is_made_again(models, target):
    import_model("one", target, models)
    for file in ModelDirectory(target).weight_files():
        file.unlink()
    assert import_model("one", target, models).new
    assert ModelDirectory(target).weight_files()


def test_several_imports_at_once_work_once(models, target, monkeypatch):
    made: list[str] = []
    collect = served._collect
    gate = threading.Barrier(3)

    def counted(*args, **kwargs):
        made.append("made")
        collect(*args, **kwargs)

    def one():
        gate.wait(30)
        return import_model("one", target, models).path

    monkeypatch.setattr(served, "_collect", counted)
    with ThreadPoolExecutor(3) as pool:
        paths = {future.result() for future in [pool.submit(one) for _ in range(3)]}
    assert len(paths) == len(made) == 1


@pytest.mark.parametrize("name", ["../outside", "/etc", "one/../../outside"])
def test_a_name_that_leads_out_of_the_mounted_directory_is_refused(models, target, tmp_path, name):
    make_tiny_llama(tmp_path / "outside")
    with pytest.raises(TokenloomError, match="leads out of") as raised:
        import_model(name, target, models)
    assert raised.value.param == "model"
    assert not target.exists()


def test_a_directory_that_is_no_import_is_not_replaced(models, target):
    target.mkdir(parents=True)
    (target / "precious").touch()
    with pytest.raises(TokenloomError, match="no import of a model"):
        import_model("one", target, models)
    assert (target / "precious").exists()


def test_what_nobody_knows_is_no_model(models, target):
    with pytest.raises(TokenloomError, match="neither a model directory") as raised:
        import_model("nothing", target, models)
    assert raised.value.code is ErrorCode.MODEL_NOT_FOUND


def test_others_than_the_importing_user_can_read_it(models, target):
    os.chmod(models / "one" / "config.json", 0o600)
    import_model("one", target, models)
    assert (target / "config.json").stat().st_mode & 0o444 == 0o444
    for folder in (target.resolve(), target.resolve().parent, target.with_name(".served")):
        assert folder.stat().st_mode & 0o555 == 0o555
