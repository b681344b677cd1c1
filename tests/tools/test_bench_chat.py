"""The chat benchmark measures what it names, counts fairly, and never calls a row met that it did not measure."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tieredkv

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "hf")]

import tiny_models  # noqa: E402
from bench.progress import Progress  # noqa: E402
from chatting import breaking_even, conversations, decoding, long_session, ratios, restart, restoring, rows  # noqa: E402
from chatting.setting import Setting, load, opened, prompt  # noqa: E402
from rich.console import Console  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from tieredkv import speeds  # noqa: E402

BUDGETS = {"device_nbytes": "16MiB", "disk_nbytes": "256MiB"}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _always_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model as small as this computes as fast as a disk reads: which is chosen would depend on the machine."""
    monkeypatch.setattr(speeds, "_LEAST_GAIN_S", 3600.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.gemma3(window=64, max_position_embeddings=16384).save_pretrained(folder)
    tiny_models.byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def setting(tmp_path: Path, model: Path) -> Setting:
    return Setting(tmp_path, model, Progress(Console(stderr=True)), 1, None, 20)


def silent(**_word: Any) -> None:
    pass


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(tieredkv.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bench_chat.py"), *arguments],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip


def test_one_group_of_rows_runs_as_people_run_it(tmp_path: Path, model: Path) -> None:
    done = run_tool(
        "--only", "restore", "--runs", "1", "--json", "--model", str(model), "--dir", str(tmp_path)
    )
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    figures = {row["name"]: row for row in found["figures"]}
    assert set(figures) == {
        "restore_8k_over_raw_read_ratio", "restore_8k_over_safetensors_ratio", "restore_8k_first_ms",
    }  # fmt: skip
    assert all(row["value"] is not None and row["must"] for row in figures.values())
    assert found["machine"]["file_system"] != "unknown"
    assert not list(tmp_path.iterdir()), "what was written is removed"


def test_an_unknown_group_is_refused_with_the_known_ones() -> None:
    done = run_tool("--only", "nothing")
    assert done.returncode == 2
    assert "conversations" in done.stderr


def test_quick_is_a_part_of_all() -> None:
    assert set(rows.QUICK) < set(rows.ALL)


def test_a_ratio_is_met_at_its_limit_and_the_spread_of_its_rounds() -> None:
    assert ratios.paired([2.0, 3.0], [1.0, 2.0]) == [2.0, 1.5]
    assert ratios.ratio_at_most("x_ratio", [0.9, 1.02, 1.1], 1.0, "").met
    assert ratios.ratio_at_most("x_ratio", [1.02, 1.02, 1.02], 1.0, "").met is False
    assert ratios.ratio_at_least("x_ratio", [0.9, 0.98, 1.1], 1.0, "").met
    assert ratios.ratio_at_least("x_ratio", [0.98, 0.98, 0.98], 1.0, "").met is False


# Conversations


def test_the_ideal_counts_whole_blocks_ever_seen_and_at_least_one_token() -> None:
    ideal, ids = conversations.Ideal(16), np.arange(70, dtype=np.int32)
    assert ideal.num_computed(ids[:40]) == 40
    assert ideal.num_computed(ids[:40]) == 8  # two whole blocks of it were seen
    assert ideal.num_computed(ids[:32]) == 1
    assert ideal.num_computed(ids) == 38
    other = ids.copy()
    other[20] += 1
    assert ideal.num_computed(other) == 54
    assert ideal.num_computed(ids) == 6


def test_a_prompt_goes_on_from_the_one_before() -> None:
    messages = [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Yes?"),
        ("tool", "{}"),
        ("assistant", "So"),
    ]
    first, second = conversations.prompts(messages, tiny_models.byte_tokenizer())
    assert len(first) < len(second)
    assert (second[: len(first)] == first).all()


def test_conversations_take_turns_and_the_next_begins_where_one_ends() -> None:
    prompts = [[np.full(n + 1, c, np.int32) for n in range(1 + c % 2)] for c in range(10)]
    order = [request.conversation for request in conversations.schedule(prompts)]
    assert order == [0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 9, 3, 5, 7, 9]


def test_bytes_of_all_count_shared_blocks_once_and_a_window_for_each_end() -> None:
    layout = restoring.layout_of(tiny_models.gemma3(window=8), 16)
    full, window = layout.part_nbytes
    shared, one, other = np.arange(32), np.arange(100, 120), np.arange(200, 220)
    requests = [
        conversations.Request(c, np.concatenate([shared, tail]).astype(np.int32))
        for c, tail in enumerate((one, other))
    ]
    assert conversations.needed_by_all(layout, requests) == 4 * full + 2 * window


def test_a_replay_with_a_restart_computes_hardly_more_than_the_ideal(tmp_path: Path, model: Path) -> None:
    rng = np.random.default_rng(7)

    def words(count: int) -> str:
        return " ".join(map(str, rng.integers(0, 1000, count)))

    system = words(150)
    with gzip.open(tmp_path / conversations.FILE, "wt") as lines:
        for _ in range(9):
            said = [(role, words(12)) for _ in range(4) for role in ("user", "assistant")]
            lines.write(json.dumps({"msgs": [("system", system), *said]}) + "\n")
    common = {
        "model": str(model), "data": str(tmp_path), "path": str(tmp_path / "store"), "num_conversations": 9,
        "die": False,
    }  # fmt: skip
    parts = [conversations.replay(silent, start=a, stop=b, **common) for a, b in ((0.0, 0.5), (0.5, 1.0))]
    assert [part["num_requests"] for part in parts] == [18, 18]
    computed, ideal = (sum(part[key] for part in parts) for key in ("num_computed", "num_ideal"))
    # the second session cannot know where the system message ends: it computes it once more
    assert ideal <= computed <= 1.05 * ideal + len(system) + 16, parts
    assert parts[1]["by_tier"].get("disk"), "after the restart everything comes from disk first"


def test_without_the_conversations_nothing_is_claimed(setting: Setting) -> None:
    assert [row.met for row in conversations.figures(setting)] == [None, None]


# Rivals


def test_a_saved_stock_cache_goes_on_as_if_it_had_never_left(tmp_path: Path, model: Path) -> None:
    live, tokenizer = load(model)
    ids = torch.tensor([prompt(tokenizer, 200, "saved")])
    stock = DynamicCache(config=live.config)
    with torch.inference_mode():
        live(ids[:, :-1], **{restart.cache_name(live): stock})
        restart.save_cache(stock, str(tmp_path / "saved.safetensors"))
        wanted = live(ids[:, -1:], **{restart.cache_name(live): stock}).logits
        again = restart.load_cache(live, str(tmp_path / "saved.safetensors"), 199)
        found = live(ids[:, -1:], **{restart.cache_name(live): again}).logits
    assert torch.equal(found, wanted)


def test_the_saved_cache_of_random_states_has_the_bytes_of_a_real_one(model: Path) -> None:
    live, tokenizer = load(model)
    layout, num_tokens = restoring.layout_of(live), 320
    kv = restoring.workload.kv(0, num_tokens, layout)
    made = restoring.stock_cache(live, layout, kv, num_tokens - 1)
    real = decoding._prefilled(live, torch.tensor([prompt(tokenizer, num_tokens, "real")]))
    for one, other in zip(made.layers, real.layers, strict=True):
        assert one.keys.shape == other.keys.shape
        assert one.values.dtype == other.values.dtype


def test_a_hit_is_all_that_was_stored_loaded_or_chosen_to_be_computed(
    setting: Setting, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = list(breaking_even.LENGTHS[:3])
    taken = breaking_even.take_turns(silent, str(model), str(tmp_path / "even"), lengths, 1)["rounds"]
    assert [taken[str(n)]["hit"] for n in lengths] == [[True]] * 3
    assert [taken[str(n)]["computed"] for n in lengths] == [[False]] * 3
    rounds = {
        str(n): {"cold_s": [1.0] * 3, "hit_s": [0.5, 0.9, 0.7], "hit": [True] * 3, "computed": [n < 100] * 3}
        for n in breaking_even.LENGTHS
    }
    monkeypatch.setattr(breaking_even.child, "run", lambda *_job, **_arguments: {"rounds": rounds})
    ratio, shortest = breaking_even.figures(setting)
    assert (ratio.value, ratio.met, shortest.value) == (0.7, True, 33)
    assert "computed again 6 of 21 times" in ratio.detail
    rounds["64"]["hit"][1] = False
    (ratio,) = breaking_even.figures(setting)
    assert ratio.value is None and ratio.met is None and "[64]" in ratio.detail


def test_speed_leaves_out_the_prompt_and_its_first_token() -> None:
    times = decoding.Times()
    times.at = [0.0, 10.0, 10.5, 11.0]
    assert times.tokens_s == 2.0


# The long session


def test_a_boundary_that_is_gone_is_told(tmp_path: Path, model: Path) -> None:
    live, tokenizer = load(model)
    ids = np.array(prompt(tokenizer, 512, "gone"), dtype=np.int32)
    with (
        opened(str(tmp_path / "store"), live, tokenizer, **BUDGETS) as chats,
        chats.session("one") as session,
    ):
        conversations._forward(live, session, ids)
        assert long_session._resumed(chats.space, ids, 480) == 480
        assert long_session._resumed(chats.space, ids, 256) == 0
