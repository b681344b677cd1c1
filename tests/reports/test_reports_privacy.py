"""A store is its owner's alone, follows no link, and nothing of a prompt shows where nobody asked for it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from core_helpers import IDENTITY, MIXED, SIZE, HookedFs, kv_of, load_checked, opened, prompt, small, store

import tieredkv
from tieredkv import Identity, Turn
from tieredkv.audit.repair import repair, truncate
from tieredkv.audit.report import fsck
from tieredkv.audit.report import stat as stat_of
from tieredkv.audit.rescue import rescue
from tieredkv.cache import open_cache
from tieredkv.errors import PathUnusable, TieredKVError

# ---- modes ---------------------------------------------------------------------------------------


@pytest.fixture(params=[0o000, 0o022, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def modes(path: Path) -> dict[str, int]:
    """What others may do with each directory and file, 0 where it is as it should be."""
    found = {}
    for where in [path, *path.rglob("*")]:
        wanted = 0o700 if where.is_dir() else 0o600
        found[str(where)] = stat.S_IMODE(where.lstat().st_mode) ^ wanted
    return found


def tear(path: Path) -> None:
    """Cut the last frame of the newest segment in two, above what is known durable."""
    segment = max((path / "wal").glob("*.wal"))
    raw = segment.read_bytes()
    with open(segment, "r+b") as file:
        file.seek(len(raw.rstrip(b"\0")) - 3)
        file.write(b"\xff\xff\xff")


@pytest.mark.parametrize("disk", ["slab", "lmdb"])
def test_only_the_owner_may_read_whatever_the_umask(tmp_path: Path, umask: int, disk: str) -> None:
    """The store with its lock, log, checkpoints, payloads and trace; a rescued store; what mending leaves aside."""
    path = tmp_path / "deep" / "store"
    kv = open_cache(path, small(trace=True, disk=disk, durability="none"))
    space = kv.namespace(IDENTITY, MIXED)
    assert store(space, prompt(0)).wait(60) and kv.flush(60).ok and kv.checkpoint()
    assert store(space, prompt(1)).wait(60)
    assert not any(modes(path).values()), modes(path)
    names = {p.name for p in path.iterdir()}
    assert names >= {"LOCK", "wal", "slabs"} and any(name.startswith("table-") for name in names)
    copy = tmp_path / "deep" / "copy"
    subprocess.run(["cp", "-a", str(path), str(copy)], check=True)
    kv.close(10)
    assert {p.name for p in path.iterdir()} >= {"trace"}
    tear(copy)
    assert truncate(copy).kept_copy
    rescue(path, tmp_path / "deep" / "rescued")
    repair(path, ())
    for name in ("store", "copy", "rescued"):
        assert not any(modes(tmp_path / "deep" / name).values()), modes(tmp_path / "deep" / name)


# ---- links ---------------------------------------------------------------------------------------


def newest(pattern: str) -> Callable[[Path], Path]:
    return lambda path: max(path.glob(pattern))


LINKED: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "segment": (newest("wal/*.wal"), {}),
    "slab": (newest("slabs/*.slab"), {}),
    "checkpoint": (newest("table-*.lmdb"), {}),
    "lock": (newest("LOCK"), {}),
    "trace": (newest("trace/*.trace"), {}),
    "payload file": (newest("slabs/*.lmdb"), {"disk": "lmdb"}),
    "slabs": (newest("slabs"), {}),
    "wal": (newest("wal"), {}),
    "trace folder": (newest("trace"), {}),
}


def contents(path: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in [path, *sorted(path.rglob("*"))] if p.is_file()}


@pytest.mark.parametrize(("find", "changes"), LINKED.values(), ids=LINKED)
def test_no_link_is_followed(tmp_path: Path, find: Callable[[Path], Path], changes: dict[str, Any]) -> None:
    """A store's file or folder moved elsewhere, a link in its place: nothing is read or written through it."""
    path, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    with opened(path, trace=True, **changes) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert store(space, prompt(0)).wait(60)
        kv.session("a", space).commit(prompt(0), [])
    place = find(path)
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    if place.name == "trace":
        next(elsewhere.iterdir()).unlink()  # so that the first name is free there
    before = contents(elsewhere)
    harmless = place.name in ("LOCK", "trace") or place.parent.name == "trace"
    with contextlib.suppress(OSError):
        assert fsck(path).exit_code == (0 if harmless else 2)
    assert contents(elsewhere) == before
    for _ in range(2):
        try:
            with opened(path, trace=True, **changes) as kv:
                space = kv.namespace(IDENTITY, MIXED)
                found = load_checked(space, prompt(0))[0]
                assert not found or "slab" not in str(place), "read through a link"
                store(space, prompt(1)).wait(1)
                load_checked(space, prompt(1))
                kv.check()
        except PathUnusable as error:
            assert str(path) in str(error)
        assert contents(elsewhere) == before


