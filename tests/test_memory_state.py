"""Any order of operations on pool, table, tail, sequence and store equals a model of plain lists and dicts.

The page memory is a fake that keeps one token per row, so what each position's row holds can be read back: a row that
is lost, shifted, stale or another session's shows at once. The store is a real one, with a tiny codec.
"""

import shutil
import tempfile
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentkv.config import PAGE_TOKENS
from agentkv.errors import CapacityError
from agentkv.memory.manifest import Commit, Manifest
from agentkv.memory.pages import PagePool
from agentkv.memory.record import PageCodec
from agentkv.memory.sequence import Sequence
from agentkv.memory.store import Store
from agentkv.memory.table import PageTable, page_runs
from agentkv.memory.tail import Tail, tail_capacity
from agentkv.types import Identity, ModelShape

K_MAX = 4
CAPACITY = tail_capacity(K_MAX)
SHAPE = ModelShape(layers=1, q_heads=1, kv_heads=1, head_dim=1, vocab=1 << 16, max_positions=1 << 16)
IDENTITY = Identity("w" * 8, "", "c" * 8, "float32", PAGE_TOKENS, "t" * 8, "p" * 8)
CODEC = PageCodec(SHAPE, IDENTITY.kv_id)
STEPS = settings(max_examples=100, stateful_step_count=50, deadline=None)


class FakeMemory:
    """`PageMemory` whose rows hold a number each; -1 is a row that was never written, or whose page was freed."""

    def __init__(self, pages: int) -> None:
        self.pages = [[-1] * PAGE_TOKENS for _ in range(pages)]
        self.tails: dict[int, list[int]] = {}
        self._numbers = count()

    def open_tail(self) -> int:
        number = next(self._numbers)
        self.tails[number] = [-1] * CAPACITY
        return number

    def close_tail(self, tail: int) -> None:
        del self.tails[tail]

    def seal(self, tail: int, page: int) -> None:
        self.pages[page] = self.tails[tail][:PAGE_TOKENS]
        self.tails[tail] = self.tails[tail][PAGE_TOKENS:] + [-1] * PAGE_TOKENS

    def unseal(self, page: int, tail: int, rows: int) -> None:
        self.tails[tail][:rows] = self.pages[page][:rows]

    def write(self, tail: int, first: int, rows: list[int]) -> None:
        """What a forward does behind the tail's rows."""
        assert first + len(rows) <= CAPACITY
        self.tails[tail][first : first + len(rows)] = rows


class PoolMachine(RuleBasedStateMachine):
    """`PagePool` against a dict of holders."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(40)
        self.held: dict[int, int] = {}

    @rule(number=st.integers(0, 12), after=st.none() | st.integers(0, 39))
    def take(self, number: int, after: int | None) -> None:
        if number > 40 - len(self.held):
            with pytest.raises(CapacityError):
                self.pool.take(number, after)
            return
        follows = after in self.held and number > 0 and after < 39 and after + 1 not in self.held
        taken = self.pool.take(number, after)
        assert len(set(taken)) == number
        assert not set(taken) & self.held.keys()
        assert not follows or taken[0] == after + 1, "a run goes on where it can"
        self.held |= dict.fromkeys(taken, 1)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=6))
        self.pool.retain(pages)
        for page in pages:
            self.held[page] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, max_size=12))
        self.pool.release(pages)
        for page in pages:
            self.held[page] -= 1
            if not self.held[page]:
                del self.held[page]

    @invariant()
    def adds_up(self) -> None:
        self.pool.check()
        assert (self.pool.held, self.pool.free) == (len(self.held), 40 - len(self.held))
        assert [self.pool.holders(page) for page in range(40)] == [self.held.get(page, 0) for page in range(40)]


class TableMachine(RuleBasedStateMachine):
    """`PageTable` against two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable()
        self.pages: list[int] = []
        self.records: list[int] = []

    @rule(page=st.integers(0, 30), near=st.booleans(), record=st.none() | st.integers(0, 99))
    def append(self, page: int, near: bool, record: int | None) -> None:
        page = self.pages[-1] + 1 if near and self.pages else page
        if record is not None and len(self.records) < len(self.pages):
            with pytest.raises(AssertionError, match="provisional"):
                self.table.append(page, record)
            return
        self.table.append(page, record)
        self.pages.append(page)
        self.records += [] if record is None else [record]

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        keep = data.draw(st.integers(0, len(self.pages)))
        assert self.table.truncate(keep) == self.pages[keep:]
        self.pages, self.records = self.pages[:keep], self.records[:keep]

    @invariant()
    def equals_the_lists(self) -> None:
        assert (self.table.pages, self.table.records) == (self.pages, self.records)
        assert (len(self.table), self.table.sealed) == (len(self.pages), len(self.records))
        assert self.table.last == (self.pages[-1] if self.pages else None)
        runs = self.table.runs()
        assert [first + i for first, length in runs for i in range(length)] == self.pages
        assert list(runs) == page_runs(self.pages)
        assert all(sum(left) != right[0] for left, right in pairwise(runs)), "runs are maximal"


