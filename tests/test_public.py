"""The public surface: names, docstrings, signatures; and importing the package is light."""

import inspect
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import agentkv

NAMES = """
AgentKVError BackendUnavailable CapacityError CheckpointExpired CheckpointInfo ContextOverflow DecodingConfig Done
EngineConfig Event Every IdentityMismatch InvalidInput InvalidSessionId Item ManagerClosed Mode ModelError
ModelNotFound NotSupported Round Session SessionBusy SessionDetails SessionError SessionInfo SessionManager
SessionNotFound SessionStore SpeculationConfig StaleHead StepResult StoreDamaged StoreError StoreForked StoreFull
StoreLocked StoreUnsafe Stream StreamEvent TemplateError Text Tolerant Trace UnsupportedModel Usage open open_store
""".split()

TYPE_ALIASES = {"Mode", "StreamEvent"}

SIGNATURES = {
    agentkv.open: "(model='smollm2', *, store=None, config=None, on_mismatch='refuse', progress=None)",
    agentkv.SessionManager.session: "(self, id=None, *, create=True, namespace='default', reasoning='keep', "
    "on_cancel='rollback', tools=None)",
    agentkv.SessionManager.sessions: "(self, namespace='default')",
    agentkv.SessionManager.delete: "(self, id, namespace='default')",
    agentkv.SessionManager.compact: "(self)",
    agentkv.SessionManager.statistics: "(self)",
    agentkv.SessionManager.close: "(self)",
    agentkv.Session.step: "(self, input, *, decoding=None, mode='auto', verify=None, seed=None, stop=None, "
    "expect=None)",
    agentkv.Session.stream: "(self, input, *, decoding=None, mode='auto', verify=None, seed=None, stop=None, "
    "expect=None)",
    agentkv.Session.digest: "(self)",
    agentkv.Session.checkpoint: "(self)",
    agentkv.Session.fork: "(self, new_id, at=None)",
    agentkv.Session.rollback: "(self, checkpoint)",
    agentkv.open_store: "(path, *, write=False, store_bytes=None)",
    agentkv.Stream.aclose: "(self)",
}

FIELDS = {
    agentkv.DecodingConfig: "max_new_tokens temperature top_k top_p min_p repetition_penalty logit_bias ignore_eos",
    agentkv.EngineConfig: "store_bytes kv_bytes durability threads prefill_chunk keep_checkpoints speculation",
    agentkv.SpeculationConfig: "k k_max budget_pages proposers dense_layers recompute_tokens",
    agentkv.StepResult: "text message token_ids finish_reason checkpoint usage trace",
    agentkv.Usage: "input output cached prefilled loaded",
    agentkv.Trace: "mode rounds proposed accepted kv_read_share ties seed events seconds ttft_seconds decode_seconds",
    agentkv.Event: "kind reason tokens bytes seconds",
    agentkv.Item: "role content name id",
}


def test_exported_names():
    assert sorted(agentkv.__all__) == sorted(NAMES)
    for name in NAMES:
        assert getattr(agentkv, name) is not None
    with pytest.raises(AttributeError):
        _ = agentkv.unheard_of


@pytest.mark.parametrize("name", sorted(set(NAMES) - TYPE_ALIASES))
def test_everything_public_is_documented(name):
    thing = getattr(agentkv, name)
    assert thing.__doc__, name
    for member, value in vars(thing).items():
        function = value.fget if isinstance(value, property) else value
        if inspect.isclass(thing) and inspect.isfunction(function) and not member.startswith("_"):
            assert function.__doc__, f"{name}.{member}"


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signatures(function):
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    assert str(inspect.Signature(parameters)) == SIGNATURES[function]
    assert "return" in inspect.get_annotations(function)


@pytest.mark.parametrize("struct", FIELDS, ids=lambda struct: struct.__name__)
def test_fields(struct):
    assert " ".join(struct.__struct_fields__) == FIELDS[struct]
    assert struct.__struct_config__.frozen


def test_the_exception_tree_is_the_one_drawn():
    """The drawing in errors.py, line by line: a name's parent is the last one drawn less deep."""
    from agentkv import errors

    drawn, above = {}, {}
    for line in (errors.__doc__ or "").splitlines():
        name = line.lstrip("│├└─ ").split(" ")[0]
        if isinstance(getattr(errors, name, None), type):
            depth = (len(line) - len(line.lstrip("│├└─ "))) // 4
            above[depth] = drawn[name] = getattr(errors, name)
            assert depth == 0 or above[depth - 1] in drawn[name].__bases__, name
    public = {name: getattr(agentkv, name) for name in NAMES}
    assert drawn == {name: e for name, e in public.items() if inspect.isclass(e) and issubclass(e, Exception)}


def test_results_are_values():
    usage = agentkv.Usage(1, 2, 3, 4, 5)
    assert usage == agentkv.Usage(1, 2, 3, 4, 5)
    assert msgspec.json.decode(msgspec.json.encode(usage), type=agentkv.Usage) == usage


def test_importing_is_light():
    script = (
        "import sys, time, threading; before = time.perf_counter(); import agentkv; agentkv.open('tiny')\n"
        "seconds = time.perf_counter() - before\n"
        "unwanted = {'torch', 'transformers', 'lmdb', 'flashinfer', 'numpy', 'safetensors', 'tokenizers'}\n"
        "heavy = unwanted & set(sys.modules)\n"
        "print(seconds, sorted(heavy), threading.active_count())\n"
    )
    root = Path(agentkv.__file__).parents[1]
    runs = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
        seconds, rest = done.stdout.split(" ", 1)
        assert rest.strip() == "[] 1"
        runs.append(float(seconds))
    assert min(runs) < 1.0
