"""Digests: fixed for ever, equal in every process, different for everything that differs."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch

from tieredkv.block.hashing import as_tokens, chain, keys_of
from tieredkv.errors import BadInput

ROOT = bytes(range(32))


def by_hand(root: bytes, tokens: list[int], size: int, extra: dict[int, bytes]) -> list[bytes]:
    """The definition in the module's docstring, word for word."""
    digests, parent = [], root
    for block in range(len(tokens) // size):
        ids = tokens[block * size : (block + 1) * size]
        more = extra.get(block, b"")
        body = b"tkvblk01" + struct.pack("<I", size) + b"".join(struct.pack("<i", t) for t in ids)
        parent = hashlib.sha256(parent + body + struct.pack("<I", len(more)) + more).digest()
        digests.append(parent)
    return digests


def test_golden_vectors() -> None:
    digests = chain(ROOT, np.arange(40, dtype=np.int32), 16)
    assert [d.tobytes().hex() for d in digests] == [
        "f8030e44886fd287c4d10dda880638449237aa652e0d60d13a407b99fac86b93",
        "0922673cc57ec3821ccdabd36a36e19cb351184c59d53d279483c5480c2c3f04",
    ]
    with_image = chain(ROOT, np.arange(40, dtype=np.int32), 16, {1: b"image"})
    assert with_image[0].tobytes() == digests[0].tobytes()
    assert with_image[1].tobytes().hex() == "3f27c25dc4129c95c3518bb3fe7d7785d5b034fe469e580f7225490becfac4cf"


@pytest.mark.parametrize("extra", [{}, {0: b"x"}, {1: b"a", 2: b""}])
def test_digests_are_as_defined(extra: dict[int, bytes]) -> None:
    tokens = np.random.default_rng(1).integers(0, 2**31 - 1, 32 * 5 + 7).astype(np.int32)
    digests = chain(ROOT, tokens, 32, extra)
    assert digests.dtype == np.uint8 and digests.shape == (5, 32)
    assert [d.tobytes() for d in digests] == by_hand(ROOT, tokens.tolist(), 32, extra)


def test_every_process_agrees_whatever_its_hash_seed() -> None:
    program = (
        "import numpy as np; from tieredkv.block.hashing import chain;"
        "from tieredkv import Identity, TOKENS, TensorSpec, LayerGroup, BlockLayout;"
        "lay = BlockLayout(16, (LayerGroup('full', (TensorSpec(0, 'k', (2, TOKENS, 4), 'float16'),)),));"
        "root = Identity('aa', config={'b': 1, 'a': [2.5, None]}, adapters={'y': '1', 'x': '2'}).digest(lay);"
        "print(chain(root, np.arange(320, dtype=np.int32), 16)[-1].tobytes().hex())"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE
        )
        for seed in ("1", "4242")
    ]
    found = {child.communicate(timeout=60)[0] for child in children}
    assert len(found) == 1 and len(found.pop().strip()) == 64


def test_a_block_depends_on_all_before_it_and_on_nothing_after() -> None:
    tokens = np.arange(160, dtype=np.int32)
    before = chain(ROOT, tokens, 16)
    for at in (0, 15, 16, 80, 159):
        changed = tokens.copy()
        changed[at] += 1
        equal = (chain(ROOT, changed, 16) == before).all(axis=1)
        assert equal.tolist() == [block < at // 16 for block in range(10)], f"token {at}"


def test_shifting_a_block_border_changes_everything() -> None:
    tokens = np.arange(64, dtype=np.int32)
    assert not (chain(ROOT, tokens, 32)[0] == chain(ROOT, tokens, 16)[1]).all()


def test_extra_content_is_whole_in_the_digest() -> None:
    """B14: many contents over one token list, all distinct, also where one is a prefix of another."""
    tokens = np.zeros(16, dtype=np.int32)
    contents = [n.to_bytes(4, "big") for n in range(3000)] + [b"", b"\0", b"\0\0", b"\0" * 5]
    digests = {chain(ROOT, tokens, 16, {0: content})[0].tobytes() for content in contents}
    assert len(digests) == len(contents)
    assert chain(ROOT, tokens, 16)[0].tobytes() in digests  # empty is absent: both say "no image"


def test_tokens_of_any_kind_give_one_chain() -> None:
    ids = [5, 0, 2**31 - 1, 7] * 8
    kinds = [ids, tuple(ids), np.array(ids), np.array(ids, dtype=np.uint32), torch.tensor(ids)]
    kinds.append(np.array(ids * 2)[::1][: len(ids)])
    chains = {chain(ROOT, as_tokens(tokens), 16).tobytes() for tokens in kinds}
    assert len(chains) == 1
    strided = np.array([v for t in ids for v in (t, -1)], dtype=np.int32)[::2]
    assert chain(ROOT, as_tokens(strided), 16).tobytes() in chains


@pytest.mark.parametrize(
    "bad",
    [
        [1.0], [[1, 2]], [-1], [2**31], np.array([-5], dtype=np.int32), ["a"], 3, np.array([True]), [[1, 2], [3]],
        torch.zeros(4, dtype=torch.int64, device="meta"), torch.zeros(4, dtype=torch.int64).to_sparse(),
    ],
)  # fmt: skip
def test_bad_tokens_are_refused(bad: object) -> None:
    with pytest.raises(BadInput):
        as_tokens(bad)


def test_no_tokens_no_digests() -> None:
    assert chain(ROOT, as_tokens([]), 16).shape == (0, 32)
    assert chain(ROOT, as_tokens(range(15)), 16).shape == (0, 32)
    assert keys_of(chain(ROOT, as_tokens([]), 16)) == []


def test_keys_are_the_first_half() -> None:
    digests = chain(ROOT, as_tokens(range(64)), 16)
    assert keys_of(digests) == [d.tobytes()[:16] for d in digests]
