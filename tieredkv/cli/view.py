"""A child's events on the terminal, as they come: its stages, the questions, the answers piece by piece."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from ..units import format_nbytes
from .child import Event


class View:
    """Prints what happens. A stage is a spinner with the terminal, and a line without."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._status: Status | None = None

    def heading(self, text: str) -> None:
        self._end_stage()
        self.console.print()
        self.console.rule(text, align="left")

    def line(self, text: str, style: str = "") -> None:
        self._end_stage()
        self.console.print(text, style=style, highlight=False, soft_wrap=True)

    def stage(self, text: str) -> None:
        """What is being done now, until something else is shown."""
        if not self.console.is_terminal:
            self.console.print(f"  ... {text}", style="dim")
        elif self._status is None:
            self._status = self.console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def show(self, event: Event) -> None:
        """Print one event of a child; those that are for the parent alone print nothing."""
        show = getattr(self, "_" + event["event"], None)
        if show is not None:
            show(event)

    def killed(self, pid: int) -> None:
        self.console.print()
        self.line(f"  SIGKILL to process {pid}, in the middle of this answer", style="bold red")

    def close(self) -> None:
        self._end_stage()

    def _stage(self, event: Event) -> None:
        self.stage(event["text"])

    def _opened(self, event: Event) -> None:
        config = event["config"]
        tiers = ", ".join(
            f"{tier} {format_nbytes(config[tier + '_nbytes'])}" for tier in ("device", "host", "disk")
        )
        self.line(f"  budgets: {tiers}; policy {config['policy']}; {config['block_size']} tokens a block")
        self.line(f"  recovery: {escape(event['text'])}", style="cyan")

    def _turn(self, event: Event) -> None:
        again = " (interrupted: again from the question)" if event["again"] else ""
        self.line(f"\n[bold]{event['session']}[/]  {escape(event['question'])}[dim]{again}[/]")
        if self.console.is_terminal:
            self.stage("computing the prompt")

    def _piece(self, event: Event) -> None:
        self._end_stage()
        # Whatever a model says stays text: no line breaks, no control characters for the terminal.
        text = "".join(c if c.isprintable() else " " for c in event["text"])
        self.console.print(text, end="", style="green", markup=False, highlight=False, soft_wrap=True)

    def _answer(self, event: Event) -> None:
        tiers = ", ".join(f"{tier} {count:,}" for tier, count in event["by_tier"].items() if count)
        reused = f"{event['reused_tokens']:,} reused ({tiers})" if tiers else "nothing to reuse"
        prompt = f"{event['prompt_tokens']:,} tokens, {reused}, first token after {event['ttft_s']:.2f} s"
        self.console.print()
        self.line(f"    {prompt}", style="dim")

    def _end_stage(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
