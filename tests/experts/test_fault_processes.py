"""The fault scripts on real processes, under load: two clients that compute all the time and compare each sum."""

import pytest

from expert_world import ProcessWorld, play_and_check
from fault_scripts import SCRIPTS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with ProcessWorld(tmp_path_factory.mktemp("experts")) as running:
        yield running


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_no_call_fails_and_every_sum_is_right(world, script):
    play_and_check(world, script)