# ---- nothing of a prompt -------------------------------------------------------------------------

SALT = "tenant-zebra-quagga"
WORDS = "pelican marzipan"
IDS = np.arange(7_654_321, 7_654_321 + 20 * SIZE + 5, dtype=np.int32) * 3
"""Ids that no count, size or time has by chance."""


def assert_silent(text: str, where: str) -> None:
    """Nothing of the prompt, its tenant or its ids is in `text`."""
    found = [word for word in (SALT, *WORDS.split(), *map(str, IDS.tolist())) if word in text]
    assert not found, f"{where}: {found[:3]} in {text[:300]}"


def everything_public(kv: Any, space: Any, session: Any) -> dict[str, object]:
    """What a program might print or log."""
    with space.load(IDS) as prefix:
        shown: dict[str, object] = {"prefix": prefix}
    return shown | {
        "cache": kv, "stats": kv.stats(), "health": kv.health(), "recovery": kv.recovery, "namespace": space,
        "namespace row": space.row, "session": session, "sessions": kv.sessions(), "lookup": space.lookup(IDS),
        "other lookup": space.lookup(IDS[::-1].copy()), "stored": store(space, IDS), "flushed": kv.flush(60),
        "identity": Identity(weights="ab" * 32, salt=SALT), "config": kv.config,
    }  # fmt: skip


def mistakes(kv: Any, space: Any, session: Any) -> list[Callable[[], object]]:
    """Calls that are refused, each with the prompt in hand."""
    odd = IDS.astype(np.int64)
    odd[3] = -1
    large = IDS.astype(np.int64)
    large[5] = 1 << 40
    kv_short = {layer: tuple(t[:, :-1] for t in ts) for layer, ts in kv_of(space, IDS).items()}
    return [
        lambda: space.lookup(odd), lambda: space.lookup(large), lambda: space.lookup(IDS.astype(float)),
        lambda: space.lookup(IDS[None]), lambda: store(space, IDS, anchors=[7]), lambda: space.store(IDS, {}),
        lambda: space.store(IDS, kv_short), lambda: session.commit(IDS, [Turn("user", 10_000)]),
        lambda: session.commit(odd, []), lambda: session.rollback(10_000), lambda: session.fork("s"),
        lambda: session.commit(IDS, [], meta={"said": {WORDS}}), lambda: kv.session("s", space),
    ]  # fmt: skip


def said_by(call: Callable[[], object]) -> str:
    """What a refused call says, empty if it was served."""
    try:
        call()
    except (TieredKVError, TypeError) as error:
        return f"{error!r} {error}"
    return ""


