import numpy as np
import pytest

from coterie.errors import InputError
from coterie.placement import Placement

LOAD = np.array([[10.0, 4, 6]])


def placed(experts=(0, 1, 0, 2), rank_of=(0, 0, 1, 1), shares=(0.25, 1, 0.75, 1)):
    return Placement(np.array([experts]), np.array(rank_of), np.array([shares]))


def test_a_placement_tells_owners_replicas_and_loads():
    placement = placed()
    assert placement.owners(0, 0) == (0, 1)
    assert placement.owners(0, 2) == (1,)
    assert placement.held(0, 1) == (0, 2)
    assert placement.replicas.tolist() == [[2, 1, 1]]
    # 10 x 0.25 + 4 = 6.5 and 10 x 0.75 + 6 = 13.5; the mean is 10
    assert placement.loads(LOAD).tolist() == [[6.5, 13.5]]
    assert placement.imbalance(LOAD).tolist() == [1.35]


def test_the_rank_of_an_expert_is_told_where_it_has_but_one():
    assert placed((2, 0, 1, 3), shares=(1,) * 4).rank_of_expert().tolist() == [[0, 1, 0, 1]]
    with pytest.raises(InputError, match="has replicas"):
        placed().rank_of_expert()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"experts": (0, 1, 0, 3)}, "layer 0 lacks expert 2"),
        ({"experts": (0, 0, 1, 2)}, "layer 0 has two replicas on one rank of expert 0"),
        ({"experts": (0, 1, 0, -1)}, "expert -1 is negative"),
        ({"rank_of": (0, 0, 2, 2)}, "must be 0, 1, 2"),
        ({"rank_of": (1, 1, 0, 0)}, "must be 0, 1, 2"),
        ({"rank_of": (0, 0, 1)}, "shapes"),
        ({"shares": (0.5, 1, 0.6, 1)}, "layer 0 has shares that do not sum to 1 of expert 0"),
        ({"shares": (-0.5, 1, 1.5, 1)}, "a share is negative"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        placed(**wrong)


def test_loads_of_another_model_are_refused():
    with pytest.raises(InputError, match=r"shape \(1, 4\); need \(1, 3\)"):
        placed().loads(np.ones((1, 4)))
