"""From checked files to a torch module and a tokenizer, by transformers; only data is read, never code.

`resolve.py` made the `ModelFiles`; what runs the module is the backend's affair.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from agentkv.errors import UnsupportedModel
from agentkv.models.resolve import ModelFiles

DTYPES = ("float32", "bfloat16", "float16")


def load_model(files: ModelFiles, dtype: str = "float32") -> Any:
    """The model as a `torch.nn.Module` on the CPU, in eval mode, without gradients. `dtype` is torch's name.

    Raises `UnsupportedModel` when the files are damaged, or do not hold exactly the weights that the config names
    (transformers would start missing ones at random).
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    if dtype not in DTYPES:
        raise UnsupportedModel(f"dtype {dtype!r}: known are {', '.join(DTYPES)}")
    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                files.directory,
                dtype=getattr(torch, dtype),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UnsupportedModel(f"{files.directory} cannot be loaded: {error}") from error
    model, found = loaded
    for what in ("missing_keys", "mismatched_keys"):
        if found[what]:
            raise UnsupportedModel(f"{files.directory}: {what.replace('_', ' ')}: {sorted(map(str, found[what]))[:5]}")
    return model.eval().requires_grad_(False)


def load_tokenizer(files: ModelFiles) -> Any:
    """A transformers tokenizer backed by `tokenizers` (token offsets and exact byte decoding need it)."""
    from transformers import AutoTokenizer

    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(files.directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the field's tokenizer files fail in every way there is
        raise UnsupportedModel(f"{files.directory} has no usable tokenizer: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "no_truncation"):
        raise UnsupportedModel(f"{type(tokenizer).__name__} has no fast tokenizer")
    backend.no_truncation()  # tokenizer.json may ask for either; a prompt must be neither cut nor filled up
    backend.no_padding()
    return tokenizer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars on the caller's terminal meanwhile; the setting is the process's own, so it is put back."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
