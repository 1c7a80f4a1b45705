"""Models as files: found, checked, named by digest, loaded. Knows nothing of pages, backends or sessions.

`resolve.py` finds the directory (`embedded.py` and `tiny.py` make two of them), `support.py` says whether its layers
can be run correctly, `loading.py` loads it, `identity.py` names what it computes.
"""

from agentkv.models.cache import Progress
from agentkv.models.identity import identity
from agentkv.models.loading import load_model, load_tokenizer
from agentkv.models.resolve import ModelFiles, resolve
from agentkv.models.support import check_supported
from agentkv.models.tiny import write_tiny

__all__ = [
    "ModelFiles",
    "Progress",
    "check_supported",
    "identity",
    "load_model",
    "load_tokenizer",
    "resolve",
    "write_tiny",
]
