"""Load or recompute: learned from what is done anyway, kept over a restart, never wrong, and told."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import HookedFs
from tiny_models import byte_tokenizer, gemma3, llama, prompt
from typer.testing import CliRunner

from tieredkv import Config, TieredCache
from tieredkv.audit.report import fsck
from tieredkv.cache import open_cache
from tieredkv.cli.app import app
from tieredkv.hf import ChatModel
from tieredkv.hf.gate import Choice, Gate, device_name
from tieredkv.hf.restore import Restored
from tieredkv.outcomes import Lookup, Reason
from tieredkv.speeds import SPEEDS, Sample, read_speeds

NUM_TOKENS, FOUND = 600, 592
RECOMPUTED = str(Reason.RECOMPUTED)


@pytest.fixture
def always_load() -> None:
    """These tests let the gate choose."""


class SlowDisk(HookedFs):
    """Reads of slabs take `wait_s` longer; `refused` names what fails."""

    def __init__(self) -> None:
        super().__init__(self._wait)
        self.wait_s = 0.0
        self.refused = ""

    def _wait(self, operation: str, path: str) -> None:
        if self.refused and path.endswith(self.refused):
            raise OSError(5, "refused")
        if self.wait_s and operation == "preadv" and "/slabs/" in path:
            time.sleep(self.wait_s)


class Place:
    """A store in a folder on a disk that may be slow, and one model; every `opened` is a restart."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.folder, self.model, self.fs = folder, model, SlowDisk()

    def opened(self, **config: Any) -> TieredCache:
        budgets = {"device_nbytes": "64MiB", "host_nbytes": 0, "disk_nbytes": "256MiB", "deadline_s": 20.0}
        return open_cache(
            self.folder, Config(block_size=16, device="cpu", **{**budgets, **config}), fs=self.fs
        )

    def chat(self, kv: TieredCache) -> ChatModel:
        return ChatModel(kv, self.model, byte_tokenizer())

    def say(self, chat: ChatModel, name: str, ids: torch.Tensor, keep: bool = False) -> Any:
        """Ask, see that the answer is the model's own, and tell what it cost."""
        with chat.session(name) as session:
            out = self.model.generate(**session.attach(ids), max_new_tokens=4, do_sample=False)
            assert torch.equal(out, self.model.generate(ids, max_new_tokens=4, do_sample=False))
            if keep:
                session.commit(out)
            return session.last_explain

    def fill(self, num_prompts: int) -> None:
        """Prompts 0, 1, ... are stored, and how long they take to compute is known."""
        with self.opened() as kv:
            chat = self.chat(kv)
            for seed in range(num_prompts):
                self.say(chat, f"first {seed}", prompt(NUM_TOKENS, seed), keep=True)

    def resume(self, seeds: range, **config: Any) -> list[Any]:
        """What each prompt costs in one process that has none of them in memory."""
        with self.opened(**config) as kv:
            chat = self.chat(kv)
            found = [self.say(chat, f"again {seed}", prompt(NUM_TOKENS, seed)) for seed in seeds]
            kv.check()
            return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "store", llama(num_hidden_layers=8, hidden_size=128))


SLOW_S = 0.5


def test_a_slow_disk_is_learned_kept_and_left_alone_until_it_is_fast_again(place: Place) -> None:
    place.fill(30)
    place.fs.wait_s = SLOW_S
    learning = place.resume(range(4))
    assert [e.by_tier for e in learning] == [*[{"disk": FOUND}] * 3, {}]
    assert [e.choice.restore_s is None for e in learning] == [True] * 3 + [False]
    last = learning[-1]
    assert last.reason == RECOMPUTED and last.reused_tokens == 0 and last.choice.num_found == FOUND
    assert last.choice.restore_s > SLOW_S / 2 > last.choice.compute_s > 0
    assert "computed: that is sooner" in str(last) and "loading takes about" in str(last)

    kept = place.resume(range(4, 11))
    assert [e.by_tier for e in kept] == [{}] * 6 + [{"disk": FOUND}], "known at once, and tried at the eighth"
    assert kept[-1].choice.is_trial and "of 8 times one loads" in str(kept[-1])

    assert [e.reused_tokens for e in place.resume(range(11, 18))] == [0] * 7, "it was as slow as before"
    place.fs.wait_s = 0.0
    again = place.resume(range(18, 22))
    assert [e.reused_tokens for e in again] == [FOUND] * 4 and again[0].choice.is_trial
    assert again[1].choice.restore_s is None, "what was known of the disk is forgotten: it changed"
    assert [e.choice.why for e in place.resume(range(22, 24))] == ["that is soonest, or as soon"] * 2


