"""The disk's own speed: one file, direct requests of one size, several at a time."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

DEPTHS = (1, 2, 4, 8)


class RawFile:
    """A preallocated file in regions of equal size, read and written with O_DIRECT where there is such.

    The memory is touched before and used again for every region, so that only the disk is measured.
    """

    def __init__(self, path: str, region_nbytes: int, request_nbytes: int, num_regions: int) -> None:
        assert region_nbytes % request_nbytes == 0, f"{region_nbytes} in requests of {request_nbytes}"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)
        self._fd = os.open(path, flags, 0o600)
        self._region_nbytes = region_nbytes
        self._request_nbytes = request_nbytes
        os.posix_fallocate(self._fd, 0, region_nbytes * num_regions)
        os.fsync(self._fd)
        self._map = mmap.mmap(-1, region_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin: a fifth faster here
        self._memory = memoryview(self._map)
        np.frombuffer(self._map, np.uint64)[:] = np.random.default_rng(0).integers(
            0, 1 << 62, region_nbytes // 8
        )

    def write(self, region: int, depth: int) -> float:
        """Seconds to write a region, `depth` requests at a time, and to sync it at the end."""
        return self._run(region, depth, self._write_one, lambda: os.fdatasync(self._fd))

    def read(self, region: int, depth: int) -> float:
        """Seconds to read a region, `depth` requests at a time."""
        return self._run(region, depth, self._read_one, lambda: None)

    def best_write_depth(self, first_region: int) -> int:
        """The depth that writes fastest, each tried on a region of its own from `first_region` on."""
        return _fastest(lambda depth, at: self.write(first_region + at, depth))

    def best_read_depth(self, first_region: int) -> int:
        return _fastest(lambda depth, at: self.read(first_region + at, depth))

    def close(self) -> None:
        os.close(self._fd)

    def _run(
        self, region: int, depth: int, one: Callable[[int, int], None], end: Callable[[], None]
    ) -> float:
        start, count = region * self._region_nbytes, self._region_nbytes // self._request_nbytes
        numbers = itertools.count()

        def worker() -> None:
            for number in numbers:
                if number >= count:
                    return
                one(number * self._request_nbytes, start + number * self._request_nbytes)

        with ThreadPoolExecutor(depth) as pool:
            list(pool.map(lambda _: None, range(depth)))  # the threads are there before the clock starts
            began = time.perf_counter()
            for future in [pool.submit(worker) for _ in range(depth)]:
                future.result()
            end()
            return time.perf_counter() - began

    def _write_one(self, at: int, offset: int) -> None:
        done = os.pwrite(self._fd, self._memory[at : at + self._request_nbytes], offset)
        assert done == self._request_nbytes, f"{done} of {self._request_nbytes} bytes written"

    def _read_one(self, at: int, offset: int) -> None:
        done = os.preadv(self._fd, [self._memory[at : at + self._request_nbytes]], offset)
        assert done == self._request_nbytes, f"{done} of {self._request_nbytes} bytes read"


def _fastest(seconds: Callable[[int, int], float]) -> int:
    return min((seconds(depth, at), depth) for at, depth in enumerate(DEPTHS))[1]


def memcpy_s(nbytes: int, runs: int) -> list[float]:
    """Seconds that one thread takes to copy `nbytes` between two touched buffers, each run."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return seconds
