"""Who computed a session is checked by name before anything of it is used: weights, config, dtype, page size,
tokenizer, template, format. `on_mismatch="recompute"` goes on over the stored ids, and says so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from anyio.to_thread import run_sync
from conftest import open_tiny
from kill_worker import work
from safetensors.torch import load_file, save_file
from store_surgery import change, change_identity, head, head_key, newer, page_keys, values

from agentkv import DecodingConfig, IdentityMismatch, SessionManager
from agentkv.memory.environment import FORMAT_KEY, Table
from agentkv.memory.keys import session_key
from agentkv.models import write_tiny

FIRST = [token % 251 for token in range(90)]
SECOND = list(range(30))
DECODING = DecodingConfig(max_new_tokens=12, ignore_eos=True)


def other_weights(model: Path) -> None:
    """One tensor, slightly."""
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][0, 0] += 0.5
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def rewrite_json(name: str, **fields: Any) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        found = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(found | fields))

    return edit


def other_template(model: Path) -> None:
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("You are tiny.", "You are small."))


def other_tokenizer(model: Path) -> None:
    """Two tokens of the vocabulary change places."""
    found = json.loads((model / "tokenizer.json").read_text())
    vocab = found["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (model / "tokenizer.json").write_text(json.dumps(found))


CHANGES: dict[str, Callable[[Path], None]] = {
    "weights": other_weights,
    "config": rewrite_json("config.json", rms_norm_eps=1e-5),
    "template": other_template,
    "tokenizer": other_tokenizer,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model")


@pytest.fixture
async def store(tmp_path: Path, model: Path) -> Path:
    """Sessions `a` and `b` of one step each."""
    async with open_tiny(tmp_path / "store", model) as manager:
        for name in "ab":
            async with manager.session(name) as session:
                await session.step(FIRST, decoding=DECODING, mode="full")
    return tmp_path / "store"


async def refused(manager: SessionManager, session: str = "a") -> IdentityMismatch:
    with pytest.raises(IdentityMismatch) as caught:
        await manager.session(session).__aenter__()
    assert caught.value.stored != caught.value.found
    return caught.value


@pytest.mark.parametrize("field", CHANGES)
async def test_c5_another_model_is_refused_by_the_field_that_differs(store, model, field):
    async with open_tiny(store, model) as manager, manager.session("a", create=False) as session:
        assert session.head == "a@1"
    CHANGES[field](model)
    async with open_tiny(store, model) as manager:
        assert (await refused(manager)).field == field
        async with manager.session("new") as session:
            await session.step(FIRST, decoding=DECODING)
        assert [info.head for info in await manager.sessions()] == ["a@1", "b@1", "new@1"]


async def test_the_same_model_elsewhere_and_its_inert_fields_are_no_difference(store, model, tmp_path):
    moved = model.rename(tmp_path / "moved")
    rewrite_json("config.json", _name_or_path="x/y", transformers_version="4.0.0", use_cache=False)(moved)
    async with open_tiny(store, moved) as manager, manager.session("a", create=False) as session:
        result = await session.step(SECOND, decoding=DECODING)
        assert result.usage.prefilled == len(SECOND)


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "bfloat16"), ("page_size", 32), ("adapter", "5f" * 16)], ids=lambda v: str(v)[:10]
)
async def test_c6_another_kv_format_is_refused_by_the_field_that_differs(store, model, field, value):
    await run_sync(lambda: change_identity(store, "a", **{field: value}))
    async with open_tiny(store, model) as manager:
        error = await refused(manager)
        assert (error.field, error.stored) == (field, str(value))
        async with manager.session("b", create=False) as session:
            assert (await session.step(SECOND, decoding=DECODING)).usage.loaded > 0
    async with open_tiny(store, model, on_mismatch="recompute") as manager, manager.session("a") as session:
        result = await session.step(SECOND, decoding=DECODING)
        assert (result.usage.loaded, result.usage.cached) == (0, 0)
        assert field in next(event.reason for event in result.trace.events if event.kind == "identity")


@pytest.mark.parametrize("field", ["weights", "config"])
async def test_recompute_computes_all_kv_anew_says_so_and_belongs_to_the_new_model(store, model, field):
    old = await run_sync(head, store, "a")
    CHANGES[field](model)
    async with open_tiny(store, model, on_mismatch="recompute") as manager:
        async with manager.session("a") as session:
            await session.digest()
            ids = session.token_ids
            assert len(ids) == old.tokens
            result = await session.step(SECOND, decoding=DECODING, mode="full")
        [event] = [event for event in result.trace.events if event.kind == "identity"]
        assert field in event.reason
        assert "load" not in [event.kind for event in result.trace.events]
        assert (result.usage.cached, result.usage.loaded) == (0, 0)
        assert result.usage.prefilled == old.kv_len + len(SECOND)
        async with manager.session("fresh") as session:
            wanted = await session.step([*ids, *SECOND], decoding=DECODING, mode="full")
        assert result.token_ids == wanted.token_ids
    async with open_tiny(store, model) as manager:
        async with manager.session("a") as session:
            again = await session.step([1, 2, 3], decoding=DECODING)
            assert again.usage.prefilled == 3
            assert "identity" not in [event.kind for event in again.trace.events]
        assert (await refused(manager, "b")).field == field


async def test_recompute_goes_on_under_another_template_with_its_kv_and_a_warning(store, model):
    old = await run_sync(head, store, "a")
    other_template(model)
    async with open_tiny(store, model, on_mismatch="recompute") as manager, manager.session("a") as session:
        result = await session.step(SECOND, decoding=DECODING)
        [event] = [event for event in result.trace.events if event.kind == "identity"]
        assert "template" in event.reason
        assert result.usage.loaded == old.kv_len
        assert result.usage.prefilled == len(SECOND)


@pytest.mark.parametrize("also", [(), ("weights",), ("template", "config")], ids=lambda v: "+".join(v) or "alone")
async def test_another_tokenizer_is_always_refused(store, model, also):
    """Stored ids would be other text, whatever else differs."""
    before = await run_sync(values, store, Table.MANIFESTS)
    for field in ("tokenizer", *also):
        CHANGES[field](model)
    async with open_tiny(store, model, on_mismatch="recompute") as manager:
        assert (await refused(manager)).field == "tokenizer"
    assert await run_sync(values, store, Table.MANIFESTS) == before


@pytest.mark.parametrize("on_mismatch", ["refuse", "recompute"])
@pytest.mark.parametrize("table", [Table.MANIFESTS, Table.SESSIONS])
async def test_a_session_of_a_newer_format_is_refused_and_left_as_it_is(store, model, table, on_mismatch):
    key = await run_sync(head_key, store, "a") if table is Table.MANIFESTS else session_key("default", "a")
    await run_sync(change, store, table, key, newer)
    before = (await run_sync(values, store, table))[key]
    async with open_tiny(store, model, on_mismatch=on_mismatch) as manager:
        error = await refused(manager)
        assert (error.field, error.stored, error.found) == ("format", "2", "1")
        async with manager.session("b", create=False) as session:
            await session.step(SECOND, decoding=DECODING)
        assert "b" in [info.id for info in await manager.sessions()]
    assert (await run_sync(values, store, table))[key] == before


async def test_pages_of_a_newer_format_are_refused(store, model):
    await run_sync(change, store, Table.RECORDS, (await run_sync(page_keys, store, "a"))[2], newer)
    async with open_tiny(store, model) as manager, manager.session("a") as session:
        with pytest.raises(IdentityMismatch) as caught:
            await session.step(SECOND, decoding=DECODING)
        assert caught.value.field == "format"
        assert manager.statistics()["pages"]["held"] == 0
        assert session.head == "a@1"


async def test_a_store_of_a_newer_format_is_refused_at_open(store, model):
    await run_sync(change, store, Table.META, FORMAT_KEY, lambda _: (2).to_bytes(8, "big"))
    manager: Any = open_tiny(store, model)
    with pytest.raises(IdentityMismatch) as caught:
        await manager.__aenter__()
    assert caught.value.field == "format"


def test_c10_keys_and_digests_are_the_same_under_any_hash_seed(tmp_path):
    """Two fresh processes: every key, every page's bytes, every digest."""
    found = []
    for seed in ("0", "4711"):
        report = work("steps", path=tmp_path / seed, commits=3, env={"PYTHONHASHSEED": seed})
        tables = {table: values(tmp_path / seed, table) for table in Table}
        keys = {table: sorted(entries) for table, entries in tables.items()}
        found.append((report["lines"], keys, tables[Table.RECORDS], head(tmp_path / seed, "s0").identity))
    assert len(found[0][2]) > 4
    assert found[0] == found[1]
