"""Actions and orders can be written down and read back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_vpp_ext.schedule.action import KINDS, Action, format_order, parse_order
from paddle_vpp_ext.schedule.dependencies import Exchange, Transfer

actions = st.builds(Action, st.sampled_from(KINDS), st.integers(0, 10**6), st.integers(0, 10**6))


@given(actions)
def test_an_action_is_read_back_as_it_was_written(action):
    assert Action.parse(str(action)) == action


@given(st.lists(actions))
def test_an_order_is_read_back_as_it_was_written(order):
    assert parse_order(format_order(order)) == order


def test_the_text_form_is_the_documented_one():
    assert str(Action("F", 1, 7)) == "F1.7"
    assert format_order([Action("I", 0, 0), Action("W", 12, 3)]) == "I0.0 W12.3"


@pytest.mark.parametrize("text", ["", "F", "F1", "F1.", "f1.7", "X1.7", "F-1.7", "F1.7 ", " F1.7", "F1.7\n", "F1,7", "F1.7.2", "F١.7"])
def test_text_that_is_no_action_is_refused_and_shown(text):
    with pytest.raises(ValueError) as error:
        Action.parse(text)
    assert repr(text) in str(error.value) and "F1.7" in str(error.value)


def test_transfers_say_what_they_carry_and_where_it_goes():
    assert str(Exchange((Transfer("F", 3, 7),), (Transfer("B", 4, 0),))) == "send(F3.7) receive(B4.0)"
    assert Transfer("F", 3, 7).to_part == 4 and Transfer("B", 4, 0).to_part == 3
