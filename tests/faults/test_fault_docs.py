"""What docs/faults.md says is held by tests is held by tests that there are."""

import re
from pathlib import Path

import pytest
from fault_cells import FAULTS

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "faults.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+(?:/\w+)*\.py::\w+)`", PAGE))))
def test_a_test_that_the_page_names_is_there(name):
    file, _, test = name.partition("::")
    assert re.search(rf"^(async )?def {test}\(", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_is_tested_is_on_the_page(fault):
    assert re.search(rf"^\| .*\b{fault}\b.* \|", PAGE, re.MULTILINE)
