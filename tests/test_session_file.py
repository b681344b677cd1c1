"""A session as one file: what was exported comes back elsewhere; a file that is not whole changes nothing."""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_helpers import (
    IDENTITY,
    LAYOUTS,
    MIXED,
    SIZE,
    HookedFs,
    load_checked,
    memory_only_disk,
    opened,
    prompt,
    quiet,
    store,
)

from tieredkv import Identity, Turn
from tieredkv.errors import BadInput, SessionError
from tieredkv.session_file import write_session

SAID = prompt(0)
TURNS = (Turn("system", 20), Turn("user", 100), Turn("assistant", 325))


def talk(kv: Any, layout: Any = MIXED) -> Any:
    space = kv.namespace(IDENTITY, layout)
    session = kv.session("ünder/1", space)
    session.commit(
        SAID, TURNS, anchors=[320], stored=[store(space, SAID)], meta={"title": "ü", "n": [1, None]}
    )
    session.prioritise("high")
    return session


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("where", ["device", "disk"])
def test_a_session_moves_to_another_store(tmp_path: Path, layout: Any, where: str) -> None:
    file = tmp_path / "session.tkv"
    with opened(tmp_path / "one") as kv:
        session = talk(kv, layout)
        if where == "disk":
            memory_only_disk(kv)
        session.export(file)
        assert kv.stats().num_pins == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and os.listdir(tmp_path) == ["one", "session.tkv"]
    with opened(tmp_path / "two") as kv:
        space = kv.namespace(IDENTITY, layout)
        kv.import_session(file, space).close()
        kv.import_session(file, space, "again").close()
        with pytest.raises(SessionError, match="exists"):
            kv.import_session(file, space)
        quiet(kv)
    with opened(tmp_path / "two") as kv:
        space = kv.namespace(IDENTITY, layout)
        session = kv.session("ünder/1", space)
        assert session.tokens.tolist() == SAID.tolist() and session.turns == TURNS
        assert session.anchors == (320,) and session.meta == {"title": "ü", "n": [1, None]}
        assert session.priority == "high" and not session.pinned
        assert load_checked(space, SAID)[0] == 320
        kv.check()


def test_a_session_whose_blocks_are_gone_keeps_its_tokens(tmp_path: Path) -> None:
    file = tmp_path / "session.tkv"
    with opened(tmp_path / "one") as kv:
        session = kv.session("a", kv.namespace(IDENTITY, MIXED))
        session.commit(SAID, TURNS)
        session.export(file)
    with opened(tmp_path / "two") as kv:
        session = kv.import_session(file, kv.namespace(IDENTITY, MIXED))
        assert session.tokens.tolist() == SAID.tolist()
        assert session.space.lookup(SAID).num_tokens == 0


def test_another_identity_is_refused_by_the_field_that_differs(tmp_path: Path) -> None:
    file = tmp_path / "session.tkv"
    with opened(tmp_path / "one") as kv:
        talk(kv).export(file)
        for identity, layout, field in [
            (Identity(weights="cd" * 32), MIXED, "weights"),
            (Identity(weights="ab" * 32, salt="other"), MIXED, "salt"),
            (IDENTITY, LAYOUTS["full"], "layout.groups"),
        ]:
            space = kv.namespace(identity, layout)
            with pytest.raises(BadInput, match=f"{file}.*{field}"):
                kv.import_session(file, space, "new")
        assert [row.name for row in kv.sessions()] == ["ünder/1"]


def test_no_damaged_file_is_taken(tmp_path: Path) -> None:
    """Cut anywhere, grown, or with any bit flipped: a BadInput that names the file, and nothing is changed."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng, file, bad = random.Random(seed), tmp_path / "session.tkv", tmp_path / "bad.tkv"
    with opened(tmp_path / "one") as kv:
        talk(kv).export(file)
    whole = file.read_bytes()
    cases = [whole[: len(whole) // 2], b"", whole[:47], whole[:-1], whole + b"\0", b"x" * 500]
    cases += [whole[: rng.randrange(len(whole))] for _ in range(40)]
    for at in [*range(48), *(rng.randrange(len(whole)) for _ in range(150))]:
        flipped = bytearray(whole)
        flipped[at] ^= 1 << rng.randrange(8)
        cases.append(bytes(flipped))
    with opened(tmp_path / "two") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for number, case in enumerate(cases):
            bad.write_bytes(case)
            with pytest.raises(BadInput) as caught:
                kv.import_session(bad, space)
            assert str(bad) in str(caught.value), f"case {number}"
        assert kv.sessions() == () and kv.stats().num_blocks == 0
        for path in (tmp_path / "nothing", tmp_path):
            with pytest.raises(BadInput, match=str(path)):
                kv.import_session(path, space)
        os.symlink(file, tmp_path / "link")
        with pytest.raises(BadInput, match="link"):
            kv.import_session(tmp_path / "link", space)
        kv.import_session(file, space)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space"), KeyboardInterrupt("No space")])
@pytest.mark.parametrize("operation", ["create", "pwritev", "datasync", "rename", "sync_dir"])
def test_an_export_that_fails_leaves_what_was_there(
    tmp_path: Path, operation: str, error: BaseException
) -> None:
    def fail(op: str, path: str) -> None:
        if op == operation and path.startswith(str(out)):
            raise error

    out = tmp_path / "out"
    out.mkdir()
    (out / "session.tkv").write_bytes(b"before")
    (out / "session.tkv.tmp").write_bytes(b"somebody else's")
    with opened(tmp_path / "one") as kv:
        session = talk(kv)
        with pytest.raises(type(error), match="No space"):
            write_session(out / "session.tkv", session._row, session.space, HookedFs(fail))
        assert sorted(os.listdir(out)) == ["session.tkv", "session.tkv.tmp"]
        if operation != "sync_dir":
            assert (out / "session.tkv").read_bytes() == b"before"
        assert kv.stats().num_pins == 0
        session.export(out / "session.tkv")
        assert (out / "session.tkv.tmp").read_bytes() == b"somebody else's"
    with opened(tmp_path / "two") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        kv.import_session(out / "session.tkv", space)
        assert load_checked(space, np.append(SAID, 1))[0] == 20 * SIZE


def test_two_threads_export_to_one_path(tmp_path: Path) -> None:
    """Both are at work at the same time; the last to end has the name, and either file is whole."""
    both, failures = threading.Barrier(2, timeout=60), list[BaseException]()
    fs = HookedFs(lambda operation, _path: operation in ("datasync", "rename") and both.wait() and None)
    with opened(tmp_path / "one") as kv:
        session = talk(kv)

        def export() -> None:
            try:
                write_session(tmp_path / "session.tkv", session._row, session.space, fs)
            except BaseException as failure:
                failures.append(failure)
                both.abort()

        threads = [threading.Thread(target=export) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failures and sorted(os.listdir(tmp_path)) == ["one", "session.tkv"]
    with opened(tmp_path / "two") as kv:
        kv.import_session(tmp_path / "session.tkv", kv.namespace(IDENTITY, MIXED))