def test_choices_are_counted_and_what_is_stored_stays_as_it_is(place: Place) -> None:
    place.fill(5)
    place.fs.wait_s = SLOW_S
    place.resume(range(3))
    with place.opened() as kv:
        chat, before = place.chat(kv), kv.stats()
        ids = prompt(NUM_TOKENS, 3)
        with chat.session("first 3") as session:
            foretold = session.explain()
            assert foretold.by_tier == {"disk": FOUND} and foretold.choice.num_tokens == 0
            assert kv.stats().counters.get("recomputed_prompts", 0) == 0, "asking is no choice"
        assert place.say(chat, "again", ids, keep=True).reused_tokens == 0
        assert kv.stats().counters["recomputed_prompts"] == 1
        assert kv.stats().counters["recomputed_tokens"] == FOUND
        assert kv.stats().num_blocks == before.num_blocks and kv.stats().num_pins == 0
        with chat.session("again") as session:
            longer = torch.cat([torch.tensor(session.tokens[None].astype("int64")), prompt(40, 99)], dim=1)
        place.say(chat, "again", longer, keep=True)
    assert fsck(place.folder).exit_code == 0
    place.fs.wait_s = 0.0
    (place.folder / SPEEDS).unlink()
    with place.opened() as kv:
        assert place.say(place.chat(kv), "all of it", longer).by_tier == {"disk": longer.shape[1] // 16 * 16}


def test_a_session_goes_on_from_what_it_has_rather_than_wait_for_a_slow_disk(place: Place) -> None:
    place.fill(4)
    place.fs.wait_s = SLOW_S
    place.resume(range(3))
    with place.opened() as kv:
        chat, ids = place.chat(kv), prompt(NUM_TOKENS, 3)
        with chat.session("s") as session:
            session.commit(place.model.generate(**session.attach(ids[:, :300]), max_new_tokens=1))
            out = place.model.generate(**session.attach(ids), max_new_tokens=4, do_sample=False)
            assert torch.equal(out, place.model.generate(ids, max_new_tokens=4, do_sample=False))
            explain = session.last_explain
            assert explain.by_tier == {"session": 300} and explain.reason == RECOMPUTED


def test_a_prefetch_from_a_slow_disk_is_not_waited_for_where_computing_is_sooner(place: Place) -> None:
    place.fill(4)
    place.fs.wait_s = SLOW_S
    place.resume(range(3))
    reads, plain = threading.Event(), place.fs.hook
    with place.opened() as kv:
        chat = place.chat(kv)
        with chat.session("first 3") as session:
            ids = torch.tensor(session.tokens[None].astype("int64"))
            place.fs.hook = lambda operation, path: operation != "preadv" or reads.wait(60) or None
            coming = session.prefetch()
            out = place.model.generate(**session.attach(ids), max_new_tokens=4, do_sample=False)
            assert not coming.done and coming.cancelled, "its reads hang until here"
            assert torch.equal(out, place.model.generate(ids, max_new_tokens=4, do_sample=False))
            assert session.last_explain.reason == RECOMPUTED
            reads.set()
            place.fs.hook = plain
            assert coming.wait(60) and coming.num_tokens == 0 and kv.stats().num_pins == 0
            session.commit(out)


def test_a_head_in_memory_is_loaded_and_the_tail_on_a_slow_disk_computed(place: Place) -> None:
    place.fill(4)
    place.fs.wait_s = SLOW_S
    place.resume(range(3))
    with place.opened() as kv:
        chat = place.chat(kv)
        ids = prompt(NUM_TOKENS, 3)
        gate = chat._live.gate
        for _ in range(3):
            gate.note_restore(Restored(FOUND, {"device": FOUND}, "complete", "", 0.001))
        with chat._live.space.load(ids[0, : 20 * 16 + 1].numpy()):
            pass
        assert chat._live.space.lookup(ids[0].numpy()).by_tier == {"device": 320, "disk": FOUND - 320}
        explain = place.say(chat, "again", ids)
        assert explain.by_tier == {"device": 320} and explain.reason == RECOMPUTED
        assert "320 of 592 loaded" in str(explain)
        assert kv.stats().counters["recomputed_tokens"] == FOUND - 320


def test_windows_are_recomputed_whole_and_restored_whole(tmp_path: Path) -> None:
    place = Place(tmp_path / "store", gemma3(window=40, num_hidden_layers=4))
    place.fill(5)
    place.fs.wait_s = SLOW_S
    assert [e.reused_tokens for e in place.resume(range(4))] == [FOUND] * 3 + [0]
    with place.opened() as kv:
        assert place.say(place.chat(kv), "again", prompt(NUM_TOKENS, 4), keep=True).reused_tokens == 0
    place.fs.wait_s = 0.0
    (place.folder / SPEEDS).unlink()
    assert [e.by_tier for e in place.resume(range(5))] == [{"disk": FOUND}] * 5


def test_a_disk_that_does_not_answer_in_time_counts_for_as_slow_as_that(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tieredkv.mover._READS_OFF_S", 3600.0)  # it is left alone for the rest of this test
    place.fill(4)
    place.fs.wait_s = 1.5
    with place.opened(deadline_s=0.3) as kv:
        chat = place.chat(kv)
        explain = place.say(chat, "late", prompt(NUM_TOKENS, 0))
        assert explain.reason == str(Reason.TIMED_OUT)
        restores = chat._live.gate._speeds.restores["disk"].samples
        assert len(restores) == 1 and restores[0][1] >= 0.3
        assert place.say(chat, "left alone", prompt(NUM_TOKENS, 1)).reason == str(Reason.TIMED_OUT)
        assert len(restores) == len(chat._live.gate._speeds.restores["disk"].samples), (
            "said at once: nothing learned"
        )


# What is kept


def damaged(path: Path, how: str) -> None:
    raw = bytearray(path.read_bytes())
    if how == "flipped":
        raw[len(raw) // 2] ^= 4
    path.write_bytes({"cut": raw[:-9], "empty": b"", "foreign": b"x" * 5000}.get(how, raw))
    if how == "gone":
        path.unlink()


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "foreign", "gone"])
def test_damage_is_learned_again(how: str, tmp_path: Path) -> None:
    place = Place(tmp_path / "store", llama())
    place.fill(4)
    assert (place.folder / SPEEDS).stat().st_mode & 0o777 == 0o600
    damaged(place.folder / SPEEDS, how)
    with place.opened() as kv:
        chat = place.chat(kv)
        assert kv.stats().counters.get("speeds_errors", 0) == (how != "gone") and kv.health().ok
        assert not chat._live.gate._speeds.prefill.samples
        for seed in range(4):
            assert place.say(chat, f"again {seed}", prompt(NUM_TOKENS, seed)).reused_tokens == FOUND
    with place.opened() as kv:
        known = place.chat(kv)._live.gate._speeds
        assert "speeds_errors" not in kv.stats().counters and len(known.restores["disk"].samples) == 4


def test_a_store_of_nothing_else_is_a_new_store(tmp_path: Path) -> None:
    place = Place(tmp_path / "store", llama())
    place.fill(1)
    for name in ("wal", "slabs"):
        for path in (place.folder / name).iterdir():
            path.unlink()
    for path in place.folder.glob("table-*"):
        path.unlink()
    with place.opened() as kv:
        assert kv.recovery.new_store and place.say(place.chat(kv), "s", prompt(40)).reused_tokens == 0


def test_what_cannot_be_kept_costs_nothing_else(tmp_path: Path) -> None:
    place = Place(tmp_path / "store", llama())
    place.fs.refused = f"{SPEEDS}.tmp"
    with place.opened() as kv:
        place.say(place.chat(kv), "s", prompt(NUM_TOKENS), keep=True)
        assert kv.stats().counters["speeds_errors"] == 1 and kv.health().ok
    assert not [path for path in place.folder.iterdir() if SPEEDS in path.name]
    with place.opened(disk_nbytes=0) as kv:
        place.say(place.chat(kv), "s", prompt(NUM_TOKENS), keep=True)
        assert "speeds_errors" not in kv.stats().counters
    assert not (place.folder / SPEEDS).exists()


def test_a_file_system_that_hangs_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    place, hangs = Place(tmp_path / "store", llama()), threading.Event()
    with place.opened(deadline_s=0.2) as kv:
        plain, hung = place.fs.hook, lambda _operation, path: SPEEDS not in path or hangs.wait(60) or None
        chat, place.fs.hook = place.chat(kv), hung
        for name in "ab":
            place.say(chat, name, prompt(NUM_TOKENS))
        assert not (place.folder / SPEEDS).exists(), "both returned while it hung"
        (place.folder / SPEEDS).touch()
        assert not place.chat(kv)._live.gate._speeds.prefill.samples, "nor is reading it waited for"
        (place.folder / SPEEDS).unlink()
        writer = chat._live.gate._writer
        assert writer is not None and writer.is_alive()
        place.fs.hook = plain
        hangs.set()
        writer.join(30)
        assert not writer.is_alive() and (place.folder / SPEEDS).exists()


# Several threads


def test_any_number_of_threads_keep_what_they_learned(place: Place) -> None:
    """Two models, whose gates have one file, and several sessions of each that end at the same time."""
    with place.opened() as kv:
        gates = [place.chat(kv)._live.gate, ChatModel(kv, place.model, byte_tokenizer(), salt="b")._live.gate]
        failures: list[BaseException] = []

        def end_sessions(gate: Gate) -> None:
            try:
                for _ in range(40):
                    gate.note_forwards([Sample(0, NUM_TOKENS, 0.1)])
                    gate.save()
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=end_sessions, args=(gate,)) for gate in gates * 4]
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
        finally:
            sys.setswitchinterval(before)
        assert not failures and "speeds_errors" not in kv.stats().counters
        assert {gate._key for gate in gates} == read_speeds(kv.fs, kv.path).keys()


