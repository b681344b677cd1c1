"""The process ends on its own while something computes: bounded, by its own exit code, and what was said is kept.

Every case is a real process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_helpers import comes_true
from tiny_models import byte_tokenizer, llama

from tieredkv.hf import ChatModel
from tieredkv.hf.stream import Answer, Generation, TextPieces

BEGIN = """
import os, sys, threading, time, torch
torch.set_num_threads(1)
sys.path.insert(0, {here!r})
import tieredkv
from tieredkv.hf import ChatModel
from tiny_models import byte_tokenizer, llama

tieredkv.cache._AT_EXIT_S = {at_exit_s}
budgets = dict(device_nbytes="16MiB", host_nbytes="8MiB", disk_nbytes="256MiB", block_size=16, device="cpu")
kv = tieredkv.open({store!r}, tieredkv.Config(**budgets, deadline_s=60))
model = llama()
chat = ChatModel(kv, model, byte_tokenizer())

def answering(name):
    answer = chat.session(name).send("Why?", max_new_tokens=900, do_sample=False)
    next(answer)
    return answer
"""


class Ended:
    """How a process ended that ran `code` behind `BEGIN`, with so long to end: a busy machine is not to matter."""

    def __init__(self, store: Path, code: str, at_exit_s: float = 60.0) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        begin = BEGIN.format(here=str(Path(__file__).parent), store=str(store), at_exit_s=at_exit_s)
        child = subprocess.Popen(
            [sys.executable, "-c", begin + code],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert child.stdout is not None
        self.told = child.stdout.readline().strip()
        began = time.monotonic()
        rest, self.errors = child.communicate(timeout=300)
        self.told += rest.strip()
        self.seconds = time.monotonic() - began
        self.code = child.returncode


def assert_kept(kv: Any, name: str) -> None:
    """The answer of that session ends where the process did, and is the model's own as far as that."""
    model = llama()
    with ChatModel(kv, model, byte_tokenizer()).session(name) as session:
        assert not session.interrupted and [m["role"] for m in session.messages] == ["user", "assistant"]
        tokens, asked = session.tokens.tolist(), session._record.turns[0].end
        ids = torch.tensor(np.array(tokens[:asked])[None])
        options: dict[str, Any] = {"max_new_tokens": len(tokens) - asked, "do_sample": False}
        assert model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist() == tokens


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("answers = [answering(name) for name in 'abc']; print('leaving', flush=True)", 0, "leaving"),
        ("for piece in answering('a'): print('leaving', flush=True); raise ValueError('mine')", 1, "leaving"),
        ("answer = answering('a'); print('leaving', flush=True); sys.exit(3)", 3, "leaving"),
    ],
    ids=["the end of its code", "an exception", "sys.exit"],
)
def test_what_was_said_is_kept(
    code: str, status: int, said: str, tmp_path: Path, open_kv: Callable[..., Any]
) -> None:
    ended = Ended(tmp_path / "store", code)
    assert (ended.code, ended.told) == (status, said), ended.errors
    assert ("ValueError: mine" in ended.errors) == (status == 1) and "terminate" not in ended.errors
    kv = open_kv()
    assert not kv.recovery.damage
    for row in kv.sessions():
        assert_kept(kv, row.name)
    assert len(kv.sessions()) == (3 if "abc" in code else 1)


def test_a_cache_that_is_closed_before_its_answers_ends_the_process_no_worse(tmp_path: Path) -> None:
    ended = Ended(tmp_path / "store", "answer = answering('a'); kv.close(); print('leaving', flush=True)")
    assert (ended.code, ended.told) == (0, "leaving"), ended.errors
    assert "not kept" in ended.errors and "Traceback" not in ended.errors


def test_a_forward_that_takes_long_is_not_waited_for_and_the_other_answer_is_kept(
    tmp_path: Path, open_kv: Callable[..., Any]
) -> None:
    code = """
answers, seen = [answering(name) for name in 'ab'], []
def hold(*_):
    seen.append(threading.get_ident())
    if seen[-1] == seen[0]: time.sleep(600)
model.register_forward_pre_hook(hold)
while not seen: time.sleep(0.01)
print('leaving', flush=True)
"""
    ended = Ended(tmp_path / "store", code, at_exit_s=8.0)
    assert (ended.code, ended.told) == (0, "leaving") and ended.seconds < 120, ended.errors
    kv = open_kv()
    num_turns = {row.name: len(row.turns) for row in kv.sessions()}
    assert sorted(num_turns.values()) == [1, 2], "what was asked is kept all the same"
    assert_kept(kv, max(num_turns, key=num_turns.__getitem__))


def test_a_prefetch_is_waited_for(tmp_path: Path, open_kv: Callable[..., Any]) -> None:
    large = {"num_hidden_layers": 8, "hidden_size": 256, "max_position_embeddings": 8192}
    kv = open_kv()
    with ChatModel(kv, llama(**large), byte_tokenizer()).session("a") as session:
        session.generate(torch.arange(4000)[None] % 250 + 5, max_new_tokens=2)
    kv.close()
    code = f"""
coming = ChatModel(kv, llama(**{large}), byte_tokenizer()).session('a').prefetch()
print('leaving', flush=True)
"""
    ended = Ended(tmp_path / "store", code)
    assert (ended.code, ended.told) == (0, "leaving"), ended.errors


def test_a_forked_child_ends_nothing_of_its_parent(tmp_path: Path, open_kv: Callable[..., Any]) -> None:
    code = """
from tieredkv.errors import Forked
answer = answering('a')
pid = os.fork()
if pid == 0:
    try: next(answer)
    except Forked: sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
answer.close()
kv.close()
"""
    ended = Ended(tmp_path / "store", code)
    assert (ended.code, ended.told, ended.errors) == (0, "5", "")
    assert_kept(open_kv(), "a")


def test_who_reads_and_who_ends_an_answer_end_it_once() -> None:
    reads, num_ended, ends = threading.Event(), list[int](), threading.Event()

    def call(streamer: Any, stop: Any) -> None:
        streamer.put(torch.tensor([[0]]))
        assert comes_true(stop.asked.is_set)

    def end(_generation: Generation) -> None:
        num_ended.append(1)
        assert ends.wait(60)

    generation = Generation(call)
    answer = Answer(generation, TextPieces(lambda ids: "x" * len(ids)), end)
    generation.start()

    def read() -> None:
        reads.set()
        list(answer)

    threads = [threading.Thread(target=read), threading.Thread(target=answer.close)]
    threads[0].start()
    assert reads.wait(60) and not answer.wait(0)
    answer.stop()
    assert answer.wait(60) and comes_true(lambda: len(num_ended) == 1)
    threads[1].start()
    assert threads[1].is_alive(), "whoever comes second waits until it is kept"
    ends.set()
    for thread in threads:
        thread.join(60)
    assert num_ended == [1]
