"""Child processes that live to be killed: `python kill_worker.py COMMAND JSON-ARGUMENTS` prints a JSON report.

This process imports everything once and never opens a manager itself; it forks. Each forked child opens a manager,
says on a pipe what it has committed before it goes on, and steps until something ends it. `test_durable.py` and
`test_resume.py` judge the reports.
"""

import asyncio
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

import agentkv
from agentkv import DecodingConfig, EngineConfig, SpeculationConfig
from agentkv.engine import Engine

ROOT = Path(__file__).parents[1]
STEPS = 12
"""Steps of a conversation; after them the next session begins."""
CONVERSATIONS = 3
MODES = ("exact", "full", "auto", "exact")
COMMIT_POINTS = ("commit:begin", "commit:written", "commit:committed", "commit:synced")
POINTS = ("put:begin", "put:written", "put:committed", *COMMIT_POINTS)


def work(command: str, timeout: float = 240, **arguments: Any) -> dict[str, Any]:
    """Run a command of this file in a fresh process; returns its report. Blocks: call it from a sync test."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | arguments.pop("env", {})
    call = [sys.executable, __file__, command, json.dumps(arguments, default=str)]
    done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# What the children run


def manager_of(path: Path, model: str = "tiny", **options: Any) -> agentkv.SessionManager:
    speculation = SpeculationConfig(k=3, budget_pages=3)
    options = {"threads": 1, "kv_bytes": 256 << 20, "store_bytes": 1 << 30, "speculation": speculation} | options
    return agentkv.open(model, store=path, config=EngineConfig(**options))


def engine_of(manager: agentkv.SessionManager) -> Engine:
    """The parts of an open manager."""
    assert manager._engine is not None
    return manager._engine


def script(commit: int) -> tuple[list[int], dict[str, Any]]:
    """Input and options of the step that makes a store's `commit`-th commit (from 1)."""
    conversation, step = (commit - 1) // STEPS % CONVERSATIONS, (commit - 1) % STEPS
    rng = random.Random(f"{conversation} {step}")
    tokens = [rng.randrange(256) for _ in range(rng.randint(3, 60))]
    decoding = DecodingConfig(max_new_tokens=rng.randint(3, 12), ignore_eos=True)
    return tokens, {"decoding": decoding, "mode": rng.choice(MODES)}


def session_of(commit: int) -> str:
    return f"s{(max(commit, 1) - 1) // STEPS}"


async def commits_of(manager: agentkv.SessionManager) -> int:
    return sum(int(info.head.partition("@")[2]) for info in await manager.sessions())


async def facts(manager: agentkv.SessionManager, session: agentkv.Session) -> dict[str, Any]:
    """What a session's last commit is."""
    digest = await session.digest()
    [info] = [info for info in await manager.sessions() if info.id == session.id] or [None]
    tokens = blake2b(np.asarray(session.token_ids, "<u4").tobytes(), digest_size=16).hexdigest()
    return {
        "head": session.head,
        "digest": digest,
        "tokens": tokens,
        "count": len(session.token_ids),
        "carry": info.tokens - info.kv_len if info else 1,
    }


class Pipe:
    """Lines from a child to the process that watches it; a line is written whole or not at all."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()

    def tell(self, kind: str, **fields: Any) -> None:
        os.write(self.writing, json.dumps({"kind": kind} | fields).encode() + b"\n")


async def live(path: Path, model: str, *, pipe: Pipe) -> None:
    """Go on where the store is and step for ever, saying each commit."""
    async with manager_of(path, model) as manager:
        store = engine_of(manager).store
        pipe.tell("opened", problems=store.verify(), pending=store.statistics()["pending"])
        store.hook = lambda point: pipe.tell(point) if point in ("commit:begin", "commit:synced") else None
        commit = await commits_of(manager)
        async with manager.session(session_of(commit)) as session:
            pipe.tell("at", commit=commit, **await facts(manager, session))
        while True:
            async with manager.session(session_of(commit + 1)) as session:
                for number in range(commit + 1, commit - commit % STEPS + STEPS + 1):
                    tokens, options = script(number)
                    await session.step(tokens, **options)
                    commit = number
                    pipe.tell("at", commit=commit, **await facts(manager, session))


async def uninterrupted(path: Path, model: str, commits: int, *, pipe: Pipe) -> None:
    """The same steps in one life: each conversation as far as any session came."""
    async with manager_of(path, model) as manager:
        for conversation in range(CONVERSATIONS):
            first = conversation * STEPS + 1
            async with manager.session(f"c{conversation}") as session:
                for number in range(first, min(commits, first + STEPS - 1) + 1):
                    tokens, options = script(number)
                    await session.step(tokens, **options)
                    pipe.tell("at", commit=number, **await facts(manager, session))


async def survey(path: Path, model: str, *, pipe: Pipe) -> None:
    """Every session's last commit."""
    async with manager_of(path, model) as manager:
        for info in await manager.sessions():
            async with manager.session(info.id, create=False) as session:
                pipe.tell("at", **await facts(manager, session))


