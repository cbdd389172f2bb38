"""Rotary embedding."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import InputError, UnsupportedError
from coterie.modeling.rope import Rope, Yarn, read_rope, rotate, tables, yarn_scale

FILE = Path("config.json")
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def at(position, values, rope):
    cos, sin = tables(rope, position + 1)
    return rotate(np.array([[values]], np.float32), cos[None, -1:], sin[None, -1:])[0, 0]


def test_a_pair_is_turned_by_its_angle():
    # theta 100, 4 dimensions: frequencies 1 and 1/10; pairs are (x0, x2) and (x1, x3); position 3
    turned = at(3, [1, 1, 0, 0], Rope(100.0, 4, None))
    np.testing.assert_allclose(turned, [math.cos(3), math.cos(0.3), math.sin(3), math.sin(0.3)], rtol=1e-6)


def test_products_depend_on_distance_alone():
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 8))
    rope = Rope(10000.0, 8, None)
    near = at(5, query, rope) @ at(2, key, rope)
    far = at(105, query, rope) @ at(102, key, rope)
    assert near == pytest.approx(far, abs=1e-4)


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones():
    # the fastest pair turns once in 2 pi positions, the slowest hardly: factor 4 stretches it fourfold
    rope = read_rope(FILE, YARN, 64)
    cos, sin = tables(rope, 2)
    angles = np.arctan2(sin[1], cos[1])
    plain = 10000.0 ** -(np.arange(0, 64, 2) / 64)
    assert angles[0] == pytest.approx(plain[0], rel=1e-5)
    assert angles[-1] == pytest.approx(plain[-1] / 4, rel=1e-4)
    assert np.hypot(cos, sin) == pytest.approx(0.1 * math.log(4) + 1, rel=1e-5)


def test_deepseek_scales_scores_instead_of_angles_where_both_scales_are_equal():
    rope = read_rope(FILE, {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, 64)
    cos, sin = tables(rope, 2)
    assert np.hypot(cos, sin) == pytest.approx(1)
    assert yarn_scale(rope) == pytest.approx(0.1 * math.log(4) + 1)
    assert yarn_scale(Rope(1e4, 8, None)) == 1


def test_older_files_name_the_kind_otherwise():
    older = {"type": "yarn", **{name: value for name, value in YARN.items() if name != "rope_type"}}
    assert read_rope(FILE, older, 8) == read_rope(FILE, YARN, 8) == Rope(10000.0, 8, Yarn(4.0, 64))


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"rope_type": "llama3", "rope_theta": 1e4}, UnsupportedError, "llama3.*only default and yarn"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, UnsupportedError, "partial_rotary_factor"),
        ({**YARN, "short_factor": [1]}, UnsupportedError, "short_factor"),
        ({"rope_type": "default"}, InputError, "rope_theta is 'None'"),
        ({"rope_theta": "many"}, InputError, "rope_theta is 'many'"),
        ({**YARN, "factor": None}, InputError, "missing required field `factor`"),
        ({**YARN, "factor": 0.5}, InputError, "factor 0.5"),
    ],
)
def test_other_parameters_are_refused_by_name(parameters, error, message):
    with pytest.raises(error, match=message):
        read_rope(FILE, parameters, 8)
