"""The ranks of a pipeline compare what they are about to do, so that a difference is an error and no hang."""

from collections.abc import Sequence
from typing import Any

import paddle
from paddle.distributed.fleet.meta_parallel import SharedLayerDesc

from ..messages import spec_of


def check_agreement(facts: Sequence[dict[str, object]], ranks: Sequence[int], when: str) -> None:
    """ValueError, the same on every rank, if the ranks' facts differ: a table of who has what.

    ``facts`` has one dict for each rank of the pipeline (``ranks``: their global numbers).
    """
    different = [key for key in facts[0] if any(other.get(key) != facts[0][key] for other in facts)]
    _report([_row(key, [other.get(key) for other in facts], ranks) for key in different], when)


def check_shared(facts: Sequence[dict[str, str]], ranks: Sequence[int], when: str) -> None:
    """The same for what only some ranks have, by name: those that have it must have the same."""
    rows = []
    for name in sorted({name for other in facts for name in other}):
        holders = [(rank, other[name]) for rank, other in zip(ranks, facts) if name in other]
        if len({value for _, value in holders}) > 1:
            rows.append(_row(name, [value for _, value in holders], [rank for rank, _ in holders]))
    _report(rows, when)


def facts_of(engine: Any) -> dict[str, object]:
    """What all ranks of a pipeline must have alike, by the name under which a user knows it."""
    from ... import __version__

    options = engine.options
    return {
        "stages": engine.num_stages,
        "num_virtual_pipeline_stages": engine._num_chunks,
        "accumulate_steps": engine.accumulate_steps,
        "micro_batch_size": engine.micro_batch_size,
        "schedule": engine.schedule_text,
        "overlap_p2p_comm": options.engine.overlap_p2p,
        "forward_backward_overlap_scheduler": options.schedule.overlap_pairs,
        "enable_dynamic_shape": options.engine.dynamic_shape,
        "delay_scale_loss": engine._delay_scale_loss,
        "timeout": options.engine.timeout,
        "check_finite": options.engine.check_finite,
        "trace": bool(options.engine.trace),
        "layers of the model": len(engine._layers._layers_desc),
        "default dtype": paddle.get_default_dtype(),
        "paddle_vpp_ext": __version__,
        "paddle": paddle.__version__,
    }


def tied_weights(layers: Any) -> dict[str, str]:
    """The tied weights that a rank of a PipelineLayer holds: name, and shape with dtype as text."""
    found = {}
    for desc in layers._layers_desc:
        if isinstance(desc, SharedLayerDesc) and desc.layer_name in layers.shared_layers:
            attributes = desc.shared_weight_attr
            for name in [attributes] if isinstance(attributes, str) else attributes:
                weight = getattr(layers.shared_layers[desc.layer_name], name)
                found[f"shared weight {desc.layer_name}.{name}"] = str(spec_of(weight)._replace(stop_gradient=True))
    return found


def _report(rows, when):
    if rows:
        raise ValueError(f"the ranks of the pipeline disagree {when}:\n" + "\n".join(rows))


def _row(key: str, values: list[object], ranks: Sequence[int]) -> str:
    return f"  {key}: " + ", ".join(f"rank {rank}: {value}" for rank, value in zip(ranks, values))