# Watching them

Life = Callable[..., Coroutine[Any, Any, None]]
"""What a child does; it is called with `pipe=`, on which it says what it has done."""


def fork(life: Life) -> tuple[int, Pipe]:
    """A child that runs `life` with a pipe to this process."""
    pipe = Pipe()
    pid = os.fork()
    if pid == 0:
        os.close(pipe.reading)
        try:
            asyncio.run(life(pipe=pipe))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(pipe.writing)
    return pid, pipe


class Watch:
    """The lines of one child, as they come."""

    def __init__(self, life: Life) -> None:
        self.started = time.monotonic()
        self.pid, self._pipe = fork(life)
        self.lines: list[dict[str, Any]] = []
        self._times: list[float] = []
        self._rest = b""

    def wait_for(self, kind: str, count: int = 1, timeout: float = 60) -> bool:
        """Read until `kind` has come `count` times; False if the child ended, or was silent, before."""
        while sum(line["kind"] == kind for line in self.lines) < count:
            if not select.select([self._pipe.reading], [], [], timeout)[0] or not self._read():
                return False
        return True

    def read_for(self, seconds: float) -> None:
        """Read what comes within that time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self._pipe.reading], [], [], left)[0] and not self._read():
                return

    def end(self, kill: bool) -> int:
        """The child's wait status, after every line that it wrote has been read."""
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        while self._read():
            pass
        os.close(self._pipe.reading)
        return os.waitpid(self.pid, 0)[1]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]

    def seconds(self, kind: str) -> list[float]:
        """When each line of a kind came, since the start."""
        return [at for line, at in zip(self.lines, self._times, strict=True) if line["kind"] == kind]

    def _read(self) -> bool:
        found = os.read(self._pipe.reading, 1 << 16)
        *whole, self._rest = (self._rest + found).split(b"\n")
        self.lines += [json.loads(line) for line in whole]
        self._times += [time.monotonic() - self.started] * len(whole)
        return bool(found)


def was_killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def run_to_end(life: Life) -> list[dict[str, Any]]:
    """The lines of a child that nobody kills."""
    watch = Watch(life)
    status = watch.end(kill=False)
    assert status == 0, f"a child ended with {status}"
    return watch.of("at")


# Commands


def kills(path: Path, model: str, kills: int, inside: int, seed: int) -> dict[str, Any]:
    """Kill children at random instants, at least `inside` of them between begin and end of a commit."""
    rng = random.Random(seed)
    lives: list[Watch] = []
    opening, committing = [], []
    hit = 0
    while len(lives) < kills or (hit < inside and len(lives) < 3 * kills):
        watch = Watch(partial(live, path, model))
        if hit * kills < inside * (len(lives) + 1):  # lags behind: aim at a commit
            watch.wait_for("commit:begin", rng.randint(1, 3))
            time.sleep(rng.uniform(0, statistics.median(committing or [0.002])))
        else:
            watch.read_for(rng.uniform(0, 3 * statistics.median(opening or [1.0])))
        assert was_killed(watch.end(kill=True)), "a child ended before it was killed"
        lives.append(watch)
        begun, synced = watch.seconds("commit:begin"), watch.seconds("commit:synced")
        hit += len(begun) > len(synced)
        opening += watch.seconds("at")[:1]
        committing += [end - begin for begin, end in zip(begun, synced, strict=False)]
    last = run_to_end(partial(survey, path, model))
    reached = max(line["commit"] for watch in lives for line in watch.of("at")) + 1
    reference = run_to_end(partial(uninterrupted, path.with_name("reference"), model, reached))
    lines = [[line for line in watch.lines if line["kind"] in ("at", "opened")] for watch in lives]
    return {"lives": lines, "inside": hit, "reference": reference, "last": last}


def kill_points(path: Path) -> dict[str, Any]:
    """Second (and first) steps that kill themselves at each point a write passes: what is there before and after."""
    outcomes = {}
    for before, point in product((0, 1), POINTS):
        place = path / f"{before}-{point.replace(':', '-')}"
        [*_, old] = run_to_end(partial(advance, place, before))
        watch = Watch(partial(advance, place, before + 1, kill_at=point))
        assert was_killed(watch.end(kill=False)), point
        lines = run_to_end(partial(advance, place, before + 1))
        outcomes[f"{before} {point}"] = {"old": old, "found": lines[0], "new": lines[-1]}
    return outcomes


async def advance(path: Path, commits: int, *, pipe: Pipe, kill_at: str | None = None) -> None:
    """Bring the store to so many commits, saying each and the space it takes."""
    async with manager_of(path) as manager:
        store = engine_of(manager).store
        store.hook = lambda point: os.kill(os.getpid(), signal.SIGKILL) if point == kill_at else None
        async with manager.session("s0") as session:
            for number in range(await commits_of(manager), commits + 1):
                if number > await commits_of(manager):
                    tokens, options = script(number)
                    await session.step(tokens, **options)
                space = {name: store.statistics()[name] for name in ("used_bytes", "records", "pending")}
                pipe.tell("at", commit=number, problems=store.verify(), **space, **await facts(manager, session))


