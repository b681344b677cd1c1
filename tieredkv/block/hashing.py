"""Chained block digests: a block's identity is its tokens and everything before them.

    digest(b) = SHA-256(parent digest | tag | num_tokens | tokens as int32 LE | extra's length | extra)

The parent of the first block is the namespace digest, so two identities never share a digest. The first
16 bytes are the block's key: it only finds an entry, a hit needs all 32 bytes equal.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ..errors import BadInput

DIGEST_NBYTES = 32
KEY_NBYTES = 16

_TAG = b"tkvblk01"

Digests = npt.NDArray[np.uint8]
"""uint8 `[n, 32]`."""

Tokens = npt.NDArray[np.int32]
"""int32 `[n]`."""


def as_tokens(tokens: object) -> Tokens:
    """Any 1-D integer sequence, array or CPU tensor as a contiguous int32 array.

    Raises:
        BadInput: not one-dimensional, not integers, or an id outside 0 to 2**31-1.
    """
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise BadInput(f"tokens must be a 1-D sequence of integers, got {array.ndim}-D {array.dtype}")
    if array.dtype == np.int32 and (not array.size or int(array.min()) >= 0):
        return np.ascontiguousarray(array)
    if array.size and (int(array.min()) < 0 or int(array.max()) >= 1 << 31):
        raise BadInput(f"token ids must lie in 0 to 2**31-1, got {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, dtype=np.int32)


def chain(root: bytes, tokens: Tokens, block_size: int, extra: Mapping[int, bytes] | None = None) -> Digests:
    """Digests of every whole block of `tokens`, in order.

    Args:
        root: the namespace digest (32 bytes).
        tokens: int32 `[n]`.
        block_size: tokens in a block.
        extra: content digests that belong to a block beyond its tokens (images), by block number.

    Returns:
        uint8 `[n // block_size, 32]`.
    """
    num_blocks = len(tokens) // block_size
    suffixes = _suffixes(tokens, num_blocks, block_size)
    step = len(suffixes) // num_blocks if num_blocks else 0
    sha256, parent, digests = hashlib.sha256, root, []
    if not extra:
        tail = struct.pack("<I", 0)
        for at in range(0, len(suffixes), step or 1):
            parent = sha256(parent + suffixes[at : at + step] + tail).digest()
            digests.append(parent)
    else:
        for block in range(num_blocks):
            more = extra.get(block, b"")
            body = suffixes[block * step : (block + 1) * step]
            parent = sha256(parent + body + struct.pack("<I", len(more)) + more).digest()
            digests.append(parent)
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(num_blocks, DIGEST_NBYTES)


def _suffixes(tokens: Tokens, num_blocks: int, block_size: int) -> bytes:
    """What follows the parent in each block's preimage, blocks one after another."""
    head = _TAG + struct.pack("<I", block_size)
    rows = np.empty((num_blocks, len(head) + 4 * block_size), dtype=np.uint8)
    rows[:, : len(head)] = np.frombuffer(head, dtype=np.uint8)
    body = np.ascontiguousarray(tokens[: num_blocks * block_size], dtype="<i4")
    rows[:, len(head) :] = body.view(np.uint8).reshape(num_blocks, 4 * block_size)
    return rows.tobytes()


def keys_of(digests: Digests) -> list[bytes]:
    """The 16-byte keys of `digests`, as policies hold them."""
    flat = np.ascontiguousarray(digests[:, :KEY_NBYTES]).tobytes()
    return [flat[at : at + KEY_NBYTES] for at in range(0, len(flat), KEY_NBYTES)]
