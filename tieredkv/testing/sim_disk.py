"""A disk in memory that forgets: what is durable, what is only in the cache, and every way to lose the rest.

A file has the bytes that readers see and the writes since its last good sync. A directory has the names
that are seen and the changes since its last sync. At a crash each of those may or may not have reached the
platter, alone: sectors of 512 bytes, a file's growth, each create, rename and unlink. One such fact is an
*item*; a crash image is made from the items that were lost, so a failing image shrinks to the few losses that
make it fail. Where a file grew and the data did not come, it reads zeros or stale bytes of another file.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import xxhash

SECTOR_NBYTES = 512
PAGE_NBYTES = 4096
_STALE = bytes((0xE5, 0x5E)) * (SECTOR_NBYTES // 2)


class Item(NamedTuple):
    """One thing that may reach the platter or not: `(kind, place, number, sector)`.

    `"data"`: a sector of the write `number` of inode `place`; `"size"`: the growth by that write;
    `"name"`: change `number` of the directory at index `place`.
    """

    kind: str
    place: int
    number: int
    sector: int = 0


@dataclass(frozen=True)
class Image:
    """What a disk holds after a crash: files by path, and directories."""

    files: Mapping[str, bytes]
    dirs: frozenset[str]

    def digest(self) -> bytes:
        """Identity of the image: two crashes with equal digests are one crash."""
        state = xxhash.xxh3_128(repr(sorted(self.dirs)).encode())
        for path, data in sorted(self.files.items()):
            state.update(f"{path}\0{len(data)}\0".encode())
            state.update(data.rstrip(b"\0"))
        return state.digest()

    def with_file(self, path: str, data: bytes | None) -> Image:
        """The image with one file changed, or removed."""
        files = {p: d for p, d in self.files.items() if p != path}
        if data is not None:
            files[path] = data
        return Image(files, self.dirs)

    def with_bit_flipped(self, path: str, bit: int) -> Image:
        data = bytearray(self.files[path])
        data[bit // 8] ^= 1 << bit % 8
        return self.with_file(path, bytes(data))

    def write_to(self, target: Path, root: str) -> None:
        """Lay the files below `root` out as real ones, to be looked at with other tools."""
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.dirs | set(self.files)):
            if path.startswith(f"{root}/"):
                real = target / path[len(root) + 1 :]
                if path in self.dirs:
                    real.mkdir(parents=True, exist_ok=True)
                else:
                    real.parent.mkdir(parents=True, exist_ok=True)
                    real.write_bytes(self.files[path])

    @classmethod
    def read_from(cls, source: Path, root: str) -> Image:
        """The files and directories in `source` as an image with them below `root`."""
        files, dirs = dict[str, bytes](), {root}
        for real in sorted(source.rglob("*")):
            path = f"{root}/{real.relative_to(source)}"
            if real.is_dir():
                dirs.add(path)
            else:
                files[path] = real.read_bytes()
        parts = root.strip("/").split("/")
        dirs.update("/" + "/".join(parts[:count]) for count in range(len(parts)))
        return cls(files, frozenset(dirs))


@dataclass(frozen=True)
class Write:
    """A change of a file not yet known durable: data at an offset, or with `data` None growth to `end`."""

    offset: int
    data: bytes | None
    end: int
    grows: bool


@dataclass(frozen=True)
class NameChange:
    """A change of a directory not yet known durable: names set to inodes, or removed with -1; all or none."""

    sets: tuple[tuple[str, int], ...]


@dataclass
class Inode:
    """A file: `data` is what readers see, `durable` what a crash cannot take, `pending` the way between.

    `pages` are those that take space: written or reserved, and not punched.
    """

    data: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[Write] = field(default_factory=list)
    pages: set[int] = field(default_factory=set)

    def write(self, offset: int, data: bytes) -> None:
        end = offset + len(data)
        self.pages.update(_pages(offset, end))
        grows = end > len(self.data)
        self.pending.append(Write(offset, data, end, grows))
        _put(self.data, offset, data)

    def reserve(self, offset: int, end: int) -> None:
        self.pages.update(_pages(offset, end))
        if end > len(self.data):
            self.pending.append(Write(end, None, end, True))
            self.data.extend(bytes(end - len(self.data)))

    def punch(self, offset: int, nbytes: int) -> None:
        self.write(offset, bytes(nbytes))
        self.pages.difference_update(_pages(offset, offset + nbytes))

    def num_new_pages(self, offset: int, end: int) -> int:
        return sum(page not in self.pages for page in _pages(offset, end))

    def sync(self) -> None:
        for write in self.pending:
            _apply(self.durable, write)
        self.pending.clear()

    def lose_pending(self, keep_in_cache: bool) -> None:
        """A sync failed: pages are marked clean and never written; readers see the new bytes, or the old."""
        self.pending.clear()
        if not keep_in_cache:
            self.data[:] = self.durable


@dataclass
class Directory:
    """Names seen, names durable, and the changes between."""

    seen: dict[str, int] = field(default_factory=dict)
    durable: dict[str, int] = field(default_factory=dict)
    pending: list[NameChange] = field(default_factory=list)

    def change(self, *sets: tuple[str, int]) -> None:
        self.pending.append(NameChange(sets))
        _set_names(self.seen, self.pending[-1])

    def sync(self) -> None:
        self.durable = dict(self.seen)
        self.pending.clear()


@dataclass(frozen=True)
class Frozen:
    """A disk at one moment, from which every crash of that moment can be made."""

    inodes: Mapping[int, tuple[bytes, tuple[Write, ...]]]
    dirs: tuple[tuple[str, Mapping[str, int], tuple[NameChange, ...]], ...]

    def items(self) -> Iterator[Item]:
        """Everything that is not yet durable."""
        for place, (_, _, changes) in enumerate(self.dirs):
            yield from (Item("name", place, number) for number in range(len(changes)))
        for number, (_, writes) in self.inodes.items():
            for at, write in enumerate(writes):
                if write.grows:
                    yield Item("size", number, at)
                for sector, _, _ in _sectors(write):
                    yield Item("data", number, at, sector)

    def image(self, lost: frozenset[Item], stale: bool = False) -> Image:
        """The crash that loses exactly these items; with `stale`, ground gained without data is not zeros."""
        contents: dict[int, bytes] = {}
        files: dict[str, bytes] = {}
        for place, (path, durable, changes) in enumerate(self.dirs):
            names = dict(durable)
            for number, change in enumerate(changes):
                if Item("name", place, number) not in lost:
                    _set_names(names, change)
            for name, inode in names.items():
                if inode not in contents:
                    contents[inode] = self._content(inode, lost, stale)
                files[f"{path}/{name}"] = contents[inode]
        return Image(files, frozenset(path for path, _, _ in self.dirs))

    def _content(self, inode: int, lost: frozenset[Item], stale: bool) -> bytes:
        durable, writes = self.inodes[inode]
        content = bytearray(durable)
        for at, write in enumerate(writes):
            if write.grows and Item("size", inode, at) not in lost and write.end > len(content):
                blank = write.end - len(content)
                content.extend((_STALE * (blank // SECTOR_NBYTES + 1))[:blank] if stale else bytes(blank))
            for sector, start, end in _sectors(write):
                if Item("data", inode, at, sector) not in lost:
                    assert write.data is not None, "growth alone has no sectors"
                    piece = write.data[start - write.offset : end - write.offset]
                    piece = piece[: max(0, len(content) - start)]
                    content[start : start + len(piece)] = piece
        return bytes(content)

    def draw(self, rng: random.Random) -> frozenset[Item]:
        """A crash at random: for each file and directory none, all, a prefix, some or a torn run is lost."""
        by_place: dict[tuple[str, int], list[Item]] = {}
        for item in self.items():
            by_place.setdefault((("name" if item.kind == "name" else "file"), item.place), []).append(item)
        lost: set[Item] = set()
        everywhere = rng.choice(("", "", "none", "all"))
        for items in by_place.values():
            lost.update(_DRAWS[everywhere or rng.choice(tuple(_DRAWS))](items, rng))
        return frozenset(lost)


Predicate: TypeAlias = Callable[[frozenset[Item]], bool]


def shrink(lost: frozenset[Item], fails: Predicate, max_tries: int = 400) -> frozenset[Item]:
    """The least losses found that still fail: halves, then smaller pieces, are given back while it fails."""
    kept, pieces, tries = sorted(lost), 2, 0
    while kept and tries < max_tries:
        size = max(1, len(kept) // pieces)
        for start in range(0, len(kept), size):
            fewer = kept[:start] + kept[start + size :]
            tries += 1
            if fails(frozenset(fewer)):
                kept, pieces = fewer, max(2, pieces - 1)
                break
        else:
            if size == 1:
                break
            pieces *= 2
    return frozenset(kept)


class SimDisk:
    """Inodes and directories, changed by one thread at a time (`SimFs` holds a lock)."""

    def __init__(self, image: Image | None = None) -> None:
        self.inodes: dict[int, Inode] = {}
        self.dirs: dict[str, Directory] = {"/": Directory()}
        self.next_inode = 1
        if image is not None:
            self._load(image)

    def _load(self, image: Image) -> None:
        for path in sorted(image.dirs | {"/"}):
            self.dirs[path] = Directory()
        for path, data in image.files.items():
            parent, _, name = path.rpartition("/")
            self.dirs[parent or "/"].seen[name] = self.next_inode
            pages = set(_pages(0, len(data)))
            self.inodes[self.next_inode] = Inode(bytearray(data), bytearray(data), pages=pages)
            self.next_inode += 1
        for directory in self.dirs.values():
            directory.durable = dict(directory.seen)

    def create(self, parent: str, name: str) -> int:
        number = self.next_inode
        self.next_inode += 1
        self.inodes[number] = Inode()
        self.dirs[parent].change((name, number))
        return number

    @property
    def used_nbytes(self) -> int:
        """Space that every file with a name takes."""
        named = {number for directory in self.dirs.values() for number in directory.seen.values()}
        return sum(len(self.inodes[number].pages) for number in named) * PAGE_NBYTES

    def freeze(self) -> Frozen:
        inodes = {n: (bytes(i.durable), tuple(i.pending)) for n, i in self.inodes.items()}
        dirs = tuple((p, dict(d.durable), tuple(d.pending)) for p, d in self.dirs.items())
        return Frozen(inodes, dirs)

    def seen(self) -> Image:
        """What readers see now: the image that a SIGKILL leaves."""
        files = {
            f"{path}/{name}": bytes(self.inodes[number].data)
            for path, directory in self.dirs.items()
            for name, number in directory.seen.items()
        }
        return Image(files, frozenset(self.dirs))


def _sectors(write: Write) -> Iterator[tuple[int, int, int]]:
    """`(number, start, end)` of the sectors that a write touches."""
    if write.data is None:
        return
    start = write.offset
    while start < write.end:
        end = min(write.end, start - start % SECTOR_NBYTES + SECTOR_NBYTES)
        yield start // SECTOR_NBYTES, start, end
        start = end


def _pages(offset: int, end: int) -> range:
    return range(offset // PAGE_NBYTES, -(-end // PAGE_NBYTES))


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if offset > len(content):
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def _apply(content: bytearray, write: Write) -> None:
    if write.data is not None:
        _put(content, write.offset, write.data)
    elif write.end > len(content):
        content.extend(bytes(write.end - len(content)))


def _set_names(names: dict[str, int], change: NameChange) -> None:
    for name, number in change.sets:
        if number < 0:
            names.pop(name, None)
        else:
            names[name] = number


def _lose_none(_items: list[Item], _rng: random.Random) -> list[Item]:
    return []


def _lose_all(items: list[Item], _rng: random.Random) -> list[Item]:
    return items


def _lose_tail(items: list[Item], rng: random.Random) -> list[Item]:
    """What came last is lost; a cut inside one write tears it."""
    return items[rng.randint(0, len(items)) :]


def _lose_some(items: list[Item], rng: random.Random) -> list[Item]:
    share = rng.choice((0.1, 0.5, 0.9))
    return [item for item in items if rng.random() < share]


def _lose_writes(items: list[Item], rng: random.Random) -> list[Item]:
    """Whole writes are lost, others kept."""
    numbers = {item.number: rng.random() < 0.5 for item in items}
    return [item for item in items if numbers[item.number]]


def _lose_data(items: list[Item], rng: random.Random) -> list[Item]:
    """The file has its size and not its data."""
    return [item for item in items if item.kind == "data" and rng.random() < 0.9]


_DRAWS: dict[str, Callable[[list[Item], random.Random], list[Item]]] = {
    "none": _lose_none,
    "all": _lose_all,
    "tail": _lose_tail,
    "some": _lose_some,
    "writes": _lose_writes,
    "data": _lose_data,
}
