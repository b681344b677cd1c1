"""What the spill benchmark says of its numbers: percentiles, workloads, hit rates, the report and the options."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

from bench import child, figures, hits, report, sheet, tiers, traces  # noqa: E402
from bench.percentile import percentiles_ms  # noqa: E402
from bench.plan import Plan  # noqa: E402
from bench.progress import Progress  # noqa: E402
from rich.console import Console  # noqa: E402


def test_percentiles_are_times_that_were_measured() -> None:
    assert percentiles_ms([number / 1e3 for number in range(100, 0, -1)]) == (50.0, 95.0, 99.0)
    assert percentiles_ms([0.002]) == (2.0, 2.0, 2.0)


# ---- workloads -----------------------------------------------------------------------------------


def test_built_in_workloads_are_the_same_every_time_and_chain_their_prefixes() -> None:
    made = traces.all_workloads(None, quick=False)
    assert made == traces.all_workloads(None, quick=False)
    assert [one.name for one in made] == [
        "one long chat", "many chats with idle gaps", "shared system prompt", "scan",
    ]  # fmt: skip
    for one in made:
        parents: dict[int, int | None] = {}
        for request in one.requests:
            for parent, block in zip((None, *request), request, strict=False):
                assert parents.setdefault(block, parent) == parent, (
                    f"{one.name}: block {block} has two parents"
                )
        assert 0.2 < one.ideal() < 1, f"{one.name}: {one.ideal()}"


def test_a_scan_is_never_asked_for_again() -> None:
    seen: dict[int, int] = {}
    for request in traces.scan(200).requests:
        for block in request:
            seen[block] = seen.get(block, 0) + 1
    scanned = [count for block, count in seen.items() if block >= 1 << 24]
    assert len(scanned) > 500 and set(scanned) == {1}


def test_a_real_trace_is_read_from_its_folder_or_its_file(tmp_path: Path) -> None:
    path = tmp_path / traces.MOONCAKE[0]
    lines = [{"timestamp": n, "hash_ids": [0, n, n + 100]} for n in range(1, 9)]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    for given in (tmp_path, path):
        one = traces.chats(given, 5)
        assert one.requests == tuple((0, n, n + 100) for n in range(1, 6))
        assert path.name in one.source
    with pytest.raises(FileNotFoundError, match="mooncake"):
        traces.chats(tmp_path / "nowhere", 5)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_hits_are_found_on_every_tier_and_again_after_a_kill(policy: str, tmp_path: Path) -> None:
    requests = tmp_path / "requests.json"
    asked = traces.chats(None, 120)
    requests.write_text(json.dumps({"requests": asked.requests, "shares": asked.shares}))
    common = {"path": str(tmp_path / "store"), "requests": str(requests), "policy": policy}
    found = child.run(hits.drive, **common)
    total = sum(map(len, asked.requests)) * hits.BLOCK_SIZE
    assert found["num_tokens"] == total
    assert set(found["by_tier"]) == {"device", "host", "disk"}
    assert sum(found["by_tier"].values()) <= asked.ideal() * total
    assert child.run(hits.ask_again, **common)["after"] >= 0.99 * found["before"] > 0


def test_a_restart_that_forgets_is_not_met() -> None:
    (row,) = hits.restart_figure([("a", 0.8, 0.8), ("b", 0.5, 0.25), ("c", 0.0, 0.0)])
    assert (row.value, row.met) == (0.5, False)
    assert "(b)" in row.detail
    (row,) = hits.restart_figure([("c", 0.0, 0.0)])
    assert row.met is None


def test_break_even_is_where_a_restore_becomes_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(tmp_path, Progress(Console(stderr=True)), quick=True, prefill_tokens_s=1000.0)
    seconds = {str(length): 0.2 + length / 10_000 for length in tiers._LENGTHS}
    monkeypatch.setattr(tiers, "try_job", lambda *_args, **_more: seconds)
    figure, lines = tiers.break_even(plan)
    assert isinstance(figure, figures.Figure) and isinstance(lines, sheet.Sheet)
    assert figure.value == 512, "0.2512 s against 0.512 s; at 128 tokens 0.2128 s against 0.128 s"
    assert lines.rows[0] == (32, pytest.approx(203.2), pytest.approx(32.0))


# ---- the report ----------------------------------------------------------------------------------


def a_result() -> dict[str, Any]:
    rows = [
        figures.at_least("fast_enough_ratio", 0.95, 0.9, 0.01, "three <b> rounds"),
        figures.at_most("too_slow_s", 2.0, 1.0),
        figures.unmeasured("on_cuda_ratio", ">= 0.9", "no CUDA device here"),
    ]
    speeds, shares = (("ours", 2.0, None), ("raw", 3.0, 1.5)), (("x", 0.1, 0.2, 0.3, 0.6, 0.7),)
    times = ((1000, 4.25), (10_000, 40.0))
    sheets = [
        sheet.Sheet("Bars", "what bars show", ("GB/s", "in", "out"), speeds, "bars"),
        sheet.Sheet("Lines", "what lines show", ("blocks", "ms"), times, "lines", True),
        sheet.Sheet("Stacked", "shares", ("share", "a", "b", "c", "sum", "best"), shares, "stacked"),
        sheet.Sheet("Numbers", "no picture", ("what", "n"), (("a", 7),)),
    ]
    return {
        "machine": {"cpu": "a <fast> one", "load": 9.0, "num_cores": 2}, "command": ["--only", "speed"],
        "figures": [row.as_json() for row in rows], "sheets": [one.as_json() for one in sheets],
    }  # fmt: skip


def test_the_report_is_one_page_that_needs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    report.write(path, json.loads(json.dumps(a_result())))
    page = path.read_text(encoding="utf-8")
    assert not re.search(r"<(script|link|img|iframe)\b|\bsrc=|@import|url\(http", page)
    assert set(re.findall(r'https?://[^"<]+', page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert page.count("<svg") == 3, "a picture for each sheet that is drawn"
    assert page.index("bench_spill.py --only speed") < page.index("The figures"), (
        "how to run it again is on top"
    )
    shown = ("fast_enough_ratio", "4.25", "40", "no CUDA device here", "three &lt;b&gt; rounds")
    for wanted in (*shown, "kept the processors busy"):
        assert wanted in page, wanted
    assert "1 of 2 figures reach" in page


def test_a_picture_says_what_its_sheet_says() -> None:
    from bench import plots

    bars, lines, stacked, numbers = (sheet.from_json(one) for one in a_result()["sheets"])
    for one in (bars, lines, stacked):
        drawn = plots.svg(one)
        assert all(name in drawn for name in one.columns[1:3]), "the legend names the columns"
    assert ">raw<" in plots.svg(bars) and ">1.5<" in plots.svg(bars)
    assert plots.svg(numbers) == ""


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--only", "nothing"], "basics"), (["--rivals", "some"], "light"), (["--runs", "0"], "--runs")],
)
def test_an_option_that_cannot_be_is_refused_in_words(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, str(TOOLS / "bench_spill.py"), *arguments, "--dir", str(tmp_path)],
        capture_output=True, text=True, env={**child.environment()},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "nothing was begun"
