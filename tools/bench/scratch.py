"""Files of one measurement, and a job whose failure is the reason why there is no figure."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import child


@contextmanager
def tidied(path: Path) -> Iterator[str]:
    """A file or directory that is gone at the end."""
    try:
        yield str(path)
    finally:
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)


def try_job(job: Callable[..., Any], **arguments: Any) -> dict[str, Any] | str:
    """What a job found, or why it found nothing."""
    try:
        return child.run(job, **arguments)
    except child.ChildFailed as error:
        return str(error).strip().splitlines()[-1]
