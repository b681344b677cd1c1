"""The command `tieredkv`. Importing this package needs neither typer nor rich."""

from __future__ import annotations

import sys


def main() -> None:
    """The console script: says which extra is missing, or runs the commands of `app`."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(f'tieredkv: the command line needs {error.name}: pip install "tieredkv[cli]"', file=sys.stderr)
        raise SystemExit(2) from None
    from .app import run

    run()
