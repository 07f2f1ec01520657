"""Tied weights: those of a SharedLayerDesc whose layers are on several stages."""

from typing import Any, NamedTuple

import paddle
from paddle.distributed.fleet.meta_parallel import PipelineLayer, SharedLayerDesc

from .. import versions


class _Share(NamedTuple):
    """A group of ranks that share weights.

    Releases differ: all stages of a layer are one group, or each stage has a pair with the first
    one (``star``), which then has to hand the sum of all on. ``first`` is that one's global rank.
    """

    group: Any
    layer: paddle.nn.Layer
    attributes: list[str]
    first: int
    star: bool


class SharedWeights:
    """Keeps the tied weights of this rank equal to those of other stages, and counts each once."""

    def __init__(self, layers: PipelineLayer, ranks: list[int], stage: int):
        self._layers, self._rank = layers, ranks[stage]
        self._shares = _shares_of(layers, ranks)
        self._mark_first()
        self._spread(lambda share, name: getattr(share.layer, name))

    def sum_gradients(self) -> None:
        """Gives every stage the sum of all stages' gradients."""
        if type(self._layers).allreduce_shared_weight_gradients is not PipelineLayer.allreduce_shared_weight_gradients:
            self._layers.allreduce_shared_weight_gradients()  # the model's own way
            return
        with paddle.no_grad():
            for share in self._shares:
                for name in share.attributes:
                    paddle.distributed.all_reduce(versions.whole_gradient(getattr(share.layer, name)), group=share.group)
            self._spread(lambda share, name: versions.whole_gradient(getattr(share.layer, name)))

    def _spread(self, tensor_of):
        """What the first stage holds goes to the others, where pairs have not done that already."""
        with paddle.no_grad():
            for share in self._shares:
                for name in share.attributes if share.star else ():
                    paddle.distributed.broadcast(tensor_of(share, name), src=share.first, group=share.group)

    def _mark_first(self):
        """A weight counts in the norm of the gradients, by which they are clipped, on the first of its stages only."""
        for share in self._shares:
            shared = {id(getattr(share.layer, name)) for name in share.attributes}
            for parameter in share.layer.parameters():
                parameter.is_firstly_shared = id(parameter) not in shared or self._rank == share.first


def _shares_of(layers, ranks):
    shares = []
    for comm in (layers.shared_comm or {}).values():
        name = next(name for name, layer in layers.shared_layers.items() if layer is comm["layer"])
        stages = _stages_of(layers, name)
        attributes = comm["weight_attr"]
        shares.append(
            _Share(
                group=comm["group"],
                layer=comm["layer"],
                attributes=[attributes] if isinstance(attributes, str) else list(attributes),
                first=ranks[stages[0]],
                star=len(comm["ranks"]) < len(set(stages)),
            )
        )
    return shares


def _stages_of(layers, name):
    """The stages of a shared layer, in the order of the model."""
    descs = enumerate(layers._layers_desc)
    return [layers.get_stage_from_index(i) for i, d in descs if isinstance(d, SharedLayerDesc) and d.layer_name == name]
