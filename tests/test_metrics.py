"""TTFT and TPOT, by hand."""

import pytest

from coterie.errors import InputError
from coterie.metrics import RequestTimeline


def test_ttft_counts_from_sending_and_tpot_leaves_the_first_token_out():
    # 5 tokens: the first 0.5 s after sending, then 4 gaps in 2 s
    timeline = RequestTimeline(sent_s=10.0, first_token_s=10.5, last_token_s=12.5, output_tokens=5)
    assert timeline.ttft_s == 0.5
    assert timeline.tpot_s == 0.5


def test_one_token_has_no_time_per_output_token():
    assert RequestTimeline(0.0, 1.0, 1.0, 1).tpot_s is None


@pytest.mark.parametrize("times", [(1.0, 0.5, 2.0), (0.0, 2.0, 1.0)])
def test_times_out_of_order_are_refused(times):
    with pytest.raises(InputError, match="not in order"):
        RequestTimeline(*times, output_tokens=2)


def test_no_output_token_is_refused():
    with pytest.raises(InputError, match="0 output tokens"):
        RequestTimeline(0.0, 1.0, 1.0, 0)
