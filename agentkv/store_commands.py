"""`agentkv sessions …`: a store looked at and changed without its model. Light to import, for `--help`."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import agentkv

if TYPE_CHECKING:
    from agentkv import SessionStore


def add_sessions(commands: Any) -> None:
    """The `sessions` command and its own commands."""
    parser = commands.add_parser("sessions", help="list, show, fork, roll back or remove sessions of a store")
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--store", type=Path, default=Path("~/.agentkv"), metavar="DIR", help="where it lives (~/.agentkv)"
    )
    common.add_argument("--namespace", default="default", metavar="NAME", help="whose sessions (default)")

    def add(name: str, run: Callable[[argparse.Namespace], int], help: str, *names: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=help, description=help, parents=[common])
        for argument in names:
            action.add_argument(argument.lower(), metavar=argument)
        action.set_defaults(run=run)
        return action

    for name, run, help, names in (
        ("ls", _list, "the sessions of a namespace", ()),
        ("show", _show, "a session's checkpoints, transcript spans and identity", ("ID",)),
    ):
        add(name, run, help, *names).add_argument("--json", action="store_true", help="print JSON")
    fork = add("fork", _fork, "start a new session from a session's head", "ID", "NEW_ID")
    fork.add_argument("--at", metavar="CHECKPOINT", help="from this checkpoint (ID@N) instead")
    add("rollback", _rollback, "go back to a checkpoint (ID@N), which makes a new head", "ID", "CHECKPOINT")
    add("rm", _remove, "delete a session with all its checkpoints", "ID")
    add("compact", _compact, "give the bytes of what was deleted back to the disk")
    _add_transport(add)


def _add_transport(add: "Callable[..., argparse.ArgumentParser]") -> None:
    export = add("export", _export, "write a session to one file", "ID", "FILE")
    export.add_argument("--at", metavar="CHECKPOINT", help="this checkpoint (ID@N) instead of the head")
    import_ = add("import", _import, "make a session of an exported one", "FILE")
    import_.add_argument("--id", metavar="ID", help="another id than it had")
    import_.add_argument(
        "--trust-kv",
        action="store_true",
        help="take the file's KV instead of computing it: only from those whose word you take",
    )


def _list(options: argparse.Namespace) -> int:
    with agentkv.open_store(options.store) as store:
        found = store.sessions(options.namespace)
    if options.json:
        return _print_json(found)
    from rich.console import Console
    from rich.table import Table

    table = Table("session", "head", "tokens", "KV", "MB", "updated", box=None, header_style="bold")
    for info in found:
        size = f"{info.bytes / 1e6:.1f}"
        table.add_row(info.id, info.head, str(info.tokens), str(info.kv_len), size, _when(info.updated_at))
    Console().print(table)
    return 0


def _show(options: argparse.Namespace) -> int:
    with agentkv.open_store(options.store) as store:
        found = store.session(options.id, options.namespace)
    if options.json:
        return _print_json(found)
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"[bold]{found.head}[/] built on {found.parent or 'nothing'}: {found.tokens} tokens")
    console.print(f"KV of {found.kv_len}, {found.kv_durable_len} of them on disk, {found.bytes / 1e6:.1f} MB")
    for title, struct in (("checkpoints", found.checkpoints), ("transcript", found.spans)):
        table = Table(title=title, title_justify="left", box=None, show_header=False)
        for row in struct:
            values = msgspec.structs.asdict(row)
            values |= {"created_at": _when(row.created_at)} if isinstance(row, agentkv.CheckpointInfo) else {}
            table.add_row(*(str(value) for value in values.values()))
        console.print(table)
    for name, value in msgspec.structs.asdict(found.identity).items():
        console.print(f"{name}: {value}", highlight=False)
    return 0


def _fork(options: argparse.Namespace) -> int:
    return _change(options, lambda store: store.fork(options.id, options.new_id, options.at, options.namespace))


def _rollback(options: argparse.Namespace) -> int:
    return _change(options, lambda store: store.rollback(options.id, options.checkpoint, options.namespace))


def _remove(options: argparse.Namespace) -> int:
    return _change(options, lambda store: store.delete(options.id, options.namespace))


def _compact(options: argparse.Namespace) -> int:
    with agentkv.open_store(options.store, write=True) as store:
        before, after = store.compact()
    sys.stdout.write(f"{before / 1e6:.1f} MB before, {after / 1e6:.1f} MB after\n")
    return 0


def _export(options: argparse.Namespace) -> int:
    with agentkv.open_store(options.store) as store:
        store.export(options.id, options.file, options.at, options.namespace)
    return 0


def _import(options: argparse.Namespace) -> int:
    wanted = {"trust_kv": options.trust_kv, "namespace": options.namespace}
    return _change(options, lambda store: store.import_(options.file, options.id, **wanted))


def _change(options: argparse.Namespace, change: "Callable[[SessionStore], str | None]") -> int:
    with agentkv.open_store(options.store, write=True) as store:
        head = change(store)
    if head is not None:
        sys.stdout.write(f"{head}\n")
    return 0


def _print_json(value: Any) -> int:
    sys.stdout.write(json.dumps(msgspec.to_builtins(value), indent=2) + "\n")
    return 0


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
