"""What the commands put on a terminal beside their text: bars for slow stages, and model text made safe to print.

Knows stages by name only; `chat.py` and `demo.py` say how far they are.
"""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_LABELS = {
    "load": "loading the model",
    "download": "downloading the model",
    "convert": "converting the model, once",
    "prefill": "reading the input (tokens)",
}


class Bars:
    """One bar per stage that is under way, on a terminal alone; none is left behind. Any thread may update.

    Serves as `progress=` of `agentkv.open`. A stage that counts no further than 1 is shown as busy, not as a share.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def update(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` (0: unknown) of a stage; done == total ends it."""
        if total and done >= total:
            self.finish(stage)
            return
        if not self._console.is_terminal:
            return
        if self._progress is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(_LABELS.get(stage, stage), total=None)
        self._progress.update(self._tasks[stage], completed=done, total=total if total > 1 else None)

    def finish(self, stage: str) -> None:
        """Take a stage's bar away. Idempotent."""
        task = self._tasks.pop(stage, None)
        if task is not None and self._progress is not None:
            self._progress.remove_task(task)
            if not self._tasks:
                self._progress.stop()
                self._progress = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for stage in list(self._tasks):
            self.finish(stage)


def printable(text: str) -> str:
    """Without control characters: nothing a model says may steer the terminal."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")
