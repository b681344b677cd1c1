"""What tieredkv raises. Everything else becomes a miss with a reason and a counter.

TieredKVError
├── BadConfig          a configuration value that cannot work; nothing was opened
├── BadInput           tokens, tensors or arguments that disagree with what was declared
├── Unsupported        a model, layout or platform refused, with the reason why
├── Closed             a call on a closed cache or prefix
├── Forked             a call in a forked child of the process that opened the store
├── SessionError       a session name that is unknown, or already open
├── CorruptFormat      bytes that are not what their place promises (internal to readers)
└── StoreUnusable      `open` refused; nothing on disk was changed
    ├── StoreHeld      another living process holds the directory; names its pid
    ├── NewerFormat    written by a later version
    ├── NotAStore      a folder of other things
    ├── PathUnusable   cannot be created, read or written
    └── DamagedStore   damage found, and `strict=True`
"""

from __future__ import annotations


class TieredKVError(Exception):
    """Base of everything tieredkv raises."""


class BadConfig(TieredKVError, ValueError):
    """A configuration value that cannot work; nothing was opened."""


class BadInput(TieredKVError, ValueError):
    """Tokens, tensors or arguments that disagree with what was declared."""


class Unsupported(TieredKVError):
    """A model, layout or platform that tieredkv refuses, with the reason why."""


class Closed(TieredKVError):
    """A call on a cache or a prefix that was closed."""


class Forked(TieredKVError):
    """A call in a forked child; only the process that opened a store may use it."""


class SessionError(TieredKVError):
    """A session name that is unknown, or already open in this process."""


class CorruptFormat(TieredKVError):
    """Bytes that are not what their place promises. Readers turn it into a miss or a report."""


class StoreUnusable(TieredKVError):
    """`open` refused; nothing on disk was changed."""


class StoreHeld(StoreUnusable):
    """Another living process holds the directory; the message names its pid."""


class NewerFormat(StoreUnusable):
    """The store was written by a later version of tieredkv."""


class NotAStore(StoreUnusable):
    """A non-empty directory that holds other things and nothing of ours."""


class PathUnusable(StoreUnusable):
    """The path cannot be created, read or written; the message names path and errno."""


class DamagedStore(StoreUnusable):
    """Damage was found and the caller asked for `strict=True`."""
