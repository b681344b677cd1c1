"""A few threads that wait for the disk, so that their callers need not wait longer than they want."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


class Workers:
    """Daemon threads, started when first needed, that run jobs in order of arrival. Jobs must not raise."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, job: Callable[[], None]) -> bool:
        """False if they are closed: nobody would run it."""
        with self._lock:
            if self._closed:
                return False
            if not self._threads:
                self._start()
            self._jobs.put(job)
        return True

    def close(self, timeout_s: float) -> None:
        """Run what was submitted, then end the threads; a thread held by the disk is left to itself."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self) -> None:
        """Lock held."""
        threads = [
            threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True)
            for number in range(self._num_threads)
        ]
        for thread in threads:
            thread.start()
        self._threads = threads

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class Batch(Generic[T]):
    """Jobs given to `workers` together. One that has not begun when the caller stops waiting never runs.

    Attributes:
        is_refused: some jobs are not waited for, because the workers were closed before they took them.

    Args:
        on_late: called with the number of each job that was not done in time, once it is over: from its
            worker, or from `wait` for one that never began.
    """

    def __init__(
        self,
        workers: Workers,
        jobs: Sequence[Callable[[], T]],
        on_late: Callable[[int], None] | None = None,
    ) -> None:
        self._jobs = jobs
        self._on_late = on_late
        self._done = threading.Condition()
        self._results: list[T | None] = [None] * len(jobs)
        self._error: Exception | None = None
        self._num_left = len(jobs)
        self._began = [False] * len(jobs)
        self._over = [False] * len(jobs)
        self._expired = False
        refused = [n for n in range(len(jobs)) if not workers.submit(partial(self._run, n))]
        with self._done:
            self._num_left -= len(refused)
            self.is_refused = bool(refused)

    def wait(self, timeout_s: float | None = None) -> list[T | None]:
        """Each job's result, None for those not done within `timeout_s` and those that were refused.

        Raises:
            Exception: the first that a job raised, once all are over or late.
        """
        with self._done:
            try:
                self._done.wait_for(lambda: self._num_left == 0, timeout_s)
            except BaseException:  # an interrupt: the caller gets no result, so every job is late
                self._interrupted()
                raise
            self._expired = self._num_left > 0
            results = list(self._results)
            never = [number for number, began in enumerate(self._began) if not began]
        if self._on_late is not None:
            for number in never:
                self._on_late(number)
        if self._error is not None:
            raise self._error
        return results

    def _interrupted(self) -> None:
        """Say `on_late` of every job that does not run now; those that do will (lock held)."""
        self._expired = True
        for number, began in enumerate(self._began):
            if self._on_late is not None and (self._over[number] or not began):
                self._on_late(number)

    def _run(self, number: int) -> None:
        with self._done:
            if self._expired:
                return
            self._began[number] = True
        result, error = None, None
        try:
            result = self._jobs[number]()
        except Exception as raised:
            error = raised
        with self._done:
            late = self._expired
            if not late:
                self._results[number], self._error = result, self._error or error
                self._over[number] = True
                self._num_left -= 1
                if self._num_left == 0:
                    self._done.notify_all()
        if late and self._on_late is not None:
            self._on_late(number)
