"""Promises of `agentkv.rendering`: a template gets its time, its memory and its output, and no more."""

import os
import time

import pytest

from agentkv.errors import TemplateError
from agentkv.rendering import Renderer


def _chat(content):
    return [[{"role": "user", "content": content}]]


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "longer than"),
        ("{{ (n + 8) ** (9 ** 9) % 7 }}", "longer than"),
        ("{{ 'x' * (n * 2 ** 31) }}", "MiB"),
        ("{{ 'x' * 300000 }}", "200000 characters"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "failed"),
        ("{{ messages.append(1) }}", "failed"),
        ("{% include '/etc/passwd' %}", "failed"),
        ("{{ '\\ud800' }}", "UnicodeEncodeError"),
    ],
    ids=["loop", "power", "memory", "output", "mro", "globals", "mutation", "include", "surrogate"],
)
def test_a_malicious_template_is_bounded(attack, said):
    # `n` keeps the attack from being folded into a constant when the template is compiled, for the innocent too.
    template = "{% set n = messages | length %}{% if messages[0]['content'] == 'attack' %}" + attack + "{% endif %}ok"
    renderer = Renderer(template, {}, time_limit_s=1.5, size_limit=200_000)
    start = time.monotonic()
    with pytest.raises(TemplateError, match=said):
        renderer.render(_chat("attack"))
    assert time.monotonic() - start < 20
    assert renderer.render(_chat("fine")) == ["ok"]  # the next one is served
    renderer.close()


def test_a_syntax_error_is_a_template_error():
    renderer = Renderer("{% for %}", {})
    with pytest.raises(TemplateError, match="TemplateSyntaxError"):
        renderer.render(_chat("hi"))
    renderer.close()


def test_variables_and_the_generation_prompt_reach_the_template():
    renderer = Renderer(
        "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}", {"bos_token": "B"}
    )
    assert renderer.render([*_chat("one"), *_chat("é\n")]) == ["Bone>", "Bé\n>"]
    renderer.close()


def test_a_child_that_died_is_replaced():
    renderer = Renderer("ok", {})
    assert renderer.render(_chat("x")) == ["ok"]
    renderer._child.kill()
    renderer._child.wait()
    assert renderer.render(_chat("x")) == ["ok"]
    renderer.close()


@pytest.mark.parametrize("how", ["close", "collected"])
def test_the_child_ends_with_its_renderer(how):
    renderer = Renderer("ok", {})
    child = renderer._child
    assert child.poll() is None
    if how == "close":
        renderer.close()
        renderer.close()
        with pytest.raises(TemplateError):
            renderer.render(_chat("x"))
    del renderer
    assert child.poll() is not None


def test_the_exit_of_a_forked_copy_leaves_the_child_alone():
    renderer = Renderer("ok", {})
    stop = renderer._stop.peek()
    assert stop is not None
    _, end, (child, owner), _ = stop
    assert owner == os.getpid()
    end(child, owner + 1)  # what runs in the copy
    assert renderer.render(_chat("x")) == ["ok"]
    renderer.close()
