"""From a model's name to a checked directory on this machine.

A name is "smollm2" or "tiny", a path, or a hub id "org/name[@revision]". Whatever the directory's origin, the same
checks stand between it and `loading.py`: data files only, shards beside their index, a config that `support.py` knows.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec

from agentkv.errors import ModelNotFound, UnsupportedModel
from agentkv.models.cache import Progress, made_once
from agentkv.models.embedded import SOURCE, smollm2
from agentkv.models.support import check_supported
from agentkv.models.tiny import RECIPE, write_tiny
from agentkv.types import ModelShape

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_JSON_LIMIT = 64 << 20
INDEX = "model.safetensors.index.json"


class ModelFiles(msgspec.Struct, frozen=True):
    """A directory that passed all checks. `source` says where it came from (a hub id with its commit, a path);
    `config` is its config.json; `weights` are the safetensors files that hold the model, by name.
    """

    directory: Path
    source: str
    config: dict[str, Any]
    shape: ModelShape
    weights: tuple[str, ...]


def resolve(model: str | Path, *, progress: Progress | None = None) -> ModelFiles:
    """Find (and fetch or make, once) the files of `model`. Blocking: call it in a thread.

    A path to a directory called "tiny" or "smollm2" is written "./tiny". Raises `ModelNotFound`, or
    `UnsupportedModel` naming what stands in the way.
    """
    if model == "smollm2":
        return _checked(smollm2(progress), SOURCE)
    if model == "tiny":
        return _checked(made_once(f"tiny-{RECIPE}", _write_default), f"tiny, recipe {RECIPE}")
    path = Path(os.path.expanduser(model))  # Path.expanduser fails on an unknown user
    if path.is_dir():
        return _checked(path.resolve(), str(path.resolve()))
    hub = _HUB_ID.fullmatch(model) if isinstance(model, str) else None
    if hub is None:
        raise ModelNotFound(f"{str(model)!r} is no directory, no hub id (org/name[@revision]), nor 'smollm2' or 'tiny'")
    directory = _from_hub(hub[1], hub[2], progress)
    return _checked(directory, f"{hub[1]}@{directory.name}")  # the hub's cache names a snapshot by its commit


def _write_default(directory: Path) -> None:
    write_tiny(directory)


def _from_hub(repo: str, revision: str | None, progress: Progress | None) -> Path:
    from huggingface_hub import snapshot_download

    if progress is not None:
        progress.update("download", 0, 1)
    try:
        # Sub-directories and consolidated files hold another format's copy of the weights.
        directory = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=_HUB_FILES,
            ignore_patterns=["*/*", "consolidated*"],
            library_name="agentkv",
        )
    except Exception as error:  # a hub client raises its own, its transport's and the system's
        raise ModelNotFound(f"{repo!r} is neither a directory here nor to be had from the hub: {error}") from error
    if progress is not None:
        progress.update("download", 1, 1)
    return Path(directory)


def _checked(directory: Path, source: str) -> ModelFiles:
    config = _read_json(directory / "config.json")
    for name in ("tokenizer_config.json", "generation_config.json"):
        if (directory / name).exists() and _read_json(directory / name).get("auto_map"):
            raise UnsupportedModel(f"{name}: auto_map asks for custom code, which is never run")
    if (directory / "adapter_config.json").exists():
        raise UnsupportedModel("adapter_config.json: adapters are not supported; merge it into the weights")
    shape = check_supported(config)
    return ModelFiles(directory, source, config, shape, _weights(directory))


def _weights(directory: Path) -> tuple[str, ...]:
    if (directory / "model.safetensors").is_file():  # transformers looks in this order, too
        return ("model.safetensors",)
    if not (directory / INDEX).exists():
        raise UnsupportedModel(f"{directory} has no model.safetensors (other formats of weights are not read)")
    names = _read_json(directory / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise UnsupportedModel(f"{INDEX} has no weight_map")
    for shard in sorted({str(n) for n in names.values()}):
        if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise UnsupportedModel(f"{INDEX}: shard {shard!r} is not the plain name of a .safetensors file")
        if not (directory / shard).is_file():
            raise UnsupportedModel(f"{INDEX}: shard {shard!r} is missing")
    return tuple(sorted(set(names.values())))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelNotFound(f"{path.parent} has no {path.name}")
    if path.stat().st_size > _JSON_LIMIT:
        raise UnsupportedModel(f"{path.name} is larger than {_JSON_LIMIT >> 20} MiB")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path.name} is not a JSON object")
    return value
