"""docs/seed_models.md is what its generator writes, and the files and cases it names exist and belong together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from llmc.frontends.gguf.architectures import ARCHITECTURES

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
import gguf_cases
from family_cases import CASES, REMOTE
from translator_cases import TRANSLATORS


@pytest.fixture(scope="module")
def maker(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("docs/make_seed_page.py")


def test_the_page_is_up_to_date(maker: ModuleType) -> None:
    assert maker.PAGE.read_text(encoding="utf-8") == maker.page(), "run: python docs/make_seed_page.py"


def test_every_case_is_of_its_family(maker: ModuleType, root: Path) -> None:
    families = {case: kind for case, (kind, _) in CASES.items()} | {c: r.model_type for c, r in REMOTE.items()}
    for row in maker.ROWS:
        if not row.test:
            continue
        assert (root / row.source).is_file(), row
        assert (root / row.test).is_file(), row
        if row.test == maker.FAMILIES:
            assert families[row.case] == Path(row.source).stem, row
        elif row.test == maker.GGUF:
            assert gguf_cases.CASES[row.case][0] in ARCHITECTURES, row
        elif row.test == maker.TRANSLATORS:
            assert TRANSLATORS[row.case][0] == Path(row.source).stem, row
        else:
            assert f"def {row.case}(" in (root / row.test).read_text(encoding="utf-8"), row


def test_all_are_there(maker: ModuleType) -> None:
    assert len(maker.ROWS) == len({(row.shipped, row.format) for row in maker.ROWS}) == 35
    assert all(row.test for row in maker.ROWS)
