"""Declines are typed, and every code tells what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fuse_losses.report.decline import CODES, Decline, Declined

PACKAGE = Path(__file__).parents[2] / "fuse_losses"


@pytest.mark.parametrize("code", CODES)
def test_text(code: str) -> None:
    meaning, remedy = CODES[code]
    assert meaning and remedy and not meaning.endswith(".") and not remedy.endswith(".")
    text = str(Decline(code, "because of this", "model.py:12: loss = f(x)"))
    assert text == f"[{code}] because of this at model.py:12: loss = f(x); what to do: {remedy}"


def test_without_a_place() -> None:
    assert " at " not in str(Decline("opaque", "it is")).split(";")[0]


def test_an_unknown_code_is_an_error() -> None:
    with pytest.raises(KeyError, match="no such decline code: opaqe"):
        Decline("opaqe", "")


def test_declined_carries_a_decline() -> None:
    error = Declined("rows_mix", "they do", "here")
    assert error.decline == Decline("rows_mix", "they do", "here")
    assert str(error) == "[rows_mix] they do"


def test_every_code_that_the_sources_use_exists() -> None:
    sources = "\n".join(p.read_text("utf-8") for p in PACKAGE.rglob("*.py") if p.name != "decline.py")
    used = set(re.findall(r"""(?:Unlifted|Decline|Declined)\(\s*"(\w+)\"""", sources))
    used |= {code for line in re.findall(r"code = (.*)", sources) for code in re.findall(r'"(\w+)"', line)}
    assert len(used) > 10 and used <= set(CODES)
