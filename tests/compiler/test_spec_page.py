"""docs/spec.md says what the code does: it is what its generator writes, and the generator's words are true."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from llmc.compiler.spec import CHOICES, ModelSpec, example, from_toml
from llmc.compiler.spec.limits import LIMITS
from llmc.compiler.spec.tensors import TABLE


@pytest.fixture(scope="module")
def maker(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("docs/make_spec_page.py")


def test_the_page_is_up_to_date(maker: ModuleType) -> None:
    assert maker.PAGE.read_text(encoding="utf-8") == maker.page(), "run: python docs/make_spec_page.py"


def test_the_page_has_every_key_value_and_tensor(maker: ModuleType) -> None:
    page = maker.page()
    for field in dataclasses.fields(ModelSpec):
        assert f"[{field.name}]" in page or f"`{field.name}`" in page
    for path in {*CHOICES, *LIMITS}:
        assert f"| `{path.split('.')[1]}` | " in page.split(f"## [{path.split('.')[0]}]")[1].split("\n## ")[0]
    for name in TABLE:
        assert f"| `{name}` | " in page
    for choices in CHOICES.values():
        assert all(f"`{choice}`" in page for choice in choices)


def test_the_example_on_the_page_is_a_spec(maker: ModuleType) -> None:
    assert from_toml(maker.page().split("```toml\n")[1].split("```")[0]) == example()


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (lambda b: True, "always"),
        (lambda b: b.norm.bias, "`norm.bias` is true"),
        (lambda b: not b.head.tied, "`head.tied` is false"),
        (lambda b: b.embedding.width != 0, "`embedding.width` is not 0"),
        (lambda b: b.norm.weight != "none", "`norm.weight` is not none"),
        (lambda b: b.norm.place in ("sum", "pre") and b.norm.bias, "`norm.place` is pre or sum, `norm.bias` is true"),
        (lambda b: b.norm.bias and b.norm.final, "`norm.bias` is true, `norm.final` is true"),
    ],
)
def test_words_of_conditions(wanted: Callable[[Any], bool], words: str, maker: ModuleType) -> None:
    assert maker.condition_words(wanted) == words


def test_a_condition_that_words_would_get_wrong(maker: ModuleType) -> None:
    with pytest.raises(ValueError, match="no single `and`"):
        maker.condition_words(lambda b: b.norm.bias or b.norm.final)


def test_tried_settings_are_those_of_a_spec() -> None:
    """A name the conditions ask for that no block has would be taken for true or false."""
    blocks = SimpleNamespace(**{field.name: getattr(example(), field.name) for field in dataclasses.fields(ModelSpec)})
    for _, wanted in TABLE.values():
        assert isinstance(wanted(blocks), bool)
