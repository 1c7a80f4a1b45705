"""Chat templates rendered in a child process: templates come with models, and nobody has vetted them.

The child renders in transformers' sandbox; the kernel bounds its time (an interval timer with the default action,
which also ends a loop inside C code) and its memory. A thread could be abandoned but not ended, and one `9**9**9`
in it would hold the interpreter for good. This file knows nothing of tokens: `transcript.py` comes next.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from agentkv.errors import TemplateError

# Of address space, beyond what the child's own imports take: that depends on the number of cores.
_MEMORY_BYTES = 1 << 30

# The parent's import path is handed over, so that the child finds the same packages however the parent found them.
_CHILD = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from agentkv.rendering import _serve; _serve()"


class Renderer:
    """One template and the child process that renders it. Calls block: run them in a thread.

    The child starts with the object, so that its imports (0.6 s) overlap the loading of the model; it is started
    anew after a template has exceeded a limit, and ends with the object, `close()` or this process.
    """

    def __init__(
        self, template: str, variables: Mapping[str, Any], *, time_limit_s: float = 5.0, size_limit: int = 1 << 26
    ) -> None:
        """`variables` are JSON values the template may read; `size_limit` bounds one render call, in characters."""
        self._setup = {
            "template": template,
            "variables": dict(variables),
            "time_limit_s": time_limit_s,
            "size_limit": size_limit,
        }
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    def render(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
        """Each conversation with the generation prompt appended.

        Raises `TemplateError` when the template fails, or passes its time, size or memory limit.
        """
        with self._lock:
            if self._closed:
                raise TemplateError("the renderer is closed")
            if self._child.poll() is not None:
                self._stop()
                self._start()
            answer = self._ask(json.dumps(conversations).encode() + b"\n")
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer["texts"]

    def close(self) -> None:
        """End the child. Idempotent; a later `render` raises."""
        with self._lock:
            self._closed = True
            self._stop()

    def _start(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, json.dumps([p or os.getcwd() for p in sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt typed at the terminal is the parent's business
        )
        self._stop = weakref.finalize(self, _end, self._child, os.getpid())
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(self._setup).encode() + b"\n")
        self._child.stdin.flush()

    def _ask(self, request: bytes) -> dict[str, Any]:
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(request)
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = b""
        if line:
            return json.loads(line)
        code = child.wait()
        if code == -signal.SIGALRM:
            return {"error": f"the chat template ran longer than {self._setup['time_limit_s']} s"}
        return {"error": f"the process that renders the chat template ended with code {code}"}


def _end(child: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a forked copy of the owner is exiting: the child is not its own
        return
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:  # unsent bytes of a request that the child did not live to read
            pass


def _serve() -> None:
    """The child: one setup line, then a line of answers per line of conversations, until the parent is gone."""
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up among the answers
    from transformers.utils.chat_template_utils import render_jinja_template

    setup = json.loads(requests.readline())
    with open("/proc/self/statm") as file:
        own = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own + _MEMORY_BYTES, own + _MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in requests:
        conversations = json.loads(line)
        # Encoding is under the timer too: it is the template that decides how much there is to encode.
        signal.setitimer(signal.ITIMER_REAL, setup["time_limit_s"])
        try:
            texts = render_jinja_template(
                conversations=conversations,
                chat_template=setup["template"],
                add_generation_prompt=True,
                **setup["variables"],
            )[0]
            if sum(map(len, texts)) > setup["size_limit"]:
                raise ValueError(f"it wrote more than {setup['size_limit']} characters")
            "".join(texts).encode()  # half a surrogate pair is no text
            answer = {"texts": texts}
        except MemoryError:
            answer = {"error": f"the chat template used more than {_MEMORY_BYTES >> 20} MiB"}
        except Exception as error:
            answer = {"error": f"the chat template failed: {type(error).__name__}: {error}"[:1000]}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)
