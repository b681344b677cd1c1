"""The benchmark runs, measures every row it names, and never calls a row met that it did not measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tieredkv

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

from bench import basics, child, equality, figures, workload  # noqa: E402


def run_tool(*arguments: str, directory: Path) -> dict[str, Any]:
    home = str(Path(tieredkv.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(TOOLS / "bench_spill.py"), *arguments, "--json", "--dir", str(directory)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": home},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_basics_measures_every_row_on_a_small_store(tmp_path: Path) -> None:
    found = run_tool("--basics", "--blocks", "1500", "--runs", "1", directory=tmp_path)
    rows = {row["name"]: row for row in found["figures"]}
    assert set(rows) == {
        "import_beyond_torch_s",
        "import_of_transformers_num",
        "restored_kv_differing_tensors_num",
        "open_1500_blocks_s",
        "open_1500_blocks_anonymous_mib",
        "lookup_32768_tokens_over_sha256_ratio",
    }
    for name, row in rows.items():
        assert row["value"] is not None, f"{name}: {row['detail']}"
        assert row["must"], name
    assert rows["import_of_transformers_num"]["met"]
    assert rows["restored_kv_differing_tensors_num"]["met"]
    assert found["machine"]["file_system"] != "unknown"
    assert not list(tmp_path.iterdir()), "the store is removed"


def test_a_figure_without_a_value_is_not_met() -> None:
    assert figures.unmeasured("x_s", "<= 1", "why").met is None
    assert figures.at_most("x_s", 1.0, 1.0).met
    assert not figures.at_most("x_s", 1.01, 1.0).met
    assert figures.at_most("x_percent", 3.4, 3.0, spread=0.5).met
    assert figures.at_most("x_percent", 3.6, 3.0, spread=0.5).met is False
    assert figures.at_most("x_percent", 3.6, 3.0, spread=3.1).met is None
    assert figures.at_most("x_percent", 2.9, 3.0, spread=3.1).met
    assert figures.at_least("x_ratio", 0.88, 0.9, spread=0.03).met
    assert figures.at_least("x_ratio", 0.86, 0.9, spread=0.03).met is False
    assert figures.at_least("x_ratio", 0.86, 0.9, spread=0.4).met is None
    assert figures.at_least("x_ratio", 0.91, 0.9, spread=0.4).met
    assert not figures.none_of("x_num", 1).met


def test_an_opening_that_lost_blocks_is_no_figure() -> None:
    whole = {
        "num_blocks": 10,
        "num_parts": 20,
        "num_replayed": 0,
        "seconds": 0.1,
        "cpu_s": 0.1,
        "anonymous_nbytes": 1,
    }
    replayed = whole | {"num_replayed": 20}
    good = list(basics._opening({"log": [replayed], "checkpoint": [whole]}, 10, 1))
    assert [row.met for row in good] == [True, True]
    for bad in (whole | {"num_blocks": 9}, whole | {"num_replayed": 3}):
        assert [r.met for r in basics._opening({"log": [replayed], "checkpoint": [bad]}, 10, 1)] == [
            None,
            None,
        ]


def test_a_changed_bit_is_seen(tmp_path: Path) -> None:
    of, num_tokens = equality.layout(), 8 * equality.BLOCK_SIZE
    ids, stored = workload.tokens(1, num_tokens + 1), workload.kv(1, num_tokens + 1, of)
    config = tieredkv.Config(device_nbytes="8MiB", host_nbytes=0, disk_nbytes="64MiB", block_size=32)
    with tieredkv.open(tmp_path / "store", config) as cache:
        space = cache.namespace(workload.IDENTITY, of)
        assert space.store(ids, stored, anchors=[num_tokens]).num_new == 8
        with space.load(ids) as prefix:
            assert equality.compare(prefix, stored) == (0, 10)
            k = stored[0][0]
            k.view(torch.uint8)[0, 5, 3] ^= 1
            assert equality.compare(prefix, stored) == (1, 10)


def test_a_failed_child_says_why() -> None:
    with pytest.raises(child.ChildFailed, match="compare_restarted"):
        child.run(equality.compare_restarted, path="/proc/nowhere")
