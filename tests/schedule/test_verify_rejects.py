"""What cannot run is refused, with rank, instruction and reason, and the place is drawn."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from oracle import check_programs, is_exchange, pipelines
from paddle_vpp_ext.planning.planner import make_plan
from paddle_vpp_ext.schedule.action import Action, parse_order
from paddle_vpp_ext.schedule.dependencies import Dependencies, Exchange, Transfer
from paddle_vpp_ext.schedule.plan import plan_orders
from paddle_vpp_ext.schedule.verify import ScheduleError, verify_orders, verify_programs


def plan_and_flow(p, num_chunks, m, blocking=False):
    plan = make_plan("VPP", p, num_chunks, m, {"groups": "even"}, blocking=blocking)
    return plan, Dependencies(plan.orders, num_chunks, m)


def refused(orders, num_chunks, m):
    with pytest.raises(ScheduleError) as error:
        verify_orders([parse_order(o) for o in orders], num_chunks, m)
    return str(error.value)


def refused_programs(dependencies, programs):
    with pytest.raises(ScheduleError) as error:
        verify_programs(dependencies, programs)
    return str(error.value)


GOOD = "F0.0 F0.1 B0.0 B0.1"


@pytest.mark.parametrize(
    "order, place, reason",
    [
        ("F0.0 F0.1 F0.1 B0.0 B0.1", "rank 1, instruction 2 (F0.1)", "a second time"),
        ("F0.0 B0.1 F0.1 B0.0", "rank 1, instruction 1 (B0.1)", "before F0.1"),
        ("F0.0 F0.1 B0.0 B0.1 F1.0", "rank 1, instruction 4 (F1.0)", "chunks 0..0"),
        ("F0.0 F0.1 F0.2 B0.0 B0.1", "rank 1, instruction 2 (F0.2)", "micro-batches 0..1"),
        ("F0.0 F0.1 I0.0 B0.0 B0.1", "rank 1, instruction 3 (B0.0)", "both whole (B) and split"),
        ("F0.0 F0.1 B0.0 W0.1 I0.1", "rank 1, instruction 3 (W0.1)", "before I0.1"),
    ],
)
def test_a_wrong_order_names_the_place_and_draws_it(order, place, reason):
    text = refused([GOOD, order], 1, 2)
    head, *grid = text.splitlines()
    assert place in head and reason in head
    assert len(grid) == 2 and f">{place.split('(')[1][:-1]}<" in grid[1]


@pytest.mark.parametrize(
    "order, reason",
    [
        ("F0.0 B0.0", "rank 1 has no F0.1"),
        ("F0.0 F0.1 B0.0", "rank 1 has neither B0.1 nor I0.1"),
        ("F0.0 F0.1 B0.0 I0.1", "rank 1 has neither B0.1 nor W0.1"),
        ("", "rank 1 has no F0.0"),
    ],
)
def test_a_missing_action_is_named(order, reason):
    assert reason in refused([GOOD, order], 1, 2)


def test_orders_that_wait_for_each_other_name_who_needs_what_from_whom():
    orders = [parse_order("F0.0 B0.0 F0.1 B0.1"), parse_order("F0.0 F0.1 B0.0 B0.1")]
    with pytest.raises(ScheduleError) as error:
        plan_orders(orders, 1, 2)
    head, *grid = str(error.value).splitlines()
    assert "deadlock: rank 0 cannot start B0.0 (its action 1)" in head and "B1.0 from rank 1" in head
    assert "[B0.0]" in grid[0] and "[F0.1]" in grid[1]


def test_a_dropped_receive_is_missed_by_its_action():
    plan, dependencies = plan_and_flow(4, 2, 6)
    program = plan.programs[2]
    at = next(j for j, x in enumerate(program) if is_exchange(x) and x.receives)
    lost = program[at].receives[0]
    program[at] = program[at]._replace(receives=program[at].receives[1:])
    text = refused_programs(dependencies, plan.programs)
    assert "rank 2, instruction" in text and f"{lost} is not received before it" in text and ">F0.0<" in text


def test_a_dropped_send_is_found_at_the_next_one():
    plan, dependencies = plan_and_flow(4, 2, 6)
    program = plan.programs[1]
    at = next(j for j, x in enumerate(program) if is_exchange(x) and x.sends)
    lost = program[at].sends[0]
    program[at] = program[at]._replace(sends=program[at].sends[1:])
    text = refused_programs(dependencies, plan.programs)
    assert "rank 1, instruction" in text and f"the next to be sent is {lost}" in text and ">" in text


def test_a_dropped_last_send_is_found_in_the_queue():
    plan, dependencies = plan_and_flow(2, 2, 3)
    program = plan.programs[1]
    at = max(j for j, x in enumerate(program) if is_exchange(x) and any(t.kind == "B" for t in x.sends))
    program[at] = Exchange((), program[at].receives)
    assert "rank 1 ends with 1 in its backward buffer queue, the first is B1.2" in refused_programs(dependencies, plan.programs)


def test_a_receive_that_comes_too_late_is_missed():
    plan, dependencies = plan_and_flow(4, 1, 4)
    program = plan.programs[3]
    at = next(j for j, x in enumerate(program) if is_exchange(x))
    assert program[at + 1] == Action("F", 0, 0)
    program[at], program[at + 1] = program[at + 1], program[at]
    text = refused_programs(dependencies, plan.programs)
    assert "rank 3, instruction 0 (F0.0): F2.0 is not received before it" in text


def test_a_send_before_its_action_is_refused():
    orders = [parse_order("F0.0 B0.0")] * 2
    f, b = Transfer("F", 0, 0), Transfer("B", 1, 0)
    programs = [
        [Exchange((f,), ()), orders[0][0], Exchange((), (b,)), orders[0][1]],
        [Exchange((), (f,)), *orders[1], Exchange((b,), ())],
    ]
    text = refused_programs(Dependencies(orders, 1, 1), programs)
    assert "rank 0, instruction 0 (send(F0.0)): it sends F0.0, but nothing is made that is not sent yet" in text
    assert ">send(F0.0)<" in text


def test_sends_out_of_the_order_in_which_they_were_made_are_refused():
    plan, dependencies = plan_and_flow(2, 2, 4)
    program = plan.programs[0]
    one, two = [(j, t) for j, x in enumerate(program) if is_exchange(x) for t in x.sends if t.kind == "F"][:2]
    program[one[0]] = Exchange((two[1],), program[one[0]].receives)
    text = refused_programs(dependencies, plan.programs)
    assert f"it sends {two[1]}, but" in text and "rank 0, instruction" in text


def test_an_activation_that_would_meet_a_gradient_at_two_stages_is_refused():
    plan, dependencies = plan_and_flow(2, 2, 4, blocking=True)
    program = plan.programs[1]
    at = next(j for j, x in enumerate(program) if is_exchange(x) and {t.kind for t in x.sends} == {"F", "B"})
    # Each queue by itself stays FIFO; but both go to rank 0, which receives them in the other order.
    program[at] = program[at]._replace(sends=program[at].sends[::-1])
    text = refused_programs(dependencies, plan.programs)
    one, other = sorted(program[at].sends)
    assert f"its {one} meets {other} at the other end" in text or f"its {other} meets {one} at the other end" in text
    assert text.startswith("rank ") and ", instruction " in text and ">" in text


def test_programs_that_wait_for_each_other_are_refused():
    orders = [parse_order("F0.0 F1.0 B1.0 B0.0")] * 2
    f, g, h = (Transfer("F", part, 0) for part in range(3))
    b, c, d = (Transfer("B", part, 0) for part in (3, 2, 1))
    F0, F1, B1, B0 = orders[0]
    send, receive = (lambda t: Exchange((t,), ())), (lambda t: Exchange((), (t,)))
    good = [
        [F0, send(f), receive(g), F1, send(h), receive(b), B1, send(c), receive(d), B0],
        [receive(f), F0, send(g), receive(h), F1, B1, send(b), receive(c), B0, send(d)],
    ]
    dependencies = Dependencies(orders, 2, 1)
    verify_programs(dependencies, good)
    good[0][1:3] = good[0][2:0:-1]  # rank 0 wants the answer before it sends the question
    text = refused_programs(dependencies, good)
    assert "rank 0, instruction 1 (receive(F1.0)): deadlock: it waits for rank 1 to join F1.0" in text
    assert ">receive(F1.0)<" in text and "[receive(F0.0)]" in text


def test_a_program_that_leaves_its_order_is_refused():
    plan, dependencies = plan_and_flow(2, 1, 2)
    program = plan.programs[0]
    program.remove(program[-1])
    assert "rank 0" in refused_programs(dependencies, plan.programs)


@st.composite
def mutations(draw):
    """(flow, programs after one change to them, whether the change must be fatal)."""
    p, num_chunks, m = draw(pipelines(max_p=4, max_v=3))
    plan, dependencies = plan_and_flow(p, num_chunks, min(m, 7), blocking=draw(st.booleans()))
    programs = draw(st.sampled_from(("merged", "serial")))
    programs = plan.serial_programs if programs == "serial" else plan.programs
    program = programs[draw(st.integers(0, p - 1))]
    at = draw(st.integers(0, len(program) - 1))
    change = draw(st.sampled_from(("drop", "double", "swap", "move")))
    if change == "drop":
        del program[at]
    elif change == "double":
        program.insert(at, program[at])
    else:
        other = at + 1 if change == "swap" else draw(st.integers(0, len(program) - 1))
        assume(other < len(program) and program[at] != program[other])
        program.insert(other, program.pop(at))
    return dependencies, programs, change in ("drop", "double")


@settings(max_examples=200)
@given(mutations())
def test_no_change_to_a_program_gets_through_unless_it_still_runs(mutation):
    dependencies, programs, fatal = mutation
    try:
        verify_programs(dependencies, programs)
    except ScheduleError:
        return
    assert not fatal
    check_programs(programs, dependencies.num_chunks)


@settings(max_examples=50)
@given(st.data())
def test_no_dropped_doubled_or_foreign_action_gets_through(data):
    p, num_chunks, m = data.draw(pipelines(max_p=4, max_v=3))
    orders = [list(order) for order in make_plan("VPP", p, num_chunks, m).orders]
    rank = data.draw(st.integers(0, p - 1))
    at = data.draw(st.integers(0, len(orders[rank]) - 1))
    change = data.draw(st.sampled_from(("drop", "double", "backward first")))
    if change == "drop":
        del orders[rank][at]
    elif change == "double":
        orders[rank].append(orders[rank][at])
    else:
        orders[rank].insert(0, orders[rank].pop())
    with pytest.raises(ScheduleError, match=f"rank {rank}"):
        verify_orders(orders, num_chunks, m)


def test_the_drawing_shows_the_nearest_ranks_of_many():
    orders = make_plan("VPP", 40, 1, 3).orders
    orders[30].append(orders[30][0])
    with pytest.raises(ScheduleError) as error:
        verify_orders(orders, 1, 3)
    lines = str(error.value).splitlines()[1:]
    assert len(lines) == 16 and any("rank 30" in line and ">F0.0<" in line for line in lines)


def test_what_is_received_and_never_used_is_named_the_first_of_it():
    plan, dependencies = plan_and_flow(2, 1, 2)
    one_sided = [list(program) for program in plan.programs]
    for part in (7, 5):
        one_sided[0].append(Exchange((), (Transfer("B", part, 0),)))
    assert refused_programs(dependencies, one_sided) == "rank 0 receives B5.0 and never uses it"
