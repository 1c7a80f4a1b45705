"""The blocking facade: the same names and results without an event loop of one's own."""

import asyncio
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import open_tiny
from prompts import noise_ids, tokens

import agentkv
import agentkv.sync
from agentkv import Done, EngineConfig, InvalidInput, SessionBusy, SessionNotFound, Text

CONFIG = EngineConfig(threads=1, kv_bytes=64 << 20)
PROMPT = noise_ids(4, 200)


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    with agentkv.sync.open("tiny", store=tmp_path_factory.mktemp("sync"), config=CONFIG) as manager:
        yield manager


async def test_it_says_what_the_asynchronous_names_say(manager, tmp_path):
    async with open_tiny(tmp_path) as other, other.session("a") as session:
        expected = await session.step(PROMPT, decoding=tokens(8))

    def blocking():
        with manager.session("a") as session:
            result = session.step(PROMPT, decoding=tokens(8))
            assert session.head == result.checkpoint == "a@1"
            assert session.checkpoint() == "a@1"
            assert session.fork("b") == "b@1"
            digest = session.digest()
            session.step([1, 2], decoding=tokens(2))
            session.rollback("a@1")
            session.sleep()
            assert session.digest() == digest
        assert [info.id for info in manager.sessions()] == ["a", "b"]
        manager.delete("b")
        assert manager.statistics()["pages"]["held"] == 0
        return result

    assert (await asyncio.to_thread(blocking)).token_ids == expected.token_ids


def test_a_stream_is_an_iterator_that_can_be_left(manager):
    with manager.session("s") as session:
        with session.stream(PROMPT, decoding=tokens(8)) as stream:
            events = list(stream)
        assert isinstance(events[-1], Done)
        assert stream.result is events[-1].result
        head = session.head
        with session.stream([7], decoding=tokens(50)) as stream:
            for event in stream:
                if isinstance(event, Text):
                    break
        assert session.head == head
        with session.stream([7], decoding=tokens(50)) as stream:
            next(stream)
            with pytest.raises(SessionBusy):
                session.step([8])
        assert session.step([7], decoding=tokens(3)).usage.prefilled == 1


def test_errors_are_those_of_the_asynchronous_names(manager):
    with pytest.raises(SessionNotFound), manager.session("nobody", create=False):
        pass
    with pytest.raises(InvalidInput), manager.session("../x"):
        pass
    with manager.session() as session, pytest.raises(InvalidInput):
        session.step("")


def test_threads_share_a_manager(manager):
    results = {}

    def work(name):
        with manager.session(name) as session:
            results[name] = session.step(PROMPT, decoding=tokens(6)).token_ids

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results.values())) == 1


def test_ctrl_c_cancels_the_step_and_not_the_session(tmp_path):
    script = (
        "import sys, agentkv.sync\n"
        "from agentkv import DecodingConfig, EngineConfig\n"
        "config = EngineConfig(threads=1, kv_bytes=64 << 20)\n"
        "with agentkv.sync.open('tiny', store=sys.argv[1], config=config) as manager:\n"
        "    with manager.session('a') as session:\n"
        "        session.step([1, 2, 3], decoding=DecodingConfig(max_new_tokens=2, ignore_eos=True))\n"
        "        try:\n"
        "            print('stepping', flush=True)\n"
        "            session.step([4] * 90, decoding=DecodingConfig(max_new_tokens=1900, ignore_eos=True))\n"
        "        except KeyboardInterrupt:\n"
        "            assert session.head == 'a@1'\n"
        "        session.step([5], decoding=DecodingConfig(max_new_tokens=2, ignore_eos=True))\n"
        "        print(session.head)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "stepping\n"
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, "a@2\n")
