"""The Python blocks of the documentation run as they stand."""

import re
from pathlib import Path

import numpy as np
import pytest

from traces import COTERIE_TINY, tiny_moe_trace

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ["library.md", "modeling.md"]


def blocks(page):
    """Number of the first line and text of each Python block."""
    text = (DOCS / page).read_text()
    return [
        (text.count("\n", 0, found.start(1)), found[1])
        for found in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_one_after_another(page, tmp_path, monkeypatch, capsys):
    tiny_moe_trace().select(np.random.default_rng(0).permutation(768)[:384]).save(tmp_path / "my.trace")
    (tmp_path / "checkpoint").symlink_to(COTERIE_TINY)
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    namespace = {}
    assert blocks(page)
    for line, block in blocks(page):
        exec(compile("\n" * line + block, str(DOCS / page), "exec"), namespace)  # errors point into the page
    assert "nan" not in capsys.readouterr().out


def test_pages_name_no_python_block_that_is_not_run():
    pages = {path.name for path in DOCS.glob("*.md") if "```python" in path.read_text()}
    assert pages == set(PAGES)
