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
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        # rows of uneven length, or a tensor whose values are not in memory
        raise BadInput(f"tokens must be a 1-D sequence of integers: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise BadInput(f"tokens must be a 1-D sequence of integers, got {array.ndim}-D {array.dtype}")
    if array.dtype == np.int32 and (not array.size or int(array.min()) >= 0):
        return np.ascontiguousarray(array)
    wrong = np.flatnonzero((array < 0) | (array >= 1 << 31))
    if wrong.size:
        raise BadInput(f"token ids lie in 0 to 2**31-1, and the one at {wrong[0]} is {array[wrong[0]]}")
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
    sha256, parent = hashlib.sha256, root
    digests = [
        parent := sha256(parent + rest).digest() for rest in _suffixes(tokens, block_size, extra or {})
    ]
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, DIGEST_NBYTES)


def _suffixes(tokens: Tokens, block_size: int, extra: Mapping[int, bytes]) -> list[bytes]:
    """What follows the parent in each block's preimage."""
    num_blocks = len(tokens) // block_size
    head, no_extra = _TAG + struct.pack("<I", block_size), struct.pack("<I", 0)
    rows = np.empty((num_blocks, len(head) + 4 * block_size + len(no_extra)), dtype=np.uint8)
    rows[:, : len(head)] = np.frombuffer(head, dtype=np.uint8)
    body = np.ascontiguousarray(tokens[: num_blocks * block_size], dtype="<i4")
    rows[:, len(head) : -len(no_extra)] = body.view(np.uint8).reshape(num_blocks, 4 * block_size)
    rows[:, -len(no_extra) :] = np.frombuffer(no_extra, dtype=np.uint8)
    suffixes: list[bytes] = rows.view(f"V{rows.shape[1]}").ravel().tolist()  # void values become bytes
    for block in extra.keys() & range(num_blocks):
        more = extra[block]
        suffixes[block] = suffixes[block][: -len(no_extra)] + struct.pack("<I", len(more)) + more
    return suffixes


def common_prefix(one: Tokens, other: Tokens) -> int:
    """How many ids two sequences share from their start."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if differ.size else length


def keys_of(digests: Digests) -> list[bytes]:
    """The 16-byte keys of `digests`, as policies hold them."""
    flat = np.ascontiguousarray(digests[:, :KEY_NBYTES]).tobytes()
    return [flat[at : at + KEY_NBYTES] for at in range(0, len(flat), KEY_NBYTES)]
