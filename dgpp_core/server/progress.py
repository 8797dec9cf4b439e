"""Loading progress on the terminal, or a line a stage where there is none."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from dgpp_core.scheduler.messages import Loading


class _Bytes(DownloadColumn):
    """Bytes done of all; nothing for a stage that does not count bytes."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total else Text()


class LoadingDisplay:
    """Shows what the engine is loading. A context manager; ``console`` writes to standard error."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), _Bytes(), TimeElapsedColumn(), console=console
        )
        self._task: TaskID | None = None
        self._stage = ""

    def __enter__(self) -> LoadingDisplay:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def show(self, loading: Loading) -> None:
        """Show the stage, and how far it is."""
        fresh = loading.stage != self._stage
        self._stage = loading.stage
        if not self._console.is_terminal:
            if fresh:
                self._console.print(loading.stage, highlight=False)
            return
        if fresh or self._task is None:
            self._task = self._progress.add_task(loading.stage, total=loading.total or None)
        self._progress.update(self._task, completed=loading.done, total=loading.total or None)
