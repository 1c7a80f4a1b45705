"""Names for what computed a KV cache (weights, config, dtype, page size) and for what wrote its text (tokenizer,
template): two sessions may share pages only where the first agree.

Digests are of contents, never of paths or times; `cache.py` remembers those of large files.
"""

import hashlib
import json
from typing import Any

import msgspec

from agentkv.models.cache import file_digest
from agentkv.models.resolve import ModelFiles
from agentkv.types import Identity

INERT_CONFIG = frozenset(
    ("_name_or_path", "_model_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype")
)
"""Fields of config.json that cannot change a K or V row (the dtype computed in is a field of its own)."""

INERT_TOKENIZER = frozenset({"chat_template", "name_or_path", "is_local", "local_files_only"})
_TOKENIZER_FILES = (
    *("tokenizer.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
)


def identity(files: ModelFiles, dtype: str, page_size: int, tokenizer: Any) -> Identity:
    """The identity of `files` computed in `dtype` (torch's name). Hashes the weights on first sight (~1 GB/s)."""
    config = {k: v for k, v in files.config.items() if k not in INERT_CONFIG}
    return Identity(
        weights=_digest([(name, file_digest(files.directory / name)) for name in files.weights]),
        adapter="",
        config=_digest(config),
        dtype=dtype,
        page_size=page_size,
        tokenizer=_tokenizer_digest(files),
        template=_digest(tokenizer.chat_template),
    )


def _tokenizer_digest(files: ModelFiles) -> str:
    present = [name for name in _TOKENIZER_FILES if (files.directory / name).is_file()]
    parts: list[Any] = [(name, file_digest(files.directory / name)) for name in present]
    settings = files.directory / "tokenizer_config.json"
    if settings.is_file():
        read = msgspec.json.decode(settings.read_bytes())
        parts.append({k: v for k, v in read.items() if k not in INERT_TOKENIZER})
    return _digest(parts)


def _digest(value: Any) -> str:
    """blake2b of the value's canonical JSON, 32 hex digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
