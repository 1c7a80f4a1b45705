"""Text out of a stream of token ids: whole characters only, and nothing that may still become a stop string.

It knows tokenizers, not sessions; the executor pushes each token it accepts and truncates where this file says.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from agentkv.errors import InvalidInput

_LONG_WINDOW = 32
_MAX_BYTES_PENDING = 3  # of a UTF-8 character; byte-fallback decoders write one U+FFFD for each


class Stopped(msgspec.Struct, frozen=True):
    """`token` counts pushes from 0: the one that completed the stop string `text`."""

    token: int
    text: str


class Detokenizer:
    """The text of one generation, special tokens left out.

    Without stop strings the pushes and `finish` join to `tokenizer.decode(ids, skip_special_tokens=True)`. (One
    exception: a byte-fallback vocabulary turns a whole run of byte tokens into U+FFFD when the run is invalid
    anywhere, even characters that were complete before; those have been released by then.)
    Of several stop strings the first to be complete wins, so the result does not depend on how text is cut
    into tokens.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        """Raises `InvalidInput` for an empty stop string, or a bare string in place of a sequence."""
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise InvalidInput(f"stop must be a sequence of non-empty strings, not {stop!r}")
        self.stopped: Stopped | None = None
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._tokenizer = tokenizer
        self._pushed = 0
        self._window: list[int] = []  # ids whose text is not final, after those that give them their context
        self._context = 0  # ids at the window's start that are final
        self._taken = 0  # characters of the window's text that were taken
        self._held = ""  # taken, but may be the start of a stop string

    def push(self, token_id: int) -> str:
        """Newly released text, possibly empty. Not to be called once `stopped` is set."""
        assert self.stopped is None, "push after a stop string"
        self._window.append(token_id)
        text = self._decode(self._window)
        # A byte-fallback decoder marks every byte of a run while its last character is incomplete, so any number of
        # marks may still become text; a long run of them is no text, and then only the last few may.
        limit = _MAX_BYTES_PENDING if len(self._window) > _LONG_WINDOW else len(text)
        stable = len(text)
        while stable > max(self._taken, len(text) - limit) and text[stable - 1] == "\ufffd":
            stable -= 1
        new = text[self._taken : stable]
        self._taken = max(self._taken, stable)
        if stable == len(text):
            self._slide()
        elif len(self._window) > _LONG_WINDOW:
            self._cut(text)
        self._pushed += 1
        return self._release(new)

    def finish(self) -> str:
        """The rest: half a character becomes U+FFFD, and held text is no stop string after all."""
        if self.stopped is not None:
            return ""
        rest = self._decode(self._window)[self._taken :]
        self._taken += len(rest)
        released = self._release(rest) + self._held
        self._held = ""
        return released

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _slide(self) -> None:
        """Everything is final: keep the ids since the last such point as context (a first token decodes otherwise)."""
        if self._context:
            self._window = self._window[self._context :]
            self._taken = len(self._decode(self._window))
        self._context = len(self._window)

    def _cut(self, text: str) -> None:
        """A long run of bytes that are no text: cut it where both parts decode as they do together."""
        for cut in range(len(self._window) - 1, len(self._window) - 8, -1):
            head = self._decode(self._window[:cut])
            if len(head) <= self._taken and head + self._decode(self._window[cut:]) == text:
                self._window = self._window[cut:]
                self._context = 0
                self._taken -= len(head)
                return

    def _release(self, new: str) -> str:
        text = self._held + new
        found = [(start + len(s), start, s) for s in self._stop if (start := text.find(s)) >= 0]
        if found:
            _, start, stop = min(found)
            self.stopped = Stopped(self._pushed - 1, stop)
            self._held = ""
            return text[:start]
        keep = 0
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(len(s) > size and text.endswith(s[:size]) for s in self._stop):
                keep = size
                break
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
