"""Families and variants of them: what test_families.py compiles, and docs/families.md lists.

CASES: name -> model_type and what differs from the tiny model of tests/conftest.py. Two layers of width 64, or as many
as it takes to have one of each kind. Windows and original contexts are shorter than the test's texts. REMOTE: those
that transformers has not.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from family_lists.dense import DENSE
from family_lists.experts import EXPERTS
from family_lists.remote import REMOTE, Remote
from latent_cases import LATENT_CASES

CASES = DENSE | EXPERTS | LATENT_CASES

__all__ = ["CASES", "REMOTE", "Remote"]