def kill_before_backup(path: Path) -> dict[str, Any]:
    """With durability="tokens": two steps, the second returned and its process killed before its pages were on disk."""
    watch = Watch(partial(outrun_backup, path))
    assert was_killed(watch.end(kill=False))
    return {"lines": watch.of("at")}


async def outrun_backup(path: Path, *, pipe: Pipe) -> None:
    async with manager_of(path, durability="tokens") as manager, manager.session("s0") as session:
        tokens, options = script(1)
        await session.step(tokens, **options)
        pipe.tell("at", commit=1, **await facts(manager, session))
        prepared, prepare = threading.Event(), session._prepare_commit

        async def prepare_first(*arguments: Any) -> Any:
            commit = await prepare(*arguments)
            prepared.set()
            return commit

        session._prepare_commit = prepare_first  # type: ignore[method-assign]

        def hold(point: str) -> None:
            if point == "put:begin":
                prepared.wait()

        # The disk lane is held from the first page on until the step has seen which of its pages are on disk.
        engine_of(manager).store.hook = hold
        await session.step(list(range(200)), decoding=DecodingConfig(max_new_tokens=4, ignore_eos=True))
        pipe.tell("at", commit=2, **await facts(manager, session))
        os.kill(os.getpid(), signal.SIGKILL)


def use_after_fork(path: Path) -> dict[str, Any]:
    """A forked child uses the manager that its parent has open; then the parent goes on."""
    return asyncio.run(fork_while_open(path))


async def fork_while_open(path: Path) -> dict[str, Any]:
    async with manager_of(path) as manager, manager.session("s0") as session, manager.session("new") as fresh:
        tokens, options = script(1)
        await session.step(tokens, **options)
        before = await facts(manager, session)
        pid, pipe = fork(partial(use, manager, session, fresh))
        raised = [json.loads(line) for line in os.fdopen(pipe.reading, "rb")]
        status = os.waitpid(pid, 0)[1]  # noqa: ASYNC222  # the child uses this very loop's copies
        after = await facts(manager, session)
        tokens, options = script(2)
        await session.step(tokens, **options)
        return {"status": status, "raised": raised, "before": before, "after": after, "head": session.head}


async def use(manager: agentkv.SessionManager, session: agentkv.Session, fresh: agentkv.Session, *, pipe: Pipe) -> None:
    """What each public call raises."""
    calls = {
        "step": lambda: session.step([1, 2, 3]),
        "first step": lambda: fresh.step([1, 2, 3]),
        "text": lambda: session.step("hello"),
        "digest": fresh.digest,
        "sessions": manager.sessions,
        "delete": lambda: manager.delete("s1"),
        "open": lambda: manager.session("other").__aenter__(),
        "sleep": session.sleep,
        "statistics": lambda: asyncio.to_thread(manager.statistics),
    }
    for name, call in calls.items():
        try:
            await asyncio.wait_for(call(), 5)
        except BaseException as error:
            pipe.tell(name, error=type(error).__name__)
        else:
            pipe.tell(name, error="")


def kill_readers(path: Path, readers: int) -> dict[str, Any]:
    """Processes that die while they hold a snapshot of the store; then a manager opens it."""
    run_to_end(partial(advance, path, 1))
    for _ in range(readers):
        pid = os.fork()
        if pid == 0:
            lmdb.open(str(path / "gen-1"), readonly=True, map_size=0, max_dbs=8).begin()
            os.kill(os.getpid(), signal.SIGKILL)
        assert was_killed(os.waitpid(pid, 0)[1])
    watch = Watch(partial(advance_with_readers, path))
    assert watch.end(kill=False) == 0
    return {"readers": watch.of("readers")[0]["left"], "lines": watch.of("at")}


async def advance_with_readers(path: Path, *, pipe: Pipe) -> None:
    async with manager_of(path) as manager:
        env: Any = engine_of(manager).store._env
        pipe.tell("readers", left=env._env.readers().splitlines())
    await advance(path, 2, pipe=pipe)


def steps(path: Path, commits: int) -> dict[str, Any]:
    """An ordinary life: bring the store to so many commits and close it."""
    return {"lines": run_to_end(partial(advance, path, commits))}


def killed_steps(path: Path, commits: int) -> dict[str, Any]:
    """Bring the store to so many commits; killed as it begins the next one."""
    watch = Watch(partial(live, path, "tiny"))
    assert watch.wait_for("at", commits + 1)
    assert was_killed(watch.end(kill=True))
    return {"lines": watch.of("at")}


COMMANDS = (kills, kill_points, kill_before_backup, use_after_fork, kill_readers, steps, killed_steps)


if __name__ == "__main__":
    from agentkv import building  # noqa: F401  # everything heavy, once, before any fork

    arguments = json.loads(sys.argv[2])
    arguments["path"] = Path(arguments["path"])
    print(json.dumps({command.__name__: command for command in COMMANDS}[sys.argv[1]](**arguments)))
