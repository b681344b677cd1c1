"""Calls that are broken off: nothing stays pinned or reserved, and no slot is given away while a read may land."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from core_helpers import (
    IDENTITY,
    MIXED,
    Gate,
    HookedFs,
    comes_true,
    load_checked,
    memory_only_disk,
    opened,
    prompt,
    quiet,
    store,
)

from tieredkv import Reason
from tieredkv.cache import TieredCache
from tieredkv.outcomes import Tier


def unnamed_nbytes(kv: TieredCache) -> int:
    """What the device's arena holds beyond what the table names."""
    with kv._lock:
        resident = kv._residents[Tier.DEVICE]
        named = int(resident.nbytes_of(kv._table.live_rows()).sum())
        return resident.arena.live_nbytes - named


def test_a_load_that_is_interrupted_holds_nothing(tmp_path: Path) -> None:
    """Ctrl-C while the disk hangs: slots stay taken while reads may land in them, and are free after that."""
    gate = Gate()
    fs = HookedFs(lambda op, path: gate.pass_through() if op == "preadv" and "slabs" in path else None)

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    with opened(tmp_path, fs=fs, deadline_s=20.0) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert store(space, prompt(0)).wait(60)
        memory_only_disk(kv)
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            for _ in range(4):
                gate.shut()
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                with pytest.raises(KeyboardInterrupt):
                    space.load(prompt(0))
                assert kv.stats().num_pins == 0 and not kv._table.uses.any()
                assert unnamed_nbytes(kv) > 0, "a slot was given away under a read"
                gate.open()
                assert comes_true(lambda: unnamed_nbytes(kv) == 0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            gate.open()
        assert load_checked(space, prompt(0)) == (320, Reason.COMPLETE)
        quiet(kv)
        kv.check()
