"""Builds the engine's parts for a manager, off the event loop, and registers how each is taken down again."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio.to_thread
import torch

from agentkv import calibration as times
from agentkv.backends.model import TorchBackend
from agentkv.backup import Backup
from agentkv.calibration import Calibration
from agentkv.config import PAGE_TOKENS, EngineConfig
from agentkv.engine import Engine
from agentkv.errors import CapacityError, InvalidInput
from agentkv.executor import Executor
from agentkv.heads.verification import VerificationHead
from agentkv.lanes import Lane
from agentkv.memory.pages import PagePool
from agentkv.memory.record import PageCodec
from agentkv.memory.store import Store
from agentkv.memory.tail import tail_capacity
from agentkv.models import ModelFiles, Progress, identity, load_model, load_tokenizer, resolve
from agentkv.models.cache import cache_directory
from agentkv.room import Room
from agentkv.scheduler.phase import Controller
from agentkv.transcript import Transcript, end_token_ids

_log = logging.getLogger("agentkv.manager")


async def build_engine(
    stack: AsyncExitStack,
    model: str | Path,
    store_path: Path,
    config: EngineConfig,
    on_mismatch: Literal["refuse", "recompute"],
    reclaim: Callable[[int], Awaitable[None]],
    at_work: Callable[[], bool],
    progress: Progress | None,
) -> Engine:
    """All that a manager needs, from a model's name and a store's path. `stack` takes it down, last made first."""
    threads = config.threads or len(os.sched_getaffinity(0))
    compute = Lane("compute", partial(torch.set_num_threads, threads))
    disk = Lane("disk")
    for lane in (compute, disk):
        stack.push_async_callback(lane.close)
    store = await disk.make(_open_store, Store.close, store_path, config)
    stack.push_async_callback(disk.finish, store.close)
    files = await anyio.to_thread.run_sync(partial(resolve, model, progress=progress))
    _check_speculation(config, files)
    tokenizer = await anyio.to_thread.run_sync(load_tokenizer, files)
    found = await anyio.to_thread.run_sync(identity, files, files.shape.dtype, PAGE_TOKENS, tokenizer)
    transformer = await compute.run(load_model, files, files.shape.dtype)
    end_ids = end_token_ids(tokenizer, transformer.generation_config, files.config)
    backend = await compute.run(_new_backend, transformer, files, config)
    del transformer
    stack.push_async_callback(compute.finish, backend.close)
    pool = PagePool(backend.pages)
    calibration = await compute.run(_calibrate, backend, pool, found.kv_id, threads)
    codec = PageCodec(files.shape, found.kv_id)
    backup = Backup(backend, store, codec, disk)
    controller = Controller(calibration.plain)
    room = Room(pool, reclaim, at_work)
    executor = Executor(backend, room, compute, controller, calibration, config, backup)
    new_transcript = partial(Transcript, tokenizer, vocab=files.shape.vocab, end_ids=end_ids)
    transcript = await anyio.to_thread.run_sync(new_transcript)
    stack.push_async_callback(anyio.to_thread.run_sync, transcript.close)
    await _start(stack, backup.serve(), "agentkv-backup")
    await _start(stack, executor.serve(), "agentkv-executor")
    return Engine(
        config=config,
        on_mismatch=on_mismatch,
        backend=backend,
        pool=pool,
        compute=compute,
        disk=disk,
        executor=executor,
        store=store,
        codec=codec,
        backup=backup,
        identity=found,
        tokenizer=tokenizer,
        transcript=transcript,
        end_ids=end_ids,
        new_head=partial(VerificationHead, backend.selection_rows),
        room=room,
    )


async def _start(stack: AsyncExitStack, work: Any, name: str) -> None:
    """A background task that ends with the stack. (A task group held open here would break callers that enter and
    leave a manager in different tasks, such as fixtures.)"""
    task = asyncio.get_running_loop().create_task(work, name=name)

    async def stop() -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    stack.push_async_callback(stop)


def _open_store(path: Path, config: EngineConfig) -> Store:
    return Store.open(path, store_bytes=config.store_bytes, keep_checkpoints=config.keep_checkpoints)


def _check_speculation(config: EngineConfig, files: ModelFiles) -> None:
    beyond = [layer for layer in config.speculation.dense_layers if layer >= files.shape.layers]
    if beyond:
        raise InvalidInput(f"dense_layers {beyond}: the model has {files.shape.layers} layers")


def _new_backend(transformer: Any, files: ModelFiles, config: EngineConfig) -> TorchBackend:
    page_bytes = files.shape.token_bytes * PAGE_TOKENS
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    pages = (config.kv_bytes or memory // 4) // page_bytes
    if not pages:
        raise CapacityError(f"kv_bytes={config.kv_bytes} holds no page: one takes {page_bytes} bytes")
    return TorchBackend(
        transformer,
        files.shape,
        pages=pages,
        tail_capacity=tail_capacity(config.speculation.k_max),
        dense_layers=config.speculation.dense_layers,
    )


def _calibrate(backend: TorchBackend, pool: PagePool, model: bytes, threads: int) -> Calibration:
    path = cache_directory().parent / "times" / times.cache_name(model, threads)
    found = times.load(path)
    if found is None:
        _log.info("timing forwards on this machine, once")
        found = times.calibrate(backend, pool)
        times.save(path, found)
    return found
