"""The whole cache through its public face: what is stored comes back, from whatever tier, after whatever close."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_helpers import (
    IDENTITY,
    LAYOUTS,
    MIXED,
    SIZE,
    assert_nothing_stranded,
    assert_right,
    directory_nbytes,
    group_of,
    kv_of,
    load_checked,
    memory_only_disk,
    opened,
    prompt,
    quiet,
    small,
    store,
)

import tieredkv
from tieredkv import BlockLayout, Identity, Reason, Span
from tieredkv.cache import open_cache
from tieredkv.errors import (
    BadConfig,
    BadInput,
    Closed,
    NewerFormat,
    NotAStore,
    PathUnusable,
    SessionError,
    StoreHeld,
)
from tieredkv.namespace import Namespace
from tieredkv.outcomes import Tier
from tieredkv.table.block_table import BlockTable

pytestmark = pytest.mark.usefixtures("tmp_path")


@pytest.fixture(params=["lru", "arc"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("spill", ["eager", "evict"])
def test_everything_comes_back_through_all_tiers_and_a_restart(
    tmp_path: Path, layout: tieredkv.BlockLayout, spill: str, policy: str
) -> None:
    prompts = [prompt(seed) for seed in range(8)]
    with opened(tmp_path, spill=spill, policy=policy) as kv:
        space = kv.namespace(IDENTITY, layout)
        for tokens in prompts:
            stored = store(space, tokens)
            assert (stored.num_refused, stored.reason) == (0, Reason.COMPLETE)
            assert stored.wait(60)
            kv.check()
        for tokens in prompts:
            assert load_checked(space, tokens) == (320, Reason.COMPLETE)
            kv.check()
        quiet(kv)
        assert_nothing_stranded(kv)
    with opened(tmp_path, spill=spill, policy=policy) as kv:
        space = kv.namespace(IDENTITY, layout)
        for tokens in prompts:
            assert space.lookup(tokens).by_tier == {"disk": 320}
            assert load_checked(space, tokens) == (320, Reason.COMPLETE)
        kv.check()
        quiet(kv)
        assert_nothing_stranded(kv)


@pytest.mark.parametrize("disk_io", ["direct", "buffered", "mmap"])
def test_each_way_of_reading_gives_the_same_bytes(tmp_path: Path, disk_io: str) -> None:
    with opened(tmp_path, disk_io=disk_io) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for seed in range(6):
            store(space, prompt(seed))
        memory_only_disk(kv)
        for seed in range(6):
            assert load_checked(space, prompt(seed)) == (320, Reason.COMPLETE)
        kv.check()


@pytest.mark.parametrize("kind", ["no host", "no disk", "neither"])
def test_fewer_tiers(tmp_path: Path, kind: str) -> None:
    changes = {
        "no host": {"host_nbytes": 0},
        "no disk": {"disk_nbytes": 0},
        "neither": {"host_nbytes": 0, "disk_nbytes": 0},
    }
    with opened(tmp_path / "store", **changes[kind]) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for seed in range(6):
            assert store(space, prompt(seed)).wait(60)
            kv.check()
        last = load_checked(space, prompt(5))
        assert last == (320, Reason.COMPLETE)
        first = load_checked(space, prompt(0))
        assert first == ((320, Reason.COMPLETE) if kind == "no host" else (0, Reason.EVICTED))
        assert kv.flush(60).ok == (kind == "no host")
        quiet(kv)
        assert_nothing_stranded(kv)
    assert (tmp_path / "store").exists() == (kind == "no host")


def test_a_lookup_says_why(tmp_path: Path) -> None:
    tokens = prompt(1)
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert space.lookup(tokens).reason is Reason.NEVER_STORED
        assert space.lookup(tokens[:SIZE]).reason is Reason.TOO_SHORT
        assert space.lookup([]).reason is Reason.TOO_SHORT
        store(space, tokens)
        found = space.lookup(tokens)
        assert (found.num_tokens, found.reason) == (320, Reason.COMPLETE)
        other = tokens.copy()
        other[10 * SIZE + 3] += 1
        found = space.lookup(other)
        assert (found.num_tokens, found.num_full_tokens, found.reason) == (0, 160, Reason.NO_ANCHOR)
        longer = np.concatenate((tokens[:320], prompt(2)))
        found = space.lookup(longer)
        assert (found.num_tokens, found.reason) == (320, Reason.NEVER_STORED)
    with opened(tmp_path / "full") as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        store(space, tokens)
        found = space.lookup(other)
        assert (found.num_tokens, found.reason) == (160, Reason.DIVERGED)
        assert "160" in found.detail


@pytest.mark.parametrize("num_tokens", [SIZE, SIZE + 1, 2 * SIZE - 1, 2 * SIZE, 2 * SIZE + 1])
def test_one_token_is_always_left_and_only_whole_blocks_match(tmp_path: Path, num_tokens: int) -> None:
    """B69."""
    tokens = prompt(1)
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        store(space, tokens)
        assert space.lookup(tokens[:num_tokens]).num_tokens == (num_tokens - 1) // SIZE * SIZE


def least_recent(kv: tieredkv.TieredCache) -> list[int]:
    """Blocks of the device tier in the order in which they would leave."""
    device = kv._residents[tieredkv.Tier.DEVICE]
    return device.victims(1 << 40, np.zeros(0, dtype=np.int32)).tolist()


def test_lookup_is_pure(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        store(space, prompt(1)).wait(60)
        quiet(kv)
        before = kv.stats()
        order = least_recent(kv)
        space.lookup(prompt(1))
        space.lookup(prompt(9))
        after = kv.stats()
        assert order == least_recent(kv)
        assert (before.tiers, before.num_blocks, before.num_pins) == (
            after.tiers,
            after.num_blocks,
            after.num_pins,
        )


def test_store_copies_and_a_second_store_changes_nothing(tmp_path: Path) -> None:
    """B07, B39."""
    tokens = prompt(1)
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        tensors = kv_of(space, tokens)
        space.store(tokens, tensors, anchors=[320])
        for layer in tensors.values():
            for tensor in layer:
                tensor.fill_(-1)
        for _ in range(50):
            again = space.store(tokens, tensors, anchors=[320])
            assert (again.num_new, again.num_present, again.num_refused) == (0, 20, 0)
        assert load_checked(space, tokens) == (320, Reason.COMPLETE)
        assert kv.flush(60).ok
        quiet(kv)
        assert kv.stats().num_blocks == 20
        kv.check()


def test_spans_in_pieces(tmp_path: Path) -> None:
    tokens = prompt(3)
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        kv_whole = kv_of(space, tokens)
        spans = {
            layer: [
                Span(start, {"k": k[:, start:end], "v": v[:, start:end]})
                for start, end in ((0, 64), (64, 160), (160, len(tokens)))
            ]
            for layer, (k, v) in kv_whole.items()
        }
        assert space.store(tokens, spans).num_new == 20
        assert load_checked(space, tokens) == (320, Reason.COMPLETE)


def test_only_the_new_blocks_need_tensors(tmp_path: Path) -> None:
    tokens = prompt(3, 640)
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        store(space, tokens[:320])
        whole = kv_of(space, tokens)
        tail = {layer: [Span(320, {"k": k[:, 320:], "v": v[:, 320:]})] for layer, (k, v) in whole.items()}
        stored = space.store(tokens, tail)
        assert (stored.num_new, stored.num_present) == (20, 20)
        assert load_checked(space, np.append(tokens, 1)) == (640, Reason.COMPLETE)
        hole = {layer: [Span(480, {"k": k[:, 480:], "v": v[:, 480:]})] for layer, (k, v) in whole.items()}
        other = prompt(4, 640)
        stored = space.store(other, hole)
        assert (stored.num_new, stored.num_present, stored.num_refused) == (0, 0, 40)
        assert stored.reason is Reason.NOT_GIVEN
        assert space.lookup(other).num_tokens == 0
        kv.check()


def test_bad_tensors_are_refused_and_change_nothing(tmp_path: Path) -> None:
    tokens = prompt(3)
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        good = kv_of(space, tokens)
        bad = [
            good | {0: (good[0][0].float(), good[0][1])},
            good | {0: (good[0][0][:, :, :4], good[0][1])},
            good | {0: (torch.zeros(2, len(tokens), 8, dtype=torch.int32), good[0][1])},
            good | {0: (torch.zeros(1, len(tokens) + 1, 8, dtype=torch.int32), good[0][1])},
            good | {0: [Span(-1, {"k": good[0][0], "v": good[0][1]})]},
            good | {0: [Span(0, {"k": good[0][0]})]},
            good | {0: [Span(320, {"k": good[0][0], "v": good[0][1]})]},
        ]
        for tensors in bad:
            with pytest.raises(BadInput):
                space.store(tokens, tensors)
        for anchors in ([5], [336], [-16]):
            with pytest.raises(BadInput):
                space.store(tokens, good, anchors=anchors)
        assert kv.stats().num_blocks == 0
        kv.check()


def test_a_namespace_is_of_an_identity_and_a_layout(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        for identity, layout in ((None, MIXED), (IDENTITY, None), (MIXED, IDENTITY)):
            with pytest.raises(BadInput, match="Identity and a BlockLayout"):
                kv.namespace(identity, layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("at", ["_remember_tokens", "_bring_up", "_hit"])
def test_an_interrupted_call_pins_nothing_and_is_in_nobodys_way(
    tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_given: Any) -> None:
        raise KeyboardInterrupt

    with opened(tmp_path, deadline_s=2.0) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        if at != "_remember_tokens":
            assert store(space, prompt(0)).wait(60)
        with monkeypatch.context() as patch:
            patch.setattr(Namespace, at, interrupt)
            with pytest.raises(KeyboardInterrupt):
                store(space, prompt(0)) if at == "_remember_tokens" else space.load(prompt(0))
        assert not kv._table.pins.any() and not kv._table.uses.any()
        kv.purge(space)
        kv.check()


def test_a_prefix_is_unpinned_once_also_where_closing_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_given: Any) -> None:
        raise KeyboardInterrupt

    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert store(space, prompt(0)).wait(60)
        prefix = space.load(prompt(0))
        with monkeypatch.context() as patch:
            patch.setattr(BlockTable, "free_if_empty", interrupt)  # the pins are off by then
            with pytest.raises(KeyboardInterrupt):
                prefix.close()
        prefix.close()
        assert not kv._table.pins.any()


def test_a_load_from_below_is_one_use(tmp_path: Path) -> None:
    """ARC (Megiddo and Modha, FAST 2003, figure 4): a miss goes to T1, and only a second use to T2."""
    with opened(tmp_path, policy="arc") as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        assert store(space, prompt(0)).wait(60)
        memory_only_disk(kv)
        policy: Any = kv._residents[Tier.DEVICE].policy
        for t1, t2 in ((20, 0), (0, 20)):
            load_checked(space, prompt(0))
            assert (len(policy._t1.sizes), len(policy._t2.sizes)) == (t1, t2)


def test_a_wait_of_any_length_is_a_wait(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for seed, timeout_s in enumerate((None, float("inf"), 1e12)):
            stored = store(space, prompt(seed))
            assert stored.wait(timeout_s)
            assert kv.flush(timeout_s).ok


def test_a_layer_with_a_tensor_too_few_is_bad_input(tmp_path: Path) -> None:
    tokens = prompt(3)
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        good = kv_of(space, tokens)
        with pytest.raises(BadInput):
            space.store(tokens, good | {0: (good[0][0],)})


def test_prefixes_give_views_and_gathers_alike(tmp_path: Path) -> None:
    tokens = prompt(3)
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        store(space, tokens)
        with space.load(tokens) as prefix:
            assert (prefix.first_token(0, "k"), prefix.first_token(2, "k")) == (0, 320 - 48)
            assert_right(space, tokens, prefix)
            views = prefix.views(0)["k"]
            joined = torch.cat([v.movedim(1, 0).reshape(v.shape[1], -1, v.shape[3]) for v in views], dim=1)
            assert torch.equal(joined, prefix.gather(0, "k"))
        with pytest.raises(Closed):
            prefix.views(0)
        prefix.close()
        assert kv.stats().num_pins == 0


# ---- opening -------------------------------------------------------------------------------------


def test_a_moved_directory_another_capacity_and_another_process_are_full_hits(tmp_path: Path) -> None:
    """B20."""
    with opened(tmp_path / "one") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for seed in range(4):
            store(space, prompt(seed))
    shutil.move(tmp_path / "one", tmp_path / "two")
    sizes = {"device_nbytes": "1MiB", "host_nbytes": "300KiB", "disk_nbytes": "48MiB"}
    with opened(tmp_path / "two", **sizes) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for seed in range(4):
            assert load_checked(space, prompt(seed)) == (320, Reason.COMPLETE)
    program = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from core_helpers import *\n"
        "with opened(sys.argv[1], disk_nbytes='40MiB') as kv:\n"
        "    space = kv.namespace(IDENTITY, MIXED)\n"
        "    print([load_checked(space, prompt(seed))[0] for seed in range(4)])\n"
    )
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "two"), str(here), str(here.parent)],
        env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[320, 320, 320, 320]"


def test_the_holder_is_named(tmp_path: Path) -> None:
    """B61, B62."""
    with opened(tmp_path / "store") as kv:
        (tmp_path / "link").symlink_to(tmp_path / "store")
        for path in ("store", "link"):
            with pytest.raises(StoreHeld, match=f"{os.getpid()}"):
                open_cache(tmp_path / path, small())
        space = kv.namespace(IDENTITY, MIXED)
        store(space, prompt(1))
        assert load_checked(space, prompt(1))[0] == 320
        with pytest.raises(StoreHeld):
            open_cache(tmp_path / "store", small())
    with opened(tmp_path / "store") as kv:
        assert load_checked(kv.namespace(IDENTITY, MIXED), prompt(1))[0] == 320


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all my work")
    with pytest.raises(NotAStore):
        open_cache(tmp_path, small())
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_newer_format_is_left_alone(tmp_path: Path) -> None:
    from tieredkv.wal import format as wal_format

    with opened(tmp_path) as kv:
        store(kv.namespace(IDENTITY, MIXED), prompt(1))
    newest = sorted((tmp_path / "wal").iterdir())[-1]
    raw = bytearray(newest.read_bytes())
    made = _as_newer(raw[: wal_format.HEADER_NBYTES])
    raw[: len(made)] = made
    newest.write_bytes(raw)
    before = {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}
    with pytest.raises(NewerFormat):
        open_cache(tmp_path, small())
    assert before == {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}


def _as_newer(header: bytearray) -> bytes:
    """The same header with the next version number, its checksum made right."""
    from tieredkv.wal import format as wal_format

    for at in range(0, 64, 4):
        for change in (header[:at] + (2).to_bytes(4, "little") + header[at + 4 :],):
            if header[at : at + 4] == (1).to_bytes(4, "little"):
                sealed = bytearray(change)
                sealed[-8:] = wal_format.xxhash.xxh3_64_intdigest(bytes(sealed[:-8])).to_bytes(8, "little")
                try:
                    wal_format.decode_header(bytes(sealed))
                except NewerFormat:
                    return bytes(sealed)
                except Exception:
                    continue
    raise AssertionError("no version field found")


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere/store")):
        with pytest.raises(PathUnusable, match=str(path)):
            open_cache(path, small())
    with opened(tmp_path / "file", on_unusable="memory") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        store(space, prompt(1))
        assert load_checked(space, prompt(1)) == (320, Reason.COMPLETE)
        health = kv.health()
        assert (
            not health.ok and health.mode == "memory" and str(tmp_path / "file") in health.troubles[0].where
        )
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("nbytes", [1, 4096, 3 << 20])
def test_a_budget_smaller_than_one_block_is_refused(tmp_path: Path, tier: str, nbytes: int) -> None:
    fits = tier != "disk" and nbytes == 3 << 20
    try:
        with opened(tmp_path, **{f"{tier}_nbytes": nbytes}) as kv:
            space = kv.namespace(IDENTITY, MIXED)
            assert fits, f"{nbytes} bytes of {tier} were accepted"
            assert store(space, prompt(1)).num_refused == 0
    except BadConfig as error:
        assert not fits and f"{tier}_nbytes" in str(error)


@pytest.mark.parametrize("budget", [f"{n}MiB" for n in (4, 5, 6, 8, 10)])
def test_a_disk_budget_that_is_accepted_holds_blocks(tmp_path: Path, budget: str) -> None:
    try:
        with opened(tmp_path, disk_nbytes=budget) as kv:
            space = kv.namespace(IDENTITY, LAYOUTS["mixed"])
            stored = store(space, prompt(1))
            assert stored.wait(60) and kv.flush(60).ok, kv.flush(60)
    except BadConfig:
        return
    with opened(tmp_path, disk_nbytes=budget) as kv:
        assert load_checked(kv.namespace(IDENTITY, LAYOUTS["mixed"]), prompt(1))[0] == 320


def test_many_opens_in_a_row_stay_within_the_budget(tmp_path: Path) -> None:
    budget = 12 << 20
    for number in range(30):
        with opened(tmp_path, disk_nbytes=budget) as kv:
            if number == 0:
                store(kv.namespace(IDENTITY, MIXED), prompt(1))
            assert directory_nbytes(tmp_path) <= budget, f"open {number}"
            assert kv.stats().disk_nbytes <= budget
        assert directory_nbytes(tmp_path) <= budget, f"close {number}"
    with opened(tmp_path, disk_nbytes=budget) as kv:
        assert load_checked(kv.namespace(IDENTITY, MIXED), prompt(1))[0] == 320


def test_a_smaller_budget_is_met_at_open(tmp_path: Path) -> None:
    """B41."""
    with opened(tmp_path, disk_nbytes="64MiB", device_nbytes="8MiB", host_nbytes="8MiB") as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["uneven"])
        for seed in range(60):
            assert store(space, prompt(seed)).wait(60)
    assert directory_nbytes(tmp_path) > 16 << 20
    with opened(tmp_path, disk_nbytes="16MiB") as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["uneven"])
        quiet(kv)
        kv.check()
        assert directory_nbytes(tmp_path) <= 16 << 20
        found = [load_checked(space, prompt(seed))[0] for seed in range(60)]
        assert sum(found) > 0
        quiet(kv)
        assert_nothing_stranded(kv)


# ---- closing -------------------------------------------------------------------------------------


def test_a_change_of_directory_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path means one directory, also after `chdir` to a place where that name is another store."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with opened(tmp_path / "b" / "store") as kv:
        assert store(kv.namespace(IDENTITY, MIXED), prompt(1)).wait(60) and kv.flush(60).ok
    before = {p: p.read_bytes() for p in (tmp_path / "b").rglob("*") if p.is_file()}
    monkeypatch.chdir(tmp_path / "a")
    with opened("store") as kv:
        monkeypatch.chdir(tmp_path / "b")
        space = kv.namespace(IDENTITY, MIXED)
        assert store(space, prompt(0)).wait(60) and kv.flush(60).ok and kv.checkpoint(60)
        memory_only_disk(kv)
        assert load_checked(space, prompt(0))[0]
    assert {p: p.read_bytes() for p in (tmp_path / "b").rglob("*") if p.is_file()} == before
    with opened(tmp_path / "a" / "store") as kv:
        assert load_checked(kv.namespace(IDENTITY, MIXED), prompt(0))[0]


def test_only_a_living_namespace_of_this_cache_is_taken(tmp_path: Path) -> None:
    """Numbers of namespaces are those of another cache too, and are given out again after a purge."""
    other = Identity(weights="cd" * 32)
    with opened(tmp_path / "a") as kv, opened(tmp_path / "b") as elsewhere:
        foreign, purged = elsewhere.namespace(other, MIXED), kv.namespace(other, MIXED)
        kv.purge(purged)
        space = kv.namespace(IDENTITY, MIXED)
        assert space.row.number == foreign.row.number == purged.row.number
        store(space, prompt(0))
        for wrong in (foreign, purged, None, "space"):
            for call in (
                lambda w=wrong: kv.purge(w),
                lambda w=wrong: kv.session("s", w),
                lambda w=wrong: kv.import_session(tmp_path / "none", w),
            ):
                with pytest.raises(BadInput, match="no namespace of this cache"):
                    call()
        assert load_checked(space, prompt(0))[0] and kv.sessions() == ()
        assert elsewhere.namespace(other, MIXED) is foreign


def test_a_purge_that_is_refused_leaves_the_namespace(tmp_path: Path) -> None:
    with opened(tmp_path, deadline_s=2.0) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        store(space, prompt(0))
        with space.load(prompt(0)) as prefix:
            assert prefix.num_tokens
            with pytest.raises(SessionError, match="in use"):
                kv.purge(space)
            assert kv.namespace(IDENTITY, MIXED) is space and space.lookup(prompt(0)).num_tokens
        session = kv.session("s", space)
        kv.purge(space)
        with pytest.raises(Closed, match="purged"):
            session.commit(prompt(0), [])


def test_a_store_that_fails_half_way_gives_its_slots_back(tmp_path: Path) -> None:
    with opened(tmp_path, host_nbytes="0", disk_nbytes="0") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for number in range(20):
            tensors = kv_of(space, prompt(number))
            tensors[1] = [
                tensor.to("meta") for tensor in tensors[1]
            ]  # the slots are taken, and half of each is full
            with pytest.raises((BadInput, NotImplementedError)):
                space.store(prompt(number), tensors)
        (device,) = kv.stats().tiers
        assert device.live_nbytes == 0
        assert not store(space, prompt(0)).num_refused
        kv.check()


def test_a_tier_too_small_leaves_a_cache_that_says_so_again(tmp_path: Path) -> None:
    with opened(tmp_path, host_nbytes=100) as kv:
        for _ in range(3):
            with pytest.raises(BadConfig, match="host_nbytes=100"):
                kv.namespace(IDENTITY, MIXED)
        assert kv.flush(60).ok


def test_larger_parts_than_the_first_namespace_has_are_refused_by_the_right_name(tmp_path: Path) -> None:
    budgets = {"device_nbytes": "4MiB", "host_nbytes": "0", "disk_nbytes": "0"}
    large = BlockLayout(SIZE, (group_of("full", [0], width=2560),))
    with opened(tmp_path, **budgets) as kv:
        kv.namespace(IDENTITY, MIXED)
        with pytest.raises(BadConfig, match="since its first namespace"):
            kv.namespace(IDENTITY, large)
    with opened(tmp_path, **budgets) as kv:
        assert kv.namespace(IDENTITY, large) and kv.namespace(IDENTITY, MIXED)


@pytest.mark.parametrize("disk_io", ["direct", "buffered", "mmap"])
def test_a_part_larger_than_a_chunk_of_the_disk_comes_back(tmp_path: Path, disk_io: str) -> None:
    """Of 5 MiB, as a wide model has; memory has chunks as its first namespace needs, the disk those of its format."""
    large = BlockLayout(SIZE, (group_of("full", [0], width=(5 << 20) // (2 * 4 * SIZE)),))
    config = {"device_nbytes": "32MiB", "host_nbytes": "0", "disk_nbytes": "64MiB", "disk_io": disk_io}
    with opened(tmp_path, **config) as kv:
        store(kv.namespace(IDENTITY, large), prompt(0, 4 * SIZE))
        assert kv.flush(60).ok
    with opened(tmp_path, **config) as kv:
        space = kv.namespace(IDENTITY, large)
        assert load_checked(space, prompt(0, 4 * SIZE))[0] == 3 * SIZE


def test_no_call_copies_a_column_of_the_table(tmp_path: Path, policy: str) -> None:
    """A million blocks are an ordinary size: what a call costs must not grow with it."""
    num_rows = 1 << 20
    with opened(tmp_path, policy=policy) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        with kv._lock:
            kv._table._reserve(num_rows)
        for seed in range(6):  # as many as evict from the device and from the host
            store(space, prompt(seed))
        assert kv.flush(60).ok
        tracemalloc.start()
        try:
            for seed in (6, 7):
                assert store(space, prompt(seed)).wait(60)
            for seed in range(8):
                assert space.lookup(prompt(seed)).num_tokens == 320
                assert load_checked(space, prompt(seed)) == (320, Reason.COMPLETE)
            assert kv.flush(60).ok
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        kv.check()
    assert peak < 4 * num_rows, f"{peak:,} bytes for a table of {num_rows:,} rows"


def test_closing_gives_everything_back(tmp_path: Path) -> None:
    """P14, B47."""

    def held() -> tuple[int, set[str]]:
        names = {t.name for t in threading.enumerate() if t.name.startswith("tieredkv")}
        return len(os.listdir("/proc/self/fd")), names

    with opened(tmp_path) as kv:
        store(kv.namespace(IDENTITY, MIXED), prompt(0))
    before = held()
    assert before[1] == set()
    for number in range(8):
        with opened(tmp_path) as kv:
            space = kv.namespace(IDENTITY, MIXED)
            store(space, prompt(number))
            memory_only_disk(kv)
            load_checked(space, prompt(number))
        assert held() == before, f"round {number}"


def test_a_closed_cache_says_so(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        session = kv.session("a", space)
        store(space, prompt(1))
        assert kv.close(5).ok
        assert kv.close(5).ok
        calls = [
            lambda: space.lookup(prompt(1)), lambda: space.load(prompt(1)), lambda: store(space, prompt(1)),
            lambda: kv.namespace(IDENTITY, MIXED), kv.flush, kv.stats, kv.checkpoint, kv.sessions,
            lambda: kv.purge(space), lambda: kv.session("b", space), lambda: session.commit([1], []),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(Closed):
                call()
        assert kv.recovery.new_store


def run_and_forget(tmp_path: Path, *lines: str) -> float:
    """Run lines over a store and prompts in a process of its own that never closes; how long it took to end."""
    here = Path(__file__).parent
    begin = (
        "import sys, threading; sys.path[:0] = sys.argv[2:]",
        "from core_helpers import *",
        "kv = open_cache(sys.argv[1], small(), fs=HookedFs(lambda call, path: None))",
        "space = kv.namespace(IDENTITY, MIXED)",
    )
    end = ("print(time.monotonic())",)
    arguments = ["-c", "\n".join(begin + lines + end), str(tmp_path), str(here), str(here.parent)]
    ended = subprocess.run([sys.executable, *arguments], check=True, timeout=60, capture_output=True)
    assert not ended.stderr, ended.stderr.decode()
    return time.monotonic() - float(ended.stdout)


def test_a_script_that_forgets_to_close_ends_and_loses_nothing(tmp_path: Path) -> None:
    """B58: nor is it taken down by the interpreter, which ends threads in the middle of a call."""
    run_and_forget(tmp_path, "for seed in range(6): store(space, prompt(seed))")
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert [load_checked(space, prompt(seed))[0] for seed in range(6)] == [320] * 6


def test_a_script_that_forgets_to_close_ends_soon_on_a_disk_that_hangs(tmp_path: Path) -> None:
    hang = "kv.fs.hook = lambda call, path: threading.Event().wait() if call in ('datasync', 'pwritev') else None"
    took_s = run_and_forget(
        tmp_path, "assert store(space, prompt(0)).wait(60)", hang, "store(space, prompt(1))"
    )
    assert took_s < 30
    with opened(tmp_path) as kv:
        assert load_checked(kv.namespace(IDENTITY, MIXED), prompt(0))[0] == 320
