"""The `agentkv` command: arguments in, exit code out. Errors of the documented tree become one line on stderr.

Light on purpose, so that `--help` and `--version` answer at once: `demo.py` and `chat.py` are imported when run.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import agentkv
from agentkv.store_commands import add_sessions


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line. Exit codes: 0, 1 (an error or a failed demo), 130 (Ctrl-C); bad usage is SystemExit(2)."""
    options = build_parser().parse_args(arguments)
    try:
        return options.run(options)
    except agentkv.AgentKVError as error:
        print(f"agentkv: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Every command with its options; `options.run` is what it does."""
    parser = argparse.ArgumentParser(prog="agentkv", description="Agent sessions whose KV cache lives.")
    parser.add_argument("--version", action="version", version=f"agentkv {agentkv.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo",
        help="a session is killed in the middle of a step, resumed, and compared with plain decoding",
        description="Four steps over a real text in two processes; the first is killed (SIGKILL) in its third step.",
    )
    demo.add_argument("--file", type=Path, metavar="PATH", help="the text (default: a module of the standard library)")
    demo.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    _add_model(demo)
    demo.set_defaults(run=_demo)

    chat = commands.add_parser(
        "chat",
        help="talk to a model in a session that survives being closed",
        description="Ctrl-C stops an answer and keeps what was said of it; Ctrl-D leaves. Run it again to go on.",
    )
    chat.add_argument("--session", default="chat", metavar="ID", help="the session to start or resume (chat)")
    chat.add_argument(
        "--store", type=Path, default=Path("~/.agentkv"), metavar="DIR", help="where it lives (~/.agentkv)"
    )
    _add_model(chat)
    chat.set_defaults(run=_chat)
    add_sessions(commands)
    return parser


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", default="smollm2", metavar="M", help="'smollm2' (the default), 'tiny', a directory or a hub id"
    )


def _demo(options: argparse.Namespace) -> int:
    from agentkv.demo import run_demo

    return run_demo(options.file, options.model, as_json=options.json)


def _chat(options: argparse.Namespace) -> int:
    import asyncio

    from agentkv.chat import chat

    asyncio.run(chat(options.model, options.store, options.session))
    return 0


if __name__ == "__main__":
    sys.exit(main())
