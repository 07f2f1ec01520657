"""Whatever is typed, the parsers and the planner answer or raise ValueError: no other error, no hang, bounded memory."""

import resource
import subprocess
import sys
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paddle_vpp_ext.planning.options import ENGINE_KEYS, parse_schedule
from paddle_vpp_ext.planning.planner import make_plan
from paddle_vpp_ext.planning.registry import SCHEDULES
from paddle_vpp_ext.schedule.action import Action, parse_order
from paddle_vpp_ext.schedule.plan import MAX_ACTIONS
from paddle_vpp_ext.search.memory import read_memory
from paddle_vpp_ext.tools import order_file

BUILT_IN = ("VPP", "FthenB", "ZBVPP", "auto")
HUGE = (1 << 20, 1 << 31, 1 << 63, 10**30, 10**400)

names = st.sampled_from([*BUILT_IN, "1F1B", "paddle", "", "vpp"]) | st.text(max_size=8)
keys = st.sampled_from([*ENGINE_KEYS, *(key for name in BUILT_IN for key in SCHEDULES[name].keys)]) | st.text(max_size=8)
values = (
    st.text(max_size=12)
    | st.from_regex(r"\A-?[0-9+.e%GMKi]{1,12}\Z")
    | st.sampled_from(["on", "off", "nan", "inf", "-inf", "1e999", "9" * 5000, "", "first", "even", "7+4", "1+-1"])
)
schedule_texts = st.text(max_size=40) | st.builds(
    lambda name, items: f"{name}:" + ",".join(f"{key}={value}" for key, value in items),
    names,
    st.lists(st.tuples(keys, values), max_size=4),
)


def answer(function, *args):
    """What the function returns, or None if it raises ValueError with a text."""
    try:
        return function(*args)
    except ValueError as error:
        assert str(error)
        return None


@given(schedule_texts)
@example("VPP:groups=" + "9" * 5000)
@example("VPP:" + ",".join(["groups=even"] * 1000))
@settings(max_examples=500, deadline=1000)
def test_a_schedule_text_is_read_or_refused(text):
    choice = answer(parse_schedule, text)
    assert choice is None or choice.text == text.strip()


@given(st.none() | st.integers() | st.binary())
def test_a_schedule_that_is_no_text_is_refused(value):
    assert answer(parse_schedule, value) is None


action_texts = st.text(max_size=20) | st.from_regex(r"\A[FBIWX]?-?[0-9]{0,6}\.?[0-9]{0,6}\Z")


@given(action_texts)
@example("F1." + "9" * 5000)
@settings(max_examples=500)
def test_an_action_is_read_or_refused(text):
    action = answer(Action.parse, text)
    assert action is None or Action.parse(str(action)) == action


@given(st.text("FBIW0123456789. \n\t", max_size=60))
def test_an_order_is_read_or_refused(text):
    answer(parse_order, text)


@given(
    st.text(max_size=80)
    | st.lists(st.lists(action_texts, max_size=5), max_size=5).map(lambda rows: "\n".join(map(",".join, rows)))
    | st.lists(st.sampled_from(["rank 0", "rank 1:", "rank 99999999999", "F0.0", "B0.0", ",", ";", "\n", '"', "#"]), max_size=20).map(
        "".join
    )
)
@settings(max_examples=500)
def test_a_file_of_orders_is_read_or_refused(text):
    orders = answer(order_file.parse, text)
    assert orders is None or len(orders) >= 2


@given(values)
def test_memory_is_read_or_refused(text):
    answer(read_memory, text)


numbers = (
    st.integers(-3, 9)
    | st.sampled_from([sign * value for value in HUGE for sign in (1, -1)])
    | st.floats()
    | st.none()
    | st.booleans()
    | st.text(max_size=3)
)


@given(st.sampled_from(BUILT_IN), numbers, numbers, numbers, st.booleans(), st.booleans())
@settings(max_examples=400, deadline=5000)
def test_a_plan_is_made_or_refused(schedule, p, v, m, blocking, forward_only):
    plan = answer(lambda: make_plan(schedule, p, v, m, blocking=blocking, forward_only=forward_only))
    whole = all(type(number) is int for number in (p, v, m))
    fits = whole and p >= 2 and v >= 1 and m >= 1 and 2 * p * v * m <= MAX_ACTIONS
    assert (plan is not None) == fits


@pytest.mark.parametrize("numbers", [(1 << 19, 1, 1), (2, 1 << 18, 1), (2, 1, 1 << 18), (64, 8, 1024)])
def test_the_largest_plans_are_at_the_limit(numbers):
    """None of them is made here: the next larger one is refused at once, with the limit."""
    p, v, m = numbers
    assert 2 * p * v * m <= MAX_ACTIONS
    began = time.monotonic()
    with pytest.raises(ValueError, match=f"a plan may have {MAX_ACTIONS} at most"):
        make_plan("VPP", p, v, m + MAX_ACTIONS)
    assert time.monotonic() - began < 1


LARGE = """
import sys
from paddle_vpp_ext.planning.planner import make_plan
make_plan(sys.argv[1], 16, 4, 1024, blocking=sys.argv[2] == "True")
"""


@pytest.mark.parametrize("schedule, blocking", [("VPP", True), ("FthenB", True), ("ZBVPP", False)])
def test_a_large_plan_keeps_to_its_memory(schedule, blocking):
    """131,072 actions in a process that may have 1 GB of data in all, numpy's included."""
    limit = 1 << 30

    def limited():
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    subprocess.run([sys.executable, "-c", LARGE, schedule, str(blocking)], check=True, timeout=120, preexec_fn=limited)


HUGE_FILE = "rank 0: F0.{m} B0.{m}\nrank 1: F0.{m} B0.{m}\n"


@pytest.mark.parametrize("m", [10**7, 10**12, 10**40])
def test_a_file_with_a_huge_micro_batch_is_refused_at_once(m):
    from paddle_vpp_ext.schedule.plan import plan_orders

    orders = order_file.parse(HUGE_FILE.format(m=m))
    with pytest.raises(ValueError, match="at most"):
        plan_orders(orders, 1, m + 1)
