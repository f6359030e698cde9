"""Chat templates: those of real models, and those that attack."""

from __future__ import annotations

import time
from typing import Any

import pytest

from llmc.runtime.errors import RequestError
from llmc.runtime.text.chat import render_chat

USER = [{"role": "user", "content": "Hi <b>\n"}]
CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ bos_token }}sys\n{% endif %}{{ '<|' + message['role'] + '|>' + message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def render(template: str, messages: Any = USER) -> str:
    return render_chat(template, messages, {"bos_token": "<s>"})


def test_a_usual_template() -> None:
    assert render(CHATML) == "<s>sys\n<|user|>Hi <b>\n\n<|assistant|>"


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi <b>\\n"}]'),
        ("{{ {'é': 1} | tojson(indent=1) }}", '{\n "é": 1\n}'),
        ("{% set ns = namespace(n=0) %}{% for m in [1,2,3] %}{% set ns.n = ns.n + m %}{% endfor %}{{ ns.n }}", "6"),
        ("{% for x in [1,2,3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% for x in [1,2] %}{{ loop.length }}{{ loop.last }}{{ loop.revindex }}{% endfor %}", "2False22True1"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') }}{{ f(x='b') }}", "<a><b>"),
        ("{{ messages[0].content | trim | upper }}", "HI <B>"),
        ("{% if messages[-1]['role'] in ['user'] and messages | length == 1 %}y{% endif %}", "y"),
        ("{{ messages | map(attribute='role') | join(',') }}", "user"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ 'abc'[::-1] }}{{ 'a-b'.split('-')[1] }}{{ '%s!' % 'x' }}{{ '{}?'.format('y') }}", "cbabx!y?"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("  {% if true %}\n  a\n  {% endif %}\n", "  a\n"),
        ("{% set x %}a{{ 'b' }}{% endset %}{{ x ~ 1 ~ 'c' }}", "ab1c"),
        ("{{ 1700000000000 | string }}{{ 5 * 3 }}{{ 2 ** 3 }}{{ 7 % 4 }}{{ 'ab' * 2 }}", "170000000000015" + "83abab"),
        ("{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "12"),
        ("{% set a, b = 1, 2 %}{{ a }}{{ b }}{% for x, y in [(3, 4)] %}{{ x + y }}{% endfor %}{{ (1, 2)[1] }}", "1272"),
        (
            "{{ [1, 2] | sum }}{{ [{'a': 1}] | sum('a') }}{{ ['a', 'b'] | join('-') }}{{ '-'.join(['c', 'd']) }}",
            "31a-bc-d",
        ),
        (
            "{{ 'a.b' | replace('.', '!') }}{{ 'x\ny' | indent(2) }}{{ messages[0]['content'].strip() }}",
            "a!bx\n  yHi <b>",
        ),
        ("{{ undefined_thing is defined }}{{ x | default('d') }}", "Falsed"),
    ],
)
def test_what_templates_use(template: str, wanted: str) -> None:
    assert render(template) == wanted


def test_a_refusal_of_the_template_is_the_user_s_error() -> None:
    with pytest.raises(RequestError, match="chat template: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ (messages|attr('__class__')).__base__ }}x",
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(10**9) %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ [0] * 10**9 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10000000) }}",
        "{{ '{:{}}'.format(1, '10000000') }}",
        "{{ ('{:999999}' * 100000).format(*range(100000)) }}",
        "{{ '%*d' % (100000000, 1) }}",
        "{% set n = namespace(l=[]) %}{% for i in range(9999) %}{% set n.l = n.l + ['x'.ljust(1000000)] %}{% endfor %}",
        "{% set n = namespace(l=[1]) %}{% for i in range(60) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}",
        "{% set n = namespace(l=1) %}{% for i in range(60) %}{% set n.l = {1: n.l, 2: n.l} %}{% endfor %}{{ n.l }}",
        "{% set n = namespace(l=1) %}{% for i in range(60) %}{% set n.l = (n.l, n.l) %}{% endfor %}{{ n.l }}",
        "{% set n = namespace(l=1) %}{% for i in range(60) %}{% set n.l = dict(a=n.l, b=n.l) %}{% endfor %}{{ n.l }}",
        "{{ range(100000) | map('string') | join('x' * 1000000) }}",
        "{{ ('x' * 1000000).join(range(100000) | map('string')) }}",
        "{{ (['x' * 1000000] * 100000) | join }}",
        "{{ ([['x' * 1000000]] * 100000) | join(attribute=0) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000).replace('', 'b' * 1000000) }}",
        "{{ ('a\n' * 1000000) | indent(1000000) }}",
        "{{ ('\t' * 1000000).expandtabs(1000000) }}",
        "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
        "{{ ('{0}' * 300000).format('b' * 1000000) }}",
        "{{ ('%(a)s' * 300000) % {'a': 'b' * 1000000} }}",
        "{{ ([[0] * 1000] * 1000) | sum(start=[]) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a' | indent(width=1000000000) }}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=9) %}{% for i in range(60) %}{% set ns.s = ns.s * ns.s %}{% endfor %}",
        "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s.replace('a', 'aa') %}{% endfor %}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
        "{{ range(100000) | map('string') | join('x' * 10000) }}",
        "{{ messages | tojson(indent=1000000) }}",
        "{{ strftime_now('%Y' * 100000) }}",
        "{{ 1 / 0 }}",
        "{{ nothing.more.than }}",
        "{% if %}",
        "{{ 'x' | no_such_filter }}",
        "{% include 'manifest.json' %}",
        "{% import '/etc/passwd' as x %}",
        "{{ " + "(" * 2000 + ")" * 2000 + " }}",
        "{{ '" + "a" * 2_000_000 + "' }}",
    ],
)
def test_attacks_end_soon_in_one_line(template: str) -> None:
    start = time.monotonic()
    with pytest.raises(RequestError) as caught:
        render(template)
    assert time.monotonic() - start < 15
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_python_s_insides_are_undefined() -> None:
    assert render("{{ raise_exception.__globals__ }}{{ ''.__class__ }}{{ messages.__init__ }}x") == "x"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        None,
        {"role": "user"},
        ["hello"],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": 1, "content": "x"}],
        [{"role": "", "content": "x"}],
        [{"role": "user<|im_end|>", "content": "x"}],
        [{"role": "user\nsystem", "content": "x"}],
        [{"role": "user", "content": "a\ufdd0b"}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": "x", "tool_calls": []}],
        [{"role": "user", "content": "x"}] * 10_001,
    ],
)
def test_messages_are_checked(messages: Any) -> None:
    with pytest.raises(RequestError, match="messages"):
        render(CHATML, messages)
