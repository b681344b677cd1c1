"""Exact hit counts on fixed traces: any silent change of a policy shows here."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from page_models import PageARC, PageLRU
from trace_replay import count_hits, generated_trace

GENERATED = [("lru", 20, 2772), ("lru", 100, 5662), ("arc", 20, 3471), ("arc", 100, 5882)]

OLTP = {
    1000: {"lru": 300122, "arc": 356015},
    2000: {"lru": 388235, "arc": 421200},
    5000: {"lru": 490443, "arc": 505080},
    10000: {"lru": 554906, "arc": 565609},
    15000: {"lru": 590851, "arc": 597857},
}
P3 = {32768: {"lru": 139485, "arc": 669507}}
MOONCAKE = {
    1828: {"lru": 15080, "arc": 18627},
    9140: {"lru": 56382, "arc": 60627},
    18279: {"lru": 80323, "arc": 82006},
    45698: {"lru": 101978, "arc": 96784},
}


def cells(table: dict[int, dict[str, int]]) -> list[tuple[str, int, int]]:
    return [(name, size, hits) for size, row in table.items() for name, hits in row.items()]


def data_file(name: str) -> Path:
    folder = os.environ.get("TIEREDKV_DATA")
    if not folder:
        pytest.skip(f"set TIEREDKV_DATA to a folder that holds {name} to run this trace")
    path = Path(folder) / name
    assert path.is_file(), f"TIEREDKV_DATA={folder} has no {name}"
    return path


def read_pages(name: str) -> list[int]:
    """`start[ count]` a line: that many consecutive pages."""
    references: list[int] = []
    with gzip.open(data_file(name), "rt") as lines:
        for line in lines:
            start, *count = map(int, line.split())
            references.extend(range(start, start + (count[0] if count else 1)))
    return references


@pytest.fixture(scope="module")
def oltp() -> list[int]:
    return read_pages("arc_OLTP.pages.gz")


@pytest.fixture(scope="module")
def p3() -> list[int]:
    return read_pages("arc_P3.pages.gz")


@pytest.fixture(scope="module")
def mooncake() -> list[int]:
    with gzip.open(data_file("mooncake_conversation.jsonl.gz"), "rt") as lines:
        return [block for line in lines for block in json.loads(line)["hash_ids"]]


@pytest.mark.parametrize(("name", "num_pages", "num_hits"), GENERATED)
def test_generated_trace(name: str, num_pages: int, num_hits: int) -> None:
    references = generated_trace(seed=1, num_references=12000, num_pages=400)
    model = {"lru": PageLRU, "arc": PageARC}[name](num_pages)
    assert sum(model.request(x) for x in references) == num_hits, "the model, not the policy, has changed"
    assert count_hits(name, num_pages, references) == num_hits


@pytest.mark.parametrize(("name", "num_pages", "num_hits"), cells(OLTP))
def test_oltp(name: str, num_pages: int, num_hits: int, oltp: list[int]) -> None:
    assert len(oltp) == 914145
    assert count_hits(name, num_pages, oltp) == num_hits


@pytest.mark.parametrize(("name", "num_pages", "num_hits"), cells(P3))
def test_p3(name: str, num_pages: int, num_hits: int, p3: list[int]) -> None:
    assert len(p3) == 3912296
    assert count_hits(name, num_pages, p3) == num_hits


@pytest.mark.parametrize(("name", "num_blocks", "num_hits"), cells(MOONCAKE))
def test_mooncake(name: str, num_blocks: int, num_hits: int, mooncake: list[int]) -> None:
    assert len(mooncake) == 288500
    assert count_hits(name, num_blocks, mooncake) == num_hits
