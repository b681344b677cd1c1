"""A session as one file: its tokens, whose KV it is, and the parts that a restore at its end needs.

    | magic 8 | version u4 | zeros 4 | manifest nbytes u8 | manifest xxh3_128 16 | header xxh3_64 u8 |
    | manifest, JSON | parts, end to end, in the order of the manifest's runs |

Every byte lies under a checksum, and lengths add up to the file's. They guard against damage: whoever can forge
a file can forge its KV, so take files from where you would take weights from.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from .block.hashing import Tokens, as_tokens
from .block.identity import differences
from .block.layout import BlockLayout
from .errors import BadInput
from .namespace import Namespace
from .outcomes import Reason, Stored
from .prefix import Prefix
from .span import Span
from .system import File, Fs, OsFs, path_of
from .table.catalog import SessionRow, Turn
from .tier.copier import copy_alone

_MAGIC, _VERSION = b"tkvsess1", 1
_HEAD = struct.Struct("<8sI4xQ16s")
_CHECKSUM = struct.Struct("<Q")
_MANIFEST_AT = _HEAD.size + _CHECKSUM.size
_PIECE_NBYTES = 16 << 20
_LOAD_S = 60.0


def write_session(
    path: str | os.PathLike[str], row: SessionRow, space: Namespace, fs: Fs | None = None
) -> None:
    """Write `row` and the parts of its longest restorable prefix. The file is private, whole and durable on return.

    It is written under a name of its own beside it: others may write to the same path, and no file is in the way.

    Raises:
        OSError: nothing is left of it; a file that had the name before stays.
    """
    fs, path = fs or OsFs(), os.path.abspath(path_of(path))
    folder = os.path.dirname(path)
    temporary = os.path.join(folder, f".tieredkv-{secrets.token_hex(8)}.tmp")
    with space.load(np.append(row.tokens, np.int32(0)), _LOAD_S) as prefix:
        file = fs.open_file(temporary, create=True)
        try:
            with contextlib.closing(file):
                _write(file, _manifest(row, space, prefix), prefix)
                file.datasync()
            fs.rename(temporary, path)
            fs.sync_dir(folder)
        except BaseException:
            with contextlib.suppress(OSError):
                fs.unlink(temporary)
            raise


def _manifest(row: SessionRow, space: Namespace, prefix: Prefix) -> bytes:
    groups = range(len(prefix.layout.groups))
    values = {
        "name": row.name,
        "tokens": row.tokens.tolist(),
        "turns": [[turn.role, turn.end] for turn in row.turns],
        "anchors": list(row.anchors),
        "meta": row.meta,
        "priority": row.priority,
        "identity": {"digest": space.digest.hex(), "fields": space.row.fingerprint},
        "layout": prefix.layout.describe(),
        "num_tokens": prefix.num_tokens,
        "runs": [[group, first, len(parts)] for group in groups for first, parts in prefix.segments(group)],
        "checksums": [f"{xxhash.xxh3_64_intdigest(part):016x}" for part in _parts(prefix)],
    }
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode()


def _parts(prefix: Prefix) -> Iterator[memoryview]:
    for group, part_nbytes in enumerate(prefix.layout.part_nbytes):
        step = max(1, _PIECE_NBYTES // part_nbytes)
        for _, parts in prefix.segments(group):
            for at in range(0, len(parts), step):
                for part in parts[at : at + step].cpu().numpy():
                    yield np.ascontiguousarray(part).data


def _write(file: File, manifest: bytes, prefix: Prefix) -> None:
    head = _HEAD.pack(_MAGIC, _VERSION, len(manifest), xxhash.xxh3_128_digest(manifest))
    file.pwritev([head, _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head)), manifest], 0)
    at = _MANIFEST_AT + len(manifest)
    for part in _parts(prefix):
        file.pwritev([part], at)
        at += part.nbytes


@dataclass(frozen=True)
class SessionFile:
    """An exported session, read whole and verified."""

    path: str
    name: str
    tokens: Tokens = field(repr=False)
    turns: tuple[Turn, ...]
    anchors: tuple[int, ...]
    meta: Mapping[str, Any] = field(repr=False)
    priority: int
    prefix: Prefix

    def store(self, space: Namespace) -> Stored | None:
        """Hand its parts to the namespace; None if it holds none."""
        prefix, end = self.prefix, self.prefix.num_tokens
        if not end:
            return None
        spans: dict[int, list[Span]] = {}
        for group in prefix.layout.groups:
            names: dict[int, list[str]] = {}
            for spec in group.tensors:
                names.setdefault(spec.layer, []).append(spec.name)
            for layer, mine in names.items():
                is_state = group.tensors[0].token_axis is None
                first = end if is_state else prefix.first_token(layer, mine[0])
                spans.setdefault(layer, []).append(Span(first, {n: prefix.gather(layer, n) for n in mine}))
        return space.store(self.tokens[:end], spans, anchors=[end])


def read_session(path: str | os.PathLike[str], space: Namespace, fs: Fs | None = None) -> SessionFile:
    """Read and verify an exported session of the identity of `space`.

    Raises:
        BadInput: no such file, none of ours, of a later version, cut, damaged, or of another identity: the field
            that differs is named.
    """
    fs, path = fs or OsFs(), path_of(path)
    try:
        with contextlib.closing(fs.open_file(path)) as file:
            values, at = _read_manifest(path, file)
            _check_identity(path, values, space)
            parts = torch.empty(file.nbytes() - at, dtype=torch.uint8)
            num_read = file.preadv([parts.numpy().data], at) if len(parts) else 0
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    try:
        return _session(path, values, parts[:num_read], space.layout)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{path}: its manifest is not what this version writes: {error!r}") from error


def _read_manifest(path: str, file: File) -> tuple[dict[str, Any], int]:
    """The verified manifest, and where the parts begin."""
    raw, nbytes_there = bytearray(_MANIFEST_AT), file.nbytes()
    if file.preadv([raw], 0) < _MANIFEST_AT or bytes(raw[: len(_MAGIC)]) != _MAGIC:
        raise BadInput(f"{path}: no exported session: {nbytes_there} bytes that do not begin as one does")
    _, version, nbytes, digest = _HEAD.unpack_from(raw)
    if _CHECKSUM.unpack_from(raw, _HEAD.size)[0] != xxhash.xxh3_64_intdigest(raw[: _HEAD.size]):
        raise BadInput(f"{path}: its header is damaged: export the session again")
    if version > _VERSION:
        raise BadInput(
            f"{path}: written as version {version}, this tieredkv reads {_VERSION}: use a later one"
        )
    manifest = bytearray(max(0, min(nbytes, nbytes_there - _MANIFEST_AT)))
    if file.preadv([manifest], _MANIFEST_AT) < nbytes:
        raise BadInput(f"{path}: cut off at {nbytes_there} bytes, within its manifest: copy it again")
    if xxhash.xxh3_128_digest(manifest) != digest:
        raise BadInput(f"{path}: its manifest is damaged: export the session again")
    values: dict[str, Any] = json.loads(bytes(manifest))
    return values, _MANIFEST_AT + nbytes


def _check_identity(path: str, values: Mapping[str, Any], space: Namespace) -> None:
    theirs = {**values["identity"]["fields"], "layout": values["layout"]}
    mine = {**space.row.fingerprint, "layout": space.layout.describe()}
    named = differences(mine, theirs)
    if named or values["identity"]["digest"] != space.digest.hex():
        raise BadInput(f"{path}: KV of another identity; these differ: {', '.join(named) or 'digest'}")


def _session(path: str, values: Mapping[str, Any], parts: torch.Tensor, layout: BlockLayout) -> SessionFile:
    tokens, end = as_tokens(np.array(values["tokens"], dtype=np.int64)), int(values["num_tokens"])
    if not 0 <= end <= len(tokens) or end % layout.block_size:
        raise BadInput(f"{path}: parts up to token {end} of {len(tokens)}")
    segments = _segments(path, values["runs"], values["checksums"], parts, layout)
    return SessionFile(
        path=path,
        name=str(values["name"]),
        tokens=tokens,
        turns=tuple(Turn(role, int(turn_end)) for role, turn_end in values["turns"]),
        anchors=tuple(values["anchors"]),
        meta=dict(values["meta"]),
        priority=int(values["priority"]),
        prefix=Prefix(layout, end, segments, {}, Reason.COMPLETE, "", lambda: None, copy_alone),
    )


def _segments(
    path: str,
    runs: Sequence[Sequence[int]],
    checksums: Sequence[str],
    parts: torch.Tensor,
    layout: BlockLayout,
) -> list[list[tuple[int, torch.Tensor]]]:
    """The parts of each group, every one of them verified."""
    sizes = layout.part_nbytes
    expected = sum(sizes[group] * count for group, _, count in runs)
    if expected != len(parts) or len(checksums) != sum(count for _, _, count in runs):
        raise BadInput(f"{path}: {len(parts)} bytes of parts where {expected} belong: copy it again")
    segments: list[list[tuple[int, torch.Tensor]]] = [[] for _ in layout.groups]
    at, number = 0, 0
    for group, first, count in runs:
        mine = parts[at : at + sizes[group] * count].unflatten(0, (count, sizes[group]))
        for part in mine.numpy():
            if f"{xxhash.xxh3_64_intdigest(part.data):016x}" != checksums[number]:
                raise BadInput(f"{path}: part {number} is damaged: export the session again")
            number += 1
        segments[group].append((first, mine))
        at += sizes[group] * count
    return segments
