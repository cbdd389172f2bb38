"""A cluster under load and random faults for minutes, and what would be found."""

import math
import sys

import pytest
import soak


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_minutes_of_faults_lose_nothing_and_leave_nothing(tmp_path):
    result = soak.soak(tmp_path, 2.0, load=0.7, every_s=10.0, seed=1, show=lambda line: print(line, file=sys.stderr))
    assert result.problems() == []
    assert result.faults.total() >= 6
    assert result.ends["served"] > 0.9 * result.ends.total()


def test_memory_that_grows_is_found():
    flat = [100.0 + (i % 7) for i in range(600)]
    growing = [value + 0.05 * i for i, value in enumerate(flat)]  # 180 MiB an hour
    assert soak.Result(1.0, memory_mib=flat, descriptors=[9] * 600).problems() == []
    (problem,) = soak.Result(1.0, memory_mib=growing, descriptors=[9] * 600).problems()
    assert "memory grows by 180" in problem


def test_growth_while_caches_fill_is_no_leak():
    filling = [min(i, 140) + 100.0 for i in range(600)]
    assert soak.Result(1.0, memory_mib=filling, descriptors=[9] * 600).problems() == []


def test_a_short_run_may_fill_pools_and_finds_a_leak_of_a_few_kib_a_request():
    filling = [96 - 4 * math.exp(-second / 60) for second in range(120)]  # still by 40 MiB an hour in its last 30 s
    assert soak.slope_per_hour(filling)[0] > 40
    assert soak.Result(1.0, memory_mib=filling, descriptors=[9] * 120).problems() == []
    leaking = [92 + second * 20 * 3 / 1024 for second in range(120)]  # 3 KiB of each of 20 requests a second
    assert len(soak.Result(1.0, memory_mib=leaking, descriptors=[9] * 120).problems()) == 1


def test_a_wrong_text_and_a_cut_stream_are_found():
    result = soak.Result(1.0)
    result.ends.update(served=5, wrong=1, cut=2)
    result.ends["500"] = 3
    assert result.problems() == ["2 requests cut", "1 requests wrong"]
