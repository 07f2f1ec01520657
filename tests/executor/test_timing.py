"""Whatever the order in which computations and transfers happen to end, the result is the same.

Two thousand seeds here, TIMING_SEEDS many in ci/drills.sh.
"""

import os
import random

import pytest

from inprocess import World
from paddle_vpp_ext.executor import resolve, run
from paddle_vpp_ext.planning.planner import make_plan
from test_executor import ToyStage, check

SEEDS = int(os.environ.get("TIMING_SEEDS", 2000))
SCHEDULES = (
    ("VPP", {"groups": "first"}),
    ("VPP", {"groups": "even"}),
    ("VPP", {"groups": "even", "slope": 1}),
    ("VPP", {"groups": "even", "overlap": True}),
    ("FthenB", {}),
    ("ZBVPP", {}),
)


class LateWorld(World):
    """Exchanges start and end late, in an order that the seed picks, one at a time."""

    def _progress(self):
        while True:
            possible = [stream for stream in self.streams.values() if stream and (stream[0].can_end() or not stream[0].posted)]
            somebody_can_go_on = any(self.wants[rank] and self.wants[rank]() for rank in self.alive)
            if not possible or (somebody_can_go_on and self.random.random() < 0.5):
                return
            stream = self.random.choice(possible)
            if stream[0].can_end():
                stream.pop(0).end()
            else:
                stream[0].post()


class LateStage(ToyStage):
    """Other ranks may do anything before and after each of its computations."""

    def __init__(self, world, rank, *args):
        super().__init__(rank, *args)
        self.world = world

    def pause(self):
        while self.world.random.random() < 0.4:
            self.world.yield_until(self.rank, lambda: True)

    def forward(self, *args):
        self.pause()
        result = super().forward(*args)
        self.pause()
        return result

    def backward_input(self, *args):
        self.pause()
        result = super().backward_input(*args)
        self.pause()
        return result

    def backward_weight(self, *args):
        self.pause()
        super().backward_weight(*args)


@pytest.mark.parametrize("share", range(4))
def test_no_timing_changes_a_result(share):
    plans = {}
    for seed in range(share, SEEDS, 4):
        pick = random.Random(seed)
        p, v, blocking = pick.randint(2, 4), pick.randint(1, 3), pick.random() < 0.5
        name, options = pick.choice(SCHEDULES)
        m = pick.randint(p if options.get("overlap") else 1, 2 * p + 1)
        key = name, repr(options), p, v, m, blocking
        if key not in plans:
            plans[key] = make_plan(name, p, v, m, options, blocking)
        plan = plans[key]
        world = LateWorld(p, blocking, seed)
        stages = [LateStage(world, rank, p, v) for rank in range(p)]

        def of_rank(rank, transport, plan=plan, stages=stages, p=p, v=v, blocking=blocking):
            startup = plan.startups[rank] if plan.startups else None
            overlap = startup is not None and not blocking
            run(resolve(plan.programs[rank], rank, p, v, startup), stages[rank], transport, overlap)

        try:
            world.run(of_rank)
            check(plan, stages)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {key}") from error