class MemoryMachine(RuleBasedStateMachine):
    """Two sessions over one pool and one store, driven as a step drives them; see each rule."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.store = Store.open(self.path, store_bytes=64 << 20, keep_checkpoints=2)
        self.pool, self.memory = PagePool(30), FakeMemory(30)
        self.values = count(1)
        self.awake: dict[str, Sequence] = {}
        self.rows: dict[str, list[int]] = {"a": [], "b": []}
        """What each position's row holds: its token while verified; a provisional row differs."""
        self.heads: dict[str, tuple[Manifest, list[int]] | None] = {"a": None, "b": None}
        for name in self.rows:
            self.wake(name)

    def teardown(self) -> None:
        for name in list(self.awake):
            self.sleep(name)
        self.pool.check()
        assert self.pool.held == 0
        assert self.memory.tails == {}
        assert self.store.verify() == []
        self.store.close()
        shutil.rmtree(self.path)

    names = st.sampled_from(["a", "b"])

    # A step's parts

    @rule(name=names, number=st.integers(1, 70), pages=st.integers(1, 3), chunks=st.integers(0, 9))
    def prefill(self, name: str, number: int, pages: int, chunks: int) -> None:
        """New input, or what is left of an interrupted one: up to `chunks` chunks, then the last rows if they fit."""
        sequence = self.awake[name]
        self.recompute(name)
        if sequence.pending <= 1:
            sequence.token_ids += [next(self.values) for _ in range(number)]
        for _ in range(chunks):
            left = (sequence.pending + sequence.tail.rows - PAGE_TOKENS) // PAGE_TOKENS
            if sequence.pending > sequence.tail.room and not self.chunk(name, min(pages, left)):
                return
        self.verify(name, 0, 0)

    def chunk(self, name: str, pages: int) -> bool:
        """Whole pages, the tail's rows first. False where the pool has no room: then nothing was taken."""
        sequence = self.awake[name]
        if pages > self.pool.free:
            with pytest.raises(CapacityError):
                sequence.take_pages(pages)
            return False
        taken = sequence.take_pages(pages)
        end = PAGE_TOKENS * (len(sequence.table) + pages)
        fresh = sequence.token_ids[sequence.kv_len : end]
        rows = self.memory.tails[sequence.buffer][: sequence.tail.rows] + fresh
        for index, page in enumerate(taken):
            self.memory.pages[page] = rows[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
        sequence.add_pages(taken)
        self.rows[name] += fresh
        return True

    @rule(name=names, drafts=st.integers(0, K_MAX), accepted=st.integers(0, K_MAX))
    def verify(self, name: str, drafts: int, accepted: int) -> None:
        """Pending tokens and drafts are written behind the tail's rows; the accepted part counts, a bonus follows."""
        sequence = self.awake[name]
        self.recompute(name)
        known, accepted = sequence.pending, min(accepted, drafts)
        if not known or known + drafts > sequence.tail.room or self.pool.free < 4:
            return
        tokens = sequence.token_ids[sequence.kv_len :]
        emitted = [next(self.values) for _ in range(accepted + 1)]
        rejected = [-2] * (drafts - accepted)
        self.memory.write(sequence.buffer, sequence.tail.rows, [*tokens, *emitted[:accepted], *rejected])
        sequence.token_ids += emitted
        sequence.add_rows(known + accepted)
        self.rows[name] += [*tokens, *emitted[:accepted]]

    @rule(name=names, drafts=st.integers(1, K_MAX))
    def unverified(self, name: str, drafts: int) -> None:
        """mode="sparse": the drafts of a few rounds are final, their rows provisional."""
        sequence = self.awake[name]
        for _ in range(4):
            if sequence.pending != 1 or self.pool.free < 2:
                return
            rows = [-3 - next(self.values) for _ in range(drafts)]
            self.memory.write(sequence.buffer, sequence.tail.rows, rows)
            sequence.token_ids += [next(self.values) for _ in range(drafts)]
            sequence.add_rows(drafts, verified=False)
            self.rows[name] += rows

    @rule(name=names)
    def recompute(self, name: str) -> None:
        """Provisional rows become pending tokens again."""
        sequence = self.awake[name]
        before, verified = sequence.kv_len, sequence.verified_len
        assert sequence.drop_provisional() == before - verified
        assert (sequence.kv_len, sequence.provisional) == (verified, 0)
        del self.rows[name][verified:]

    # Commit, rollback, sleep

    @rule(name=names)
    def write_ahead(self, name: str) -> None:
        """Sealed pages go to disk while the step goes on."""
        table, offered = self.awake[name].table, self.awake[name].offered
        fresh = list(zip(table.records, table.pages[: table.sealed], strict=True))[offered:]
        self.store.put_pages("n", CODEC, ((record, self.payload(self.memory.pages[page])) for record, page in fresh))
        self.awake[name].offered = table.sealed

    @rule(name=names)
    def commit(self, name: str) -> None:
        """Provisional rows are recomputed first; nothing is committed while input is pending."""
        self.verify(name, 0, 0)
        sequence, head = self.awake[name], self.heads[name]
        if sequence.pending != 1:
            return
        self.write_ahead(name)
        records, rows = sequence.table.records, sequence.tail.rows
        base = head[0] if head else None
        unchanged = min(base.tokens, len(self.rows[name])) if base else 0
        commit = Commit(
            namespace="n", id=name, base=base, unchanged_tokens=unchanged, token_ids=list(sequence.token_ids),
            records=list(records), spans=[], kv_len=sequence.kv_len, identity=IDENTITY, codec=CODEC,
            tail=self.payload(self.memory.tails[sequence.buffer][:rows]) if rows else None, created_at=1.0,
        )  # fmt: skip
        self.heads[name] = self.store.commit(commit), list(self.rows[name])

    @rule(name=names)
    def roll_back(self, name: str) -> None:
        """To the last commit: uncommitted pages leave disk and memory, a page cut in two goes back to the tail."""
        sequence, head = self.awake[name], self.heads[name]
        tokens, kv_len = (head[0].tokens, head[0].kv_len) if head else (0, 0)
        self.store.drop_pending("n", sequence.table.records[kv_len // PAGE_TOKENS :])
        sequence.truncate_kv(min(sequence.kv_len, kv_len))
        del sequence.token_ids[tokens:]
        self.rows[name] = list(head[1]) if head else []

    @rule(name=names, clean=st.booleans())
    def reload(self, name: str, clean: bool) -> None:
        """Put to sleep and woken again: what the store gives is the last commit. `clean`: the store is reopened too."""
        self.roll_back(name)
        self.sleep(name)
        if clean:
            others = [other for other in self.awake if other != name]
            for other in others:
                self.roll_back(other)
            self.store.close()
            self.store = Store.open(self.path, store_bytes=64 << 20, keep_checkpoints=2)
            for other in others:
                self.awake[other]._allot_record = self.store.allot_record
        self.wake(name)

    # The model

    def sleep(self, name: str) -> None:
        self.awake.pop(name).close()

    def wake(self, name: str) -> None:
        head = self.heads[name]
        contents = self.store.contents(head[0]) if head else None
        ids = list(contents.token_ids) if contents else []
        sequence = Sequence(self.pool, self.memory, CAPACITY, self.store.allot_record, ids)
        self.awake[name] = sequence
        if head is None or contents is None:
            return
        for record in contents.records:  # one part per page
            [page] = sequence.take_pages(1)
            [payload] = self.store.read_pages("n", CODEC, [record])
            assert isinstance(payload, np.ndarray)
            self.memory.pages[page] = self.numbers(payload)
            sequence.restore([page], [record], 0)
        tail = self.numbers(self.store.read_tail(head[0], CODEC))
        self.memory.write(sequence.buffer, 0, tail)
        sequence.restore([], [], len(tail))

    @staticmethod
    def payload(rows: list[int]) -> np.ndarray:
        """Rows as the store takes them: K then V, float32 [kv_heads, rows, dim] each."""
        return np.asarray([rows, rows], np.float32).reshape(1, -1).view(np.uint8)

    @staticmethod
    def numbers(payload: np.ndarray) -> list[int]:
        k, v = np.ascontiguousarray(payload).view(np.float32).reshape(2, -1).astype(int).tolist()
        assert k == v
        return k

    @invariant()
    def every_row_is_where_the_table_says(self) -> None:
        for name, sequence in self.awake.items():
            found = [row for page in sequence.table.pages for row in self.memory.pages[page]]
            found += self.memory.tails[sequence.buffer][: sequence.tail.rows]
            assert found == self.rows[name]
            assert sequence.kv_len == len(self.rows[name]) <= len(sequence.token_ids)
            verified = sequence.verified_len
            assert self.rows[name][:verified] == sequence.token_ids[:verified]
            assert all(row < 0 for row in self.rows[name][verified:])
            assert sequence.table.sealed == verified // PAGE_TOKENS, "a full page is sealed at once, no other is"
            assert sequence.tail.rows < PAGE_TOKENS
            assert sequence.offered <= sequence.table.sealed

    @invariant()
    def pages_add_up(self) -> None:
        self.pool.check()
        held = [page for sequence in self.awake.values() for page in sequence.table.pages]
        assert len(held) == len(set(held)) == self.pool.held

    @invariant()
    def what_was_committed_is_on_disk(self) -> None:
        for name, head in self.heads.items():
            if head is not None:
                manifest, rows = head
                assert self.store.manifest("n", name) == manifest
                contents = self.store.contents(manifest)
                pages = self.store.read_pages("n", CODEC, contents.records)
                found = [row for page in pages if isinstance(page, np.ndarray) for row in self.numbers(page)]
                assert found + self.numbers(self.store.read_tail(manifest, CODEC)) == rows
                assert contents.token_ids[:-1] == rows


TestPool = PoolMachine.TestCase
TestPool.settings = STEPS
TestTable = TableMachine.TestCase
TestTable.settings = STEPS
TestMemory = MemoryMachine.TestCase
TestMemory.settings = STEPS


def test_a_tail_holds_what_a_prefill_leaves_and_a_round_drafts():
    """Its capacity takes an unfilled page with the carry and k_max drafts, or with a prefill's last 31 rows."""
    for k_max in (1, 8, 30, 31, 40):
        tail = Tail(tail_capacity(k_max))
        tail.extend(PAGE_TOKENS - 1)
        assert tail.room >= max(k_max + 1, 2 * PAGE_TOKENS - 1)
        with pytest.raises(AssertionError):
            tail.extend(tail.room + 1)
        tail.extend(1)
        assert tail.pop_page()
        assert (tail.rows, tail.pop_page()) == (0, False)
