"""What is going on, on stderr; a bar with the terminal, a line without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

T = TypeVar("T")


class Progress:
    """One line or bar for each stage."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        self.console.print(f"  ... {text}", style="dim", highlight=False)

    def each(self, text: str, items: Iterable[T]) -> Iterator[T]:
        """The items, with a bar over them."""
        known = list(items)
        with self.bar(text, len(known)) as advance:
            for done, item in enumerate(known):
                yield item
                advance(done + 1)

    @contextmanager
    def bar(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """Call what is yielded with how much is done."""
        if not self.console.is_terminal:
            self.say(text)
            yield lambda _done: None
            return
        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Bars(*columns, console=self.console, transient=True) as bars:
            task = bars.add_task(text, total=total)
            yield lambda done: bars.update(task, completed=done)
