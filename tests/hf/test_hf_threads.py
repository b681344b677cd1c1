"""Any number of sessions of one model, each in a thread of its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from core_helpers import comes_true
from tiny_models import FAMILIES, RECURRENT, llama

from tieredkv.hf import ChatModel, capture, live_model

ALL = {**FAMILIES, **RECURRENT}
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(autouse=True)
def many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(acts: list[Callable[[], None]]) -> None:
    """Each in a thread of its own; the first failure is raised."""
    failures: list[BaseException] = []

    def run(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    if failures:
        raise failures[0]


class ToldLock:
    """A lock that tells of everybody who wants it."""

    def __init__(self) -> None:
        self.num_asked = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self.num_asked += 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_conversations_in_threads_are_what_they_are_alone(
    name: str, open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model, kv = ALL[name](), open_kv()
    chat = ChatModel(kv, model, tokenizer)
    answers: dict[str, list[list[int]]] = {}

    def talk(mine: str) -> None:
        answers[mine] = []
        for text in ("Is it raining?", "And in winter?", "Why?"):
            with chat.session(mine, system="You answer in few words and never guess.") as session:
                "".join(session.send(f"{mine} {text}", **GREEDY))
                answers[mine].append(session.tokens.tolist())
            kv.stats()

    in_threads([lambda mine=f"chat {n}": talk(mine) for n in range(4)])
    kv.check()
    for said in answers.values():
        for tokens in said:
            ids = torch.tensor(np.array(tokens[: -GREEDY["max_new_tokens"]])[None])
            assert model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0].tolist() == tokens


def test_a_model_is_hooked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lock, registered = llama(), ToldLock(), list[int]()
    register = model.register_forward_pre_hook

    def with_company(*args: Any, **named: Any) -> Any:
        registered.append(1)
        assert comes_true(lambda: lock.num_asked == 2 or len(registered) == 2), "nobody else came"
        return register(*args, **named)

    monkeypatch.setattr(capture, "_hooking", lock)
    monkeypatch.setattr(model, "register_forward_pre_hook", with_company)
    in_threads([lambda: capture.watch(model)] * 2)
    assert len(model._forward_pre_hooks) == 1


def test_a_cache_made_while_the_model_is_described_is_all_old_or_all_new(
    open_kv: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv, model = open_kv(), llama()
    live = ChatModel(kv, model, tokenizer)._live
    seen = []

    def look() -> None:
        cache = live.new_cache()
        seen.append(cache.facts.identity.digest(cache.facts.layout) == cache.space.digest)

    make = kv.namespace
    monkeypatch.setattr(kv, "namespace", lambda *args: look() or make(*args))
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    live.refresh()
    look()
    assert seen == [True, True]


def test_a_rehash_is_not_lost_to_a_thread_that_reads_the_model_just_then(
    open_kv: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    live = ChatModel(open_kv(), model, tokenizer)._live
    lock = live._lock = ToldLock()  # type: ignore[assignment]
    read, has_read, goes_on = live_model.read_model, threading.Event(), threading.Event()

    def slowly(*args: Any) -> Any:
        facts = read(*args)
        has_read.set()
        assert goes_on.wait(60)
        return facts

    def change() -> None:
        assert has_read.wait(60)
        model.lm_head.weight.data.mul_(3.0)
        live.rehash()

    def let_go() -> None:
        try:
            assert comes_true(lambda: lock.num_asked == 2)
        finally:
            goes_on.set()

    monkeypatch.setattr(live_model, "read_model", slowly)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    in_threads([live.refresh, change, let_go])
    assert live.facts.identity.weights == read(llama_like(model), live.block_size).identity.weights


def llama_like(model: Any) -> Any:
    """Another model with the same weights, of which nothing is remembered."""
    other = llama()
    other.load_state_dict(model.state_dict())
    return other
