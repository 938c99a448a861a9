"""A variant's SOURCES, whose digest says whether its kernels have changed."""

from __future__ import annotations

import pytest
import simt

from kda_kernels import variants


@pytest.mark.parametrize("name", variants.NAMES)
def test_sources_name_every_module_that_the_code_depends_on(name: str) -> None:
    module = variants.load(name)
    own = module.__name__.split(".")[-1]
    forms = ("split", "split_chunked") if own == "split" else (own,)
    assert {f"{needed}.py" for needed in simt.in_order(forms)} <= set(module.SOURCES)
    assert f"{own}.py" in module.SOURCES
    assert len(set(module.SOURCES)) == len(module.SOURCES)
