"""Namespace identity: exactly the things that change KV bytes or what they mean.

The digest is SHA-256 over a canonical encoding in which every field is tagged and length-prefixed and an
absent field differs from an empty one. Paths, capacities, device numbers, pids and threads are not in it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .layout import BlockLayout

FORMAT_VERSION = 1
"""Part of every identity: raise it when the meaning of stored bytes changes."""


@dataclass(frozen=True)
class Identity:
    """What a namespace's blocks were computed with.

    Attributes:
        weights: hex digest over the bytes of every parameter and buffer.
        dtypes: dtype by name or role.
        config: the attention-relevant model configuration, JSON-able.
        adapters: content digests of active adapters, by name.
        framework: the framework's cache layout: layer classes, tensor shapes.
        tp: tensor-parallel rank and size.
        salt: the tenant's salt; never written anywhere, only its digest is.
        door: which door the blocks come through: `tokens`.
    """

    weights: str
    dtypes: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    framework: Mapping[str, Any] = field(default_factory=dict)
    tp: tuple[int, int] = (0, 1)
    salt: str = field(default="", repr=False)
    door: str = "tokens"

    def digest(self, layout: BlockLayout) -> bytes:
        """The 32-byte namespace digest of this identity with blocks of `layout`."""
        fingerprint = self.fingerprint() | {"layout": layout.describe(), "format": FORMAT_VERSION}
        return hashlib.sha256(b"tkvns001" + encode(fingerprint)).digest()

    def fingerprint(self) -> dict[str, Any]:
        """The identity as plain values that may be written down: the salt only as its digest."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["salt"] = hashlib.sha256(b"tkvsalt1" + self.salt.encode()).hexdigest()
        values["tp"] = list(self.tp)
        plain: dict[str, Any] = json.loads(json.dumps(values, default=_plain))
        return plain


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Dotted names of the fields in which two fingerprints differ, sorted."""
    flat_one, flat_other = _flatten(one), _flatten(other)
    absent = object()
    names = flat_one.keys() | flat_other.keys()
    return sorted(n for n in names if flat_one.get(n, absent) != flat_other.get(n, absent))


def encode(value: Any) -> bytes:
    """Canonical bytes of plain values: tagged, length-prefixed, mappings sorted by key.

    Raises:
        TypeError: a value that is not None, bool, int, float, str, bytes, a sequence or a mapping.
    """
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"T" if value else b"F"
    if isinstance(value, int):
        return _framed(b"I", str(value).encode())
    if isinstance(value, float):
        return _framed(b"D", struct.pack("<d", value))
    if isinstance(value, str):
        return _framed(b"S", value.encode())
    if isinstance(value, bytes):
        return _framed(b"B", value)
    if isinstance(value, Mapping):
        pairs = sorted((encode(str(k)), encode(v)) for k, v in value.items())
        return _framed(b"M", b"".join(k + v for k, v in pairs))
    if isinstance(value, (list, tuple)):
        return _framed(b"L", b"".join(map(encode, value)))
    raise TypeError(f"an identity holds plain values, not {type(value).__name__}")


def _framed(tag: bytes, body: bytes) -> bytes:
    return tag + struct.pack("<Q", len(body)) + body


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"an identity holds plain values, not {type(value).__name__}")


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat.update(_flatten(inner, f"{prefix}.{name}" if prefix else str(name)))
    return flat
