"""A place that is drawn anew: on a terminal, or as one output of a notebook, which needs no widgets."""

from __future__ import annotations

import importlib
import io
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.live import Live

_HTML = (
    "<pre style=\"white-space:pre;overflow-x:auto;line-height:normal;font-family:Menlo,'DejaVu Sans Mono',monospace\">"
    "{code}</pre>"
)


class Display(Protocol):
    """Shows one thing, and another one in its place later."""

    def show(self, renderable: RenderableType) -> None:
        """Show this from now on."""
        ...

    def close(self) -> None:
        """Leave what is shown as it is."""
        ...


def display_on(console: Console) -> Display | None:
    """The place to draw on; None where what was written stays."""
    if console.is_jupyter:
        return _NotebookDisplay(console)
    return _TerminalDisplay(console) if console.is_terminal else None


class _TerminalDisplay:
    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def show(self, renderable: RenderableType) -> None:
        self._live.start()  # not before there is something to show: another display may be open
        self._live.update(renderable, refresh=True)

    def close(self) -> None:
        self._live.stop()


class _NotebookDisplay:
    """By the identifier of an output: rich's own way needs ipywidgets, and without them leaves empty outputs."""

    def __init__(self, console: Console) -> None:
        self._width = console.width
        self._shown: Any = None

    def show(self, renderable: RenderableType) -> None:
        drawn = Console(
            file=io.StringIO(), record=True, width=self._width, emoji=False, force_jupyter=False, force_terminal=True
        )
        drawn.print(renderable)
        html = drawn.export_html(inline_styles=True, code_format=_HTML, clear=False)
        data = {"text/html": html, "text/plain": drawn.export_text()}
        if self._shown is None:
            display = importlib.import_module("IPython.display").display
            self._shown = display(data, raw=True, display_id=True)
        else:
            self._shown.update(data, raw=True)

    def close(self) -> None:
        pass
