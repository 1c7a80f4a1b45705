"""Token truth: what a step appends to a session, as token ids.

A session's ids are never decoded and encoded again. The template is rendered over a stand-in for the history whose
assistant turn is a placeholder; what follows the placeholder is the delta, so it cannot depend on the history's
text, and the ids of a turn strictly extend those of the turn before. `rendering.py` runs the template; the inverse,
ids to text, is `detokenize.py`.
"""

import bisect
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from agentkv.errors import InvalidInput, TemplateError
from agentkv.rendering import Renderer
from agentkv.types import Item, Span

StepInput = str | Sequence[Item | Mapping[str, Any]] | Sequence[int]
"""Text of one user turn; items; or token ids (a list, tuple or 1-D integer array) to append as they are."""


class Delta(msgspec.Struct, frozen=True):
    """What a step appends. Spans count from the delta's first token and cover the items' contents, not the
    template's own words; an item whose content the template rewrites has none.
    """

    token_ids: list[int]
    spans: tuple[Span, ...]

    def shifted(self, start: int) -> "Delta":
        """The same, with spans that count from `start` positions earlier: the session's first token."""
        moved = (Span(span.id, span.role, span.start + start, span.stop + start) for span in self.spans)
        return Delta(self.token_ids, tuple(moved))


def end_token_ids(tokenizer: Any, generation_config: Any, config: Mapping[str, Any]) -> frozenset[int]:
    """The ids that end a turn: all that the tokenizer, the generation config (or None) or config.json names."""
    named = [tokenizer.eos_token_id, getattr(generation_config, "eos_token_id", None), config.get("eos_token_id")]
    ids: set[int] = set()
    for value in named:
        ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(ids)


class Transcript:
    """Deltas for one model. Sync and blocking (the template runs in a child process): call it in a thread.

    Special tokens written out in an item stay text: its words are broken inside each of them and the parts are
    encoded apart, so nothing a user or a tool says can end a turn or open another. This concerns the
    tokenizer's special tokens; its other added tokens (`<think>` in some vocabularies) are ordinary vocabulary. A
    special token of a single character cannot be broken and is refused.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab: int,
        end_ids: Collection[int],
        time_limit_s: float = 5.0,
        size_limit: int = 1 << 26,
    ) -> None:
        """`tokenizer` is a transformers tokenizer backed by `tokenizers`; `vocab` the model's number of ids.

        `size_limit` bounds the rendered text, in characters. Without a chat template only token ids are accepted.
        """
        self._backend = tokenizer.backend_tokenizer
        self._vocab = vocab
        self._end_ids = frozenset(end_ids)
        added = tokenizer.added_tokens_decoder
        control = [t for i, t in added.items() if (t.special or i in self._end_ids) and t.content]
        specials = sorted((t.content for t in control), key=len, reverse=True)
        self._special = re.compile(f"(?=(?:{'|'.join(map(re.escape, specials))}))(.)", re.DOTALL) if specials else None
        self._single = [s for s in specials if len(s) == 1]
        # Text in the middle of a conversation is encoded behind a special token, which keeps a vocabulary from
        # treating it as a beginning. One that swallows the white space beside it would change the text.
        plain = [t.content for t in control if not (t.lstrip or t.rstrip or t.single_word)]
        self._anchor = plain[0] if plain else ""
        self._renderer: Renderer | None = None
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            self._no_template = str(error).split("!")[0]
        else:
            variables = {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
            self._renderer = Renderer(template, variables, time_limit_s=time_limit_s, size_limit=size_limit)

    def close(self) -> None:
        """End the child process that renders templates."""
        if self._renderer is not None:
            self._renderer.close()

    def delta(self, given: StepInput, *, started: bool, last_token: int | None, first_item: int = 0) -> Delta:
        """The ids that `given` adds to a session, generation prompt included.

        `started`: the session has tokens, the last of which is `last_token`. `first_item` numbers the items without
        an id of their own: their spans are named "item-N".

        Raises `InvalidInput` (empty, malformed, or ids outside the vocabulary) and `TemplateError`.
        """
        assert started == (last_token is not None)
        ids = _as_ids(given)
        if ids is not None:
            self._check(ids)
            return Delta(ids, (Span(f"item-{first_item}", "user", 0, len(ids)),))
        items = _as_items(given)
        said = [text for item in items for text in (item.content, item.name, item.id) if text]
        self._refuse_unbreakable(said)
        break_mark = _absent(said, map(chr, range(0xE000, 0xF8FF)))
        name = _absent(said, (f"agentkv{n}z" for n in range(10**9)))
        messages = [self._message(item, break_mark) for item in items]
        contents = [message["content"] for message in messages]
        text, marked = self._render(messages, name, started)
        places = _places(text, marked, name, contents)
        ids, offsets = self._encode(text, break_mark, started)
        dropped = self._closed_already(ids, offsets, text) if last_token in self._end_ids else 0
        ids, offsets = ids[dropped:], offsets[dropped:]
        self._check(ids)
        spans = []
        for number, (item, place) in enumerate(zip(items, places, strict=True), start=first_item):
            start, stop = _tokens_in(offsets, place) if place else (0, 0)
            if start < stop:
                spans.append(Span(item.id or f"item-{number}", item.role, start, stop))
        return Delta(ids, tuple(spans))

    def _message(self, item: Item, break_mark: str) -> dict[str, str]:
        """The item as templates know it, its words broken inside every special token."""
        message = {"role": str(item.role), "content": item.content}
        if item.name is not None:
            message["name"] = item.name
        if item.role == "tool" and item.id is not None:
            message["tool_call_id"] = item.id
        if self._special is None:
            return message
        return {key: self._special.sub(rf"\1{break_mark}", text) for key, text in message.items()}

    def _render(self, messages: Sequence[dict[str, str]], name: str, started: bool) -> tuple[str, str]:
        """The delta's text, and the same with item i's content replaced by `name` + i + "z": where contents lie."""
        if self._renderer is None:
            raise TemplateError(f"only token ids can be appended here: {self._no_template}")
        history = [{"role": "user", "content": "."}, {"role": "assistant", "content": name}] if started else []
        marked = [{**message, "content": f"{name}{i}z"} for i, message in enumerate(messages)]
        texts = self._renderer.render([[*history, *messages], [*history, *marked]])
        if started:
            # The contents hold no `name`; the marks do, behind the placeholder, hence the search for the first.
            cuts = [text.find(name) for text in texts]
            if min(cuts) < 0:
                raise TemplateError("the chat template leaves the assistant's turn out, so nothing can follow it")
            texts = [text[cut + len(name) :] for text, cut in zip(texts, cuts, strict=True)]
        return texts[0], texts[1]

    def _encode(self, text: str, break_mark: str, started: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and their [start, stop) in `text`; parts on either side of a break never share a token."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        at = 0
        for part in text.split(break_mark):
            anchor = self._anchor if started or at else ""
            encoding = self._backend.encode(anchor + part, add_special_tokens=False)
            skip = 1 if anchor else 0
            shift = at - len(anchor)
            ids += encoding.ids[skip:]
            offsets += [(low + shift, high + shift) for low, high in encoding.offsets[skip:]]
            at += len(part) + len(break_mark)
        return ids, offsets

    def _closed_already(self, ids: list[int], offsets: list[tuple[int, int]], text: str) -> int:
        """How many leading ids only close the assistant's turn, which the generated end token has done."""
        for index, token in enumerate(ids):
            if token in self._end_ids:
                return index + 1 if not text[: offsets[index][0]].strip() else 0
        return 0

    def _refuse_unbreakable(self, said: Sequence[str]) -> None:
        for special in self._single:
            if any(special in text for text in said):
                raise InvalidInput(f"an item holds the special token {special!r}, which cannot be made plain text")

    def _check(self, ids: Sequence[int]) -> None:
        if not ids:
            raise InvalidInput("nothing to append: the input has no tokens")
        if min(ids) < 0 or max(ids) >= self._vocab:
            raise InvalidInput(f"token ids must lie in [0, {self._vocab}), not {min(ids)} … {max(ids)}")


