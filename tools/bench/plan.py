"""What a run was asked to do, as every section reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .progress import Progress


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        root: an empty directory on the disk to be measured.
        runs: repeats of each measurement in fresh processes; figures are medians.
        quick: smaller and fewer, for a run of less than two minutes.
        num_blocks: blocks of the large store of the first figures.
        rivals_home: where environments of rivals lie; None leaves those rivals out.
        trace: a folder or file of real workloads, or None for the built-in ones.
        prefill_tokens_s: the model's prefill speed, or None to measure a small one.
    """

    root: Path
    progress: Progress
    runs: int = 5
    quick: bool = False
    num_blocks: int = 100_000
    rivals_home: Path | None = None
    trace: Path | None = None
    prefill_tokens_s: float | None = None

    @property
    def rounds(self) -> int:
        """Repeats within one process: cheap, so three at least."""
        return max(3, self.runs)