def test_what_is_learned_while_another_saves_is_kept_too(place: Place) -> None:
    with place.opened(deadline_s=60) as kv:
        gate, goes_on, writes = place.chat(kv)._live.gate, threading.Event(), threading.Event()

        def hold(operation: str, path: str) -> None:
            if operation == "rename" and SPEEDS in path:
                writes.set()
                assert goes_on.wait(60)

        place.fs.hook = hold
        gate.note_forwards([Sample(0, 10, 0.1), Sample(0, 10, 0.1)])
        savers = [threading.Thread(target=gate.save)]
        savers[0].start()
        assert writes.wait(60)
        gate.note_forwards([Sample(0, 500, 0.5)])
        savers.append(threading.Thread(target=gate.save))
        savers[1].start()
        goes_on.set()
        for saver in savers:
            saver.join(60)
        kept = read_speeds(kv.fs, kv.path)[gate._key].prefill.samples
        assert Sample(0, 500, 0.5) in kept and gate._writer is None


def test_no_thread_to_write_with_is_no_failure_of_a_session(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with place.opened() as kv:
        gate = place.chat(kv)._live.gate
        gate.note_forwards([Sample(0, 10, 0.1)])
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            gate.save()
        assert kv.stats().counters["speeds_errors"] == 1 and not (place.folder / SPEEDS).exists()
        gate.save()
        assert (place.folder / SPEEDS).exists(), "it is still new"


# What is told


def test_the_command_tells_what_a_resume_should_take(place: Place) -> None:
    place.fill(5)
    place.fs.wait_s = SLOW_S
    place.resume(range(3))

    def told() -> dict[str, Any]:
        done = CliRunner().invoke(app, ["explain", str(place.folder), "first 4", "--json"])
        assert done.exit_code == 0, done.output
        (expected,) = json.loads(done.stdout.splitlines()[-1])["expected"]
        assert expected["device"] == device_name(torch.device("cpu"))
        return dict(expected)

    expected = told()
    assert expected["restore_s"] > SLOW_S / 2 > expected["compute_s"] > 0 and not expected["is_loaded"]
    shown = CliRunner().invoke(app, ["explain", str(place.folder), "first 4"], env={"COLUMNS": "200"})
    assert "would be computed again" in shown.stdout
    damaged(place.folder / SPEEDS, "flipped")
    done = CliRunner().invoke(app, ["explain", str(place.folder), "first 4", "--json"])
    assert json.loads(done.stdout.splitlines()[-1])["expected"] == []


# The choice alone, from made-up measurements


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[ChatModel]:
    place = Place(tmp_path / "store", llama())
    with place.opened() as kv:
        yield place.chat(kv)


def choose(chat: ChatModel, restore_s: float, compute_s: float) -> Callable[[], Choice]:
    """The gate of `chat`, once it has seen restores and forwards that took so long."""
    gate, tokens = chat._live.gate, prompt(NUM_TOKENS)[0].numpy().astype("int32")
    gate.note_forwards([Sample(0, NUM_TOKENS, compute_s)] * 4)
    for _ in range(3):
        gate.note_restore(Restored(FOUND, {"disk": FOUND}, "complete", "", restore_s))
    return lambda: gate.choose(tokens, Lookup(FOUND, {"disk": FOUND}, Reason.COMPLETE))


@pytest.mark.parametrize(
    ("restore_s", "compute_s", "is_loaded"),
    [(0.1, 1.0, True), (1.0, 0.1, False), (1.0, 0.95, True), (0.006, 0.003, True), (0.5, 0.4, False)],
)
def test_computing_is_chosen_where_it_is_clearly_sooner(
    restore_s: float, compute_s: float, is_loaded: bool, chat: ChatModel
) -> None:
    choice = choose(chat, restore_s, compute_s)()
    assert choice.num_tokens == (FOUND if is_loaded else 0)
    assert choice.restore_s == pytest.approx(restore_s)
    assert choice.compute_s == pytest.approx(compute_s, rel=0.02)


def test_a_trial_that_is_as_slow_as_foretold_changes_nothing(chat: ChatModel) -> None:
    ask = choose(chat, 1.0, 0.1)
    gate, hit = chat._live.gate, Lookup(FOUND, {"disk": FOUND}, Reason.COMPLETE)
    for _ in range(3):
        assert [ask().is_trial for _ in range(7)] == [False] * 7
        trial = ask()
        assert trial.is_trial and trial.num_tokens == FOUND
        gate.note_restore(Restored(FOUND, {"disk": FOUND}, "complete", "", 1.1), hit, trial)
    assert chat._live.kv.stats().counters["tried_restores"] == 3


def test_what_failed_its_check_teaches_nothing(chat: ChatModel) -> None:
    gate = chat._live.gate
    for reason in (Reason.CORRUPT, Reason.SUPERSEDED):
        gate.note_restore(Restored(16, {"disk": 16}, str(reason), "", 9.0))
    gate.note_restore(Restored(0, {}, str(Reason.EVICTED), "", 9.0))
    assert not gate._speeds.restores["disk"].samples


def test_the_next_opening_in_a_process_learns_from_its_first_forward(tmp_path: Path) -> None:
    place = Place(tmp_path / "store", llama(num_hidden_layers=3))
    for num_opened in range(3):
        place.fill(1)
        with place.opened() as kv:
            assert len(place.chat(kv)._live.gate._speeds.prefill.samples) == num_opened
            for space in list(kv._spaces.values()):
                kv.purge(space)


def test_another_number_of_threads_is_another_device(tmp_path: Path) -> None:
    place = Place(tmp_path / "store", llama())
    place.fill(4)
    with place.opened() as kv:
        assert place.chat(kv)._live.gate._speeds.prefill.samples
    torch.set_num_threads(2)
    try:
        with place.opened() as kv:
            assert not place.chat(kv)._live.gate._speeds.prefill.samples
    finally:
        torch.set_num_threads(1)
