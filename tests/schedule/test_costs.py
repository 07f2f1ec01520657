"""Costs go to a file and back; memory limits are read, kept, and explained."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_vpp_ext.planning.planner import make_plan
from paddle_vpp_ext.schedule.action import parse_order
from paddle_vpp_ext.schedule.costs import Costs
from paddle_vpp_ext.schedule.plan import plan_orders
from paddle_vpp_ext.search.memory import Memory, capacity_under, peak_bytes, read_memory

amounts = st.floats(0, 1e12, allow_nan=False)
per_part = st.one_of(amounts, st.lists(amounts, min_size=1, max_size=8))


@given(st.tuples(per_part, per_part, per_part), amounts, st.tuples(per_part, per_part, per_part))
def test_costs_are_the_same_after_a_round_trip(tmp_path_factory, times, hop, sizes):
    path = tmp_path_factory.getbasetemp() / "costs.json"
    costs = Costs(*times, hop, *sizes)
    costs.save(path)
    assert Costs.load(path) == costs and hash(Costs.load(path)) == hash(costs)


def test_a_file_may_leave_fields_out(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('{"forward": [1, 2], "hop": 0.5}')
    assert Costs.load(path) == Costs(forward=(1, 2), hop=0.5)


@pytest.mark.parametrize(
    "content, named",
    [
        ("{", "not a JSON"),
        ("[1]", "object"),
        ({"forwards": 1}, "'forwards'"),
        ({"forward": "1"}, "forward"),
        ({"forward": [1, -1]}, "forward"),
        ({"hop": [1]}, "hop"),
        ({"weight_grad": True}, "weight_grad"),
        ({"residue": []}, "residue"),
        ({"message": float("inf")}, "message"),
        ({"activation": [float("nan")]}, "activation"),
        ({"input_grad": None}, "input_grad"),
        ({"input_grad": [[1]]}, "input_grad"),
    ],
)
def test_a_bad_file_is_refused_with_path_and_field(tmp_path, content, named):
    path = tmp_path / "costs.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match="costs.json.*" + named):
        Costs.load(path)


def test_costs_of_another_model_are_refused():
    with pytest.raises(ValueError, match="activation has 3 values, but the model has 4 parts"):
        Costs(activation=(1, 2, 3)).bytes_table(4)
    with pytest.raises(ValueError, match="input_grad has 3 values"):
        make_plan("ZBVPP", 2, 2, 4, costs=Costs(input_grad=(1, 2, 3)))


@pytest.mark.parametrize(
    "text, memory",
    [
        ("40GiB", Memory(40 * 2**30, True)),
        ("512MB", Memory(512e6, True)),
        ("8.5", Memory(8.5, False)),
        (" 1 kib", Memory(1024, True)),
        ("7B", Memory(7, True)),
    ],
)
def test_memory_limits_are_read(text, memory):
    assert read_memory(text) == memory


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "8 GB/s", "1e9", "8 micro-batches", "inf"])
def test_other_texts_are_no_memory_limit(text):
    with pytest.raises(ValueError, match="not a memory limit"):
        read_memory(text)


def test_limits_that_cannot_be_kept_are_refused():
    with pytest.raises(ValueError, match="smallest that works is 1"):
        capacity_under(Memory(0.5, False), 2, 2, Costs())
    with pytest.raises(ValueError, match="needs costs with bytes"):
        capacity_under(Memory(1e9, True), 2, 2, Costs())
    with pytest.raises(ValueError, match="one micro-batch takes 3GiB"):
        capacity_under(Memory(2.9 * 2**30, True), 2, 2, Costs(activation=2**30, residue=2**29))


def test_bytes_are_counted_from_when_to_when_they_are_held():
    """Two ranks, one micro-batch: activation 100, residue 10, message 1."""
    costs = Costs(activation=100, residue=10, message=1)
    whole = plan_orders([parse_order("F0.0 B0.0")] * 2, 1, 1, blocking=True)
    # Rank 0 sends its activation and receives the gradient in one exchange, and holds both till its end.
    assert peak_bytes(whole.programs, costs, 1) == [102, 101]
    split = plan_orders([parse_order("F0.0 I0.0 W0.0")] * 2, 1, 1, blocking=True)
    assert peak_bytes(split.programs, costs, 1) == [110, 111]


def test_what_waits_on_the_receiver_counts():
    """Three activations sent at once to a rank that uses them one by one."""
    orders = [parse_order("F0.0 F0.1 F0.2 B0.0 B0.1 B0.2"), parse_order("F0.0 B0.0 F0.1 B0.1 F0.2 B0.2")]
    costs = Costs(forward=(1, 10), activation=0, message=1)
    plan = plan_orders(orders, 1, 3, costs=costs)
    assert peak_bytes(plan.programs, costs, 1)[1] >= 2
