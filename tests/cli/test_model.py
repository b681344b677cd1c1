"""Where the demo's model comes from, and which folders are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tieredkv.cli import model
from tieredkv.cli.child import Child
from tieredkv.errors import BadInput, TieredKVError, Unsupported


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "no config.json"),
        ({"config.json": "{}"}, "model_type"),
        ({"config.json": "{not json"}, "not a valid JSON"),
        ({"config.json": json.dumps({"model_type": "gemma3_text"})}, "no file named model.safetensors"),
    ],
)
def test_refuses_a_folder_that_is_no_model(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(BadInput) as caught:
        model.load(tmp_path)
    text = str(caught.value)
    assert str(tmp_path) in text and reason in text and "\n" not in text


def test_refuses_a_file_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("x")
    with pytest.raises(BadInput, match="not a folder"):
        model.load(tmp_path / "model")


def test_refuses_an_encoder_decoder(tmp_path: Path, tiny_model: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    for path in tiny_model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_encoder_decoder": True}))
    with pytest.raises(Unsupported, match="encoder-decoder"):
        model.load(tmp_path)


def test_loads_fp32_and_its_tokenizer(tiny_model: Path) -> None:
    import torch

    loaded, tokenizer = model.load(tiny_model)
    assert loaded.dtype is torch.float32 and not loaded.training
    assert tokenizer("abc")["input_ids"] == [67, 68, 69]


def test_copy_lies_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.local_copy() == tmp_path / "tieredkv" / "models" / "gemma-3-270m-fp32"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model.user_folder() == tmp_path / ".cache" / "tieredkv"


def test_half_written_copy_is_never_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A conversion that dies leaves no folder of the final name, and the next one begins anew."""
    target = tmp_path / "models" / "copy"
    begun: list[list[str]] = []

    def die(folder: Path, channel: object) -> None:
        begun.append([path.name for path in folder.iterdir()])
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "_convert_into", die)
    silent: Any = None
    for _ in range(2):
        with pytest.raises(TieredKVError, match=r"local copy .*copy: .*No space left"):
            model.convert(silent, {"target": str(target)})
        assert not target.exists()
    monkeypatch.setattr(model, "_convert_into", lambda folder, channel: (folder / "whole").write_text("x"))
    model.convert(silent, {"target": str(target)})
    assert [path.name for path in target.iterdir()] == ["whole"] and begun == [[], []]
    monkeypatch.setattr(model, "_convert_into", die)
    model.convert(silent, {"target": str(target)})  # it is there, so nothing is done
    assert len(begun) == 2


def test_copy_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    job = {"target": str(tmp_path / "file" / "copy")}
    with Child("model", job) as child, pytest.raises(TieredKVError, match="cannot write the local copy"):
        list(child.events())
