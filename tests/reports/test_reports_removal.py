"""What is removed on request is gone: no byte of it in any file or pool, whatever happened before or happens next."""

from __future__ import annotations

import random
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from children import die, outcome_of
from core_helpers import (
    IDENTITY,
    MIXED,
    SIZE,
    Gate,
    HookedFs,
    kv_of,
    load_checked,
    opened,
    prompt,
    quiet,
    small,
    store,
)

from tieredkv import Identity, Turn
from tieredkv.block.hashing import chain
from tieredkv.cache import TieredCache, open_cache

GONE = Identity(weights="cd" * 32, salt="tenant-salt")
TIGHT: dict[str, Any] = {
    "device_nbytes": "128KiB", "host_nbytes": "128KiB", "disk_nbytes": "16MiB", "trace": True,
}  # fmt: skip


def marks_of(space: Any, tokens: np.ndarray) -> set[bytes]:
    """Pieces that only these tokens leave behind: their ids, their digests, and their KV."""
    marks = {digest.tobytes() for digest in space.chain(tokens)}
    for block in range(len(tokens) // SIZE):
        here = slice(block * SIZE, (block + 1) * SIZE)
        marks.add(tokens[here].tobytes())
        for tensors in kv_of(space, tokens).values():
            marks |= {tensor[0, here].contiguous().numpy().tobytes()[:64] for tensor in tensors}
    return marks


def files_with(path: Path, marks: set[bytes]) -> list[str]:
    """Files that hold any of the marks."""
    raw = {p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
    return [name for name, data in raw.items() if holds(data, marks)]


def holds(data: bytes, marks: set[bytes]) -> bool:
    """Whether any of the marks is in `data`, whose blank pages are passed over."""
    pages = (data[at : at + 4096] for at in range(0, len(data), 4096))
    written = b"".join(page for page in pages if page.count(0) < len(page))
    return any(mark in written for mark in marks)


def pools_with(kv: TieredCache, marks: set[bytes]) -> list[str]:
    """Memory tiers that hold any of the marks, in live slots or in free ones."""
    raw = {tier.name: memory.buffer.cpu().numpy().tobytes() for tier, memory in kv._memories.items()}
    return [name for name, data in raw.items() if holds(data, marks)]


def much_use(kv: TieredCache, rng: random.Random) -> tuple[Any, set[bytes]]:
    """Both namespaces in every tier, after moves up and down, a checkpoint, and slots that changed hands."""
    gone, keep = kv.namespace(GONE, MIXED), kv.namespace(IDENTITY, MIXED)
    marks: set[bytes] = set()
    for turn in range(8):
        tokens = prompt(1000 + turn % 4, rng.randrange(2, 20) * SIZE + 3)
        store(gone, tokens)
        marks |= marks_of(gone, tokens)
        store(keep, prompt(turn % 5, rng.randrange(2, 20) * SIZE))
        load_checked(rng.choice((gone, keep)), prompt(rng.choice((1000, 1001, 0, 1))))
    with kv.session("secret", gone) as session:
        session.commit(prompt(1000), [Turn("user", 20)], anchors=[320], meta={"said": "MARKED WORDS"})
    assert kv.checkpoint() and kv.flush(60).ok
    return gone, marks | {b"MARKED WORDS", b"secret"}


@pytest.mark.parametrize("changes", [{}, {"disk_io": "buffered"}, {"disk": "lmdb"}, {"spill": "evict"}])
def test_a_purge_reaches_every_file_and_pool(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Also what earlier evictions left in free slots, and what a smaller part's slot held before it."""
    seed = random.randrange(1 << 20)
    print("seed", seed)
    with opened(tmp_path, **(TIGHT | changes)) as kv:
        gone, marks = much_use(kv, random.Random(seed))
        quiet(kv)
        assert files_with(tmp_path, marks), "the marks are there before"
        kv.purge(gone)
        assert files_with(tmp_path, marks) == [] and pools_with(kv, marks) == []
        quiet(kv)
        kv.check()
    with opened(tmp_path, **(TIGHT | changes)) as kv:
        kv.check()
        assert files_with(tmp_path, marks) == [] and not kv.recovery.damage


def test_a_delete_reaches_what_the_session_let_go_before(tmp_path: Path) -> None:
    """Window parts of earlier turns left their slots, in memory and on disk, without being overwritten."""
    with opened(tmp_path, trace=True, device_nbytes="1MiB", host_nbytes="1MiB") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        session, said = kv.session("s", space), prompt(0, 30 * SIZE)
        for end in range(4 * SIZE, 31 * SIZE, 4 * SIZE):
            stored = store(space, said[:end], anchors=[end])
            session.commit(said[:end], [Turn("user", end)], anchors=[end], stored=[stored])
        quiet(kv)
        marks = marks_of(space, said)
        assert set(pools_with(kv, marks)) >= {"DEVICE"}
        session.delete()
        assert pools_with(kv, marks) == [] and files_with(tmp_path, marks) == []
        kv.check()


def said_marks(tokens: np.ndarray) -> set[bytes]:
    """The marks of `tokens` under the identity that goes, without a cache."""
    root = GONE.digest(MIXED)
    return marks_of(SimpleNamespace(layout=MIXED, chain=lambda ids: chain(root, ids, SIZE)), tokens)


def remove_while_spilling(kv: TieredCache, gate: Gate, how: str) -> None:
    """Remove blocks of which some are being written, and others wait in the queue."""
    gone, keep = kv.namespace(GONE, MIXED), kv.namespace(IDENTITY, MIXED)
    assert store(keep, prompt(5)).wait(60)
    gate.shut()
    with kv.session("secret", gone) as session:
        for seed in range(1000, 1006):
            store(gone, prompt(seed))
        session.commit(prompt(1000), [Turn("user", 20)], anchors=[320], meta={"said": "MARKED WORDS"})
        assert kv._spiller is not None and kv._spiller._queue and kv._spiller.is_spilling
        remove = session.delete if how == "delete" else lambda: kv.purge(gone)
        remover = threading.Thread(target=remove)
        remover.start()
        remover.join(0.2)
        assert remover.is_alive(), "the removal returned while old bytes were on their way to the disk"
        gate.open()
        remover.join(20)
        assert not remover.is_alive()


@pytest.mark.parametrize("disk_io", ["direct", "buffered"])
@pytest.mark.parametrize(("how", "num_prompts"), [("purge", 6), ("delete", 1)])
def test_killed_right_after_a_removal_that_met_its_own_blocks_in_the_queue(
    tmp_path: Path, how: str, num_prompts: int, disk_io: str
) -> None:
    """No byte in any file then, nor in the pools before; and none comes back with the next opening."""
    marks = {b"MARKED WORDS"}.union(*(said_marks(prompt(1000 + n)) for n in range(num_prompts)))
    changes = {**TIGHT, "disk_io": disk_io, "device_nbytes": "1MiB", "deadline_s": 10.0}

    def act() -> None:
        gate = Gate()
        fs = HookedFs(lambda op, path: gate.pass_through() if op == "pwritev" and "slabs" in path else None)
        kv = open_cache(tmp_path, small(**changes), fs=fs)
        remove_while_spilling(kv, gate, how)
        assert pools_with(kv, marks) == []
        die()

    assert outcome_of(act) == -signal.SIGKILL
    assert files_with(tmp_path, marks) == []
    with opened(tmp_path, **changes) as kv:
        kv.check()
        assert files_with(tmp_path, marks) == [] and kv.sessions() == () and not kv.recovery.damage
        assert load_checked(kv.namespace(IDENTITY, MIXED), prompt(5))[0] == 320


def test_killed_while_removing_it_is_finished_by_the_next_opening(tmp_path: Path) -> None:
    """At every change of a file that a purge makes: either all is there as before, or nothing is once open."""
    marks = said_marks(prompt(1000)) | {b"MARKED WORDS"}
    num_ops = ended = 0
    while not ended:
        path, left = tmp_path / f"{num_ops}", [num_ops]

        def act(path: Path = path, left: list[int] = left) -> None:
            armed = []

            def hook(operation: str, _path: str) -> None:
                if armed and operation in CHANGES:
                    left[0] -= 1
                    if left[0] < 0:
                        die()

            kv = open_cache(path, small(trace=True), fs=HookedFs(hook))
            gone = kv.namespace(GONE, MIXED)
            with kv.session("secret", gone) as session:
                stored = store(gone, prompt(1000))
                session.commit(
                    prompt(1000), [], anchors=[320], stored=[stored], meta={"said": "MARKED WORDS"}
                )
            assert kv.flush(60).ok
            armed.append(True)
            kv.purge(gone)

        ended = outcome_of(act) == 0
        with opened(path) as kv:
            kv.check()
            begun = not kv.sessions()
            assert begun or load_checked(kv.namespace(GONE, MIXED), prompt(1000))[0] in (0, 320)
            assert not begun or files_with(path, marks) == [], f"killed at change {num_ops}"
        num_ops += 3
    assert num_ops > 9


CHANGES = {"pwritev", "datasync", "create", "unlink", "rename", "sync_dir", "allocate", "punch"}
