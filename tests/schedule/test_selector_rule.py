"""The selector's rule is Paddle's since 3.0."""

import pytest

from paddle_vpp_ext.planning.planner import make_plan
from paddle_vpp_ext.planning.select import select


def test_the_rule_for_every_small_pipeline():
    for p in range(2, 9):
        for num_chunks in range(1, 5):
            for m in range(1, 4 * p + 1):
                if num_chunks == 1 or m >= 2 * p:
                    assert select(p, num_chunks, m) == "VPP"
                elif m >= p:
                    assert select(p, num_chunks, m) == "FthenB"
                else:
                    with pytest.raises(ValueError) as error:
                        select(p, num_chunks, m)
                    wanted = f"The accumulate_steps({m}) should be greater than or equal to pp_degree({p})"
                    assert wanted in str(error.value) and '"VPP"' in str(error.value)


def test_what_the_rule_picks_can_be_planned_where_paddle_fails():
    for p, num_chunks, m in ((2, 2, 2), (2, 2, 5), (4, 2, 6), (4, 3, 7)):  # p == 2, and p < m < 2p
        make_plan(select(p, num_chunks, m), p, num_chunks, m)