def _as_ids(given: Any) -> list[int] | None:
    """The ids, if `given` is a sequence of them or a 1-D integer array; None for text and items."""
    if isinstance(given, str | bytes | Mapping):
        return None
    if hasattr(given, "tolist"):  # numpy, torch
        given = given.tolist()
    if not isinstance(given, list | tuple) or not given:
        return None
    if any(isinstance(t, bool | str | Mapping | Item) or not hasattr(t, "__index__") for t in given):
        return None
    return [operator.index(t) for t in given]


def _as_items(given: Any) -> list[Item]:
    if isinstance(given, str):
        items = [Item("user", given)] if given else []
    elif isinstance(given, list | tuple):
        try:
            items = [_as_item(i) for i in given]
        except msgspec.ValidationError as error:
            raise InvalidInput(f"not an input item: {error}") from None
    else:
        raise InvalidInput(f"input must be text, items or 1-D token ids, not {type(given).__name__}")
    if not items:
        raise InvalidInput("nothing to append: the input is empty")
    for item in items:
        try:
            "".join((item.content, item.name or "", item.id or "")).encode()
        except UnicodeEncodeError:
            raise InvalidInput("an item holds half of a surrogate pair, which is no text") from None
    return items


def _as_item(given: Any) -> Item:
    """A checked item; one made in Python may hold anything."""
    return msgspec.convert(msgspec.structs.asdict(given) if isinstance(given, Item) else given, Item, strict=True)


def _absent(said: Sequence[str], candidates: Iterable[str]) -> str:
    """The first candidate that nothing said contains: a mark that the input cannot forge."""
    for candidate in candidates:
        if not any(candidate in text for text in said):
            return candidate
    raise InvalidInput("the input holds every private-use character")


def _tokens_in(offsets: list[tuple[int, int]], place: tuple[int, int]) -> tuple[int, int]:
    """[start, stop) of the tokens that overlap the characters of `place`; both ends of `offsets` only grow."""
    start = bisect.bisect_right(offsets, place[0], key=operator.itemgetter(1))
    return start, bisect.bisect_left(offsets, place[1], lo=start, key=operator.itemgetter(0))


def _places(text: str, marked: str, name: str, contents: Sequence[str]) -> list[tuple[int, int] | None]:
    """Where each content lies in `text`, read off `marked`; None from the first one on that the template rewrote."""
    places: list[tuple[int, int] | None] = [None] * len(contents)
    at_text = at_marked = 0
    for index, content in enumerate(contents):
        mark = f"{name}{index}z"
        found = marked.find(mark, at_marked)
        words = marked[at_marked:found]
        form = next((c for c in (content, content.strip()) if text.startswith(words + c, at_text)), None)
        if found < 0 or form is None:
            break
        start = at_text + len(words)
        # White space at the ends is left out: some special tokens swallow it, and their offsets with it.
        lead = len(form) - len(form.lstrip()) if form.strip() else 0
        places[index] = (start + lead, start + lead + len(form.strip() or form))
        at_text, at_marked = start + len(form), found + len(mark)
    return places