def test_nothing_of_a_prompt_shows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In `repr`, `stats`, `health`, errors and logs, through use, mistakes, a failing disk and damage."""
    caplog.set_level(logging.DEBUG)
    failing = [False]

    def hook(operation: str, path: str) -> None:
        if failing[0] and operation in ("pwritev", "datasync"):
            raise OSError(errno.EIO, "no such luck", path)

    identity = Identity(weights="ab" * 32, salt=SALT)
    with opened(tmp_path, fs=HookedFs(hook), deadline_s=0.3, trace=True) as kv:
        space, session = kv.namespace(identity, MIXED), None
        session = kv.session("s", space)
        session.commit(
            IDS, [Turn("user", 20)], anchors=[320], stored=[store(space, IDS)], meta={"said": WORDS}
        )
        for broken in (False, True):
            failing[0] = broken
            for name, value in everything_public(kv, space, session).items():
                assert_silent(f"{value!r} {value}", name)
            messages = [said_by(call) for call in mistakes(kv, space, session)]
            assert sum(map(bool, messages)) > 10
            for number, message in enumerate(messages):
                assert_silent(message, f"mistake {number}")
            with contextlib.suppress(TieredKVError):
                session.commit(IDS[::-1].copy(), [], meta={"said": WORDS})
        assert not kv.health().ok, "the disk was made to fail"
        failing[0] = False
    for path in [*tmp_path.glob("wal/*.wal"), *tmp_path.glob("slabs/*.slab"), *tmp_path.glob("table-*")]:
        raw = bytearray(path.read_bytes())
        for at in range(5000, len(raw), 4096):
            raw[at] ^= 0xFF
        path.write_bytes(raw)
    for report in (stat_of(tmp_path), fsck(tmp_path)):
        assert_silent(f"{report!r} {report} {dataclasses.asdict(report)}", type(report).__name__)
    with opened(tmp_path) as kv:
        assert kv.recovery.damage
        assert_silent(f"{kv.recovery!r} {kv.recovery}", "damage")
    assert_silent(caplog.text, "logs")


def test_tools_show_nothing_of_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`stat`, `fsck` and the replay tool, which name sessions, and count what was said in them."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    import replay
    import typer
    from typer.testing import CliRunner

    from tieredkv.cli.app import app

    with opened(tmp_path, trace=True) as kv:
        space = kv.namespace(Identity(weights="ab" * 32, salt=SALT), MIXED)
        session = kv.session("s", space)
        session.commit(
            IDS, [Turn("user", 20)], anchors=[320], stored=[store(space, IDS)], meta={"said": WORDS}
        )
    tool = typer.Typer()
    tool.command()(replay.main)
    for program, *arguments in [
        (app, "stat"), (app, "fsck", "--json"), (tool,), (tool, "--session", "s", "--json"),
        (tool, "--export", "jsonl"), (tool, "--verify"), (tool, "--at", "99"), (tool, "--at", "1"),
    ]:  # fmt: skip
        where = (
            [*arguments[:1], str(tmp_path), *arguments[1:]] if program is app else [str(tmp_path), *arguments]
        )
        shown = CliRunner().invoke(program, where)
        assert shown.output, where
        assert_silent(shown.output + repr(shown.exception), str(where))
    assert_silent(caplog.text, "logs")


def test_a_conversation_shows_in_no_log_error_or_repr(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same through sessions of messages, whose ids are named by index alone when they disagree."""
    pytest.importorskip("transformers")
    caplog.set_level(logging.DEBUG, "tieredkv")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "hf")
    import torch
    from tiny_models import byte_tokenizer, llama

    from tieredkv.hf import ChatModel
    from tieredkv.hf.identity import cache_argument

    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    config = small(device_nbytes="4MiB", host_nbytes="4MiB", disk_nbytes="64MiB")
    with tieredkv.open(tmp_path, config) as kv:
        model = llama(vocab_size=9_000)
        chat = ChatModel(kv, model, byte_tokenizer(), salt=SALT)
        with chat.session("s", system=WORDS) as session:
            answer = session.send(WORDS, **options)
            list(answer)
            for value in (kv, kv.sessions(), chat, session, answer, session.last_explain, session.explain()):
                assert_silent(f"{value!r} {value}", type(value).__name__)
            for call in (
                lambda: session.send(WORDS, num_beams=2), lambda: session.system(WORDS),
                lambda: session.resume_answer(), lambda: session.rollback(turns=9),
            ):  # fmt: skip
                with pytest.raises(TieredKVError) as raised:
                    call()
                assert_silent(f"{raised.value!r}", "a mistake in a session")
        ids = torch.from_numpy(IDS[None].astype(np.int64) % 1000 + 8_000)
        with chat.session("ids") as session:
            attached, keyword = session.attach(ids), cache_argument(model)
            wrong = ids.clone()
            wrong[0, 7] = 8_888
            for call in (
                lambda: model.generate(wrong, **{keyword: attached[keyword]}, **options),
                lambda: session.commit(wrong),
            ):
                with pytest.raises(TieredKVError) as raised:
                    call()
                assert not re.search(r"8\d\d\d", str(raised.value)), raised.value
    assert_silent(caplog.text, "logs")
