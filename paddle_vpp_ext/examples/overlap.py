"""Forward-backward overlap: one micro-batch computes while another communicates.

python -m paddle.distributed.launch --nproc_per_node 2 overlap.py
"""

import time
from typing import Any

import paddle
import paddle.nn as nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer

import paddle_vpp_ext

paddle_vpp_ext.enable()
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 2}
strategy.pipeline_configs = {
    "accumulate_steps": 5,
    "micro_batch_size": 4,
    "schedule_mode": "VPP:overlap=on,overlap_p2p_comm=on",
}
fleet.init(is_collective=True, strategy=strategy, log_level="WARNING")


class Exchange(paddle.autograd.PyLayer):
    """Stands for an all-to-all of experts: 5 ms on the way there, 5 ms on the way back."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        time.sleep(0.005)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        time.sleep(0.005)
        return grad.clone()


class Dispatch(nn.Layer):
    is_communication = True  # runs beside the other micro-batch's computation

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return Exchange.apply(x)


class Expert(nn.Layer):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(paddle_vpp_ext.OverlapMixin, PipelineLayer):
    """The mixin is all that a model needs; or write ``overlapped_forward_backward`` yourself."""


layers = [LayerDesc(kind) for _ in range(4) for kind in (Expert, Dispatch, Expert)]
model = Model(
    layers=layers,
    loss_fn=nn.MSELoss(),
    topology=fleet.get_hybrid_communicate_group().topology(),
    seg_method="layer:Dispatch",
    num_virtual_pipeline_stages=2,
)
optimizer = fleet.distributed_optimizer(paddle.optimizer.AdamW(1e-3, parameters=model.parameters()))
model = fleet.distributed_model(model)

paddle.seed(0)
data = [paddle.randn([20, 64]), paddle.randn([20, 64])]
for step in range(10):
    loss = model.train_batch(data, optimizer)
    if fleet.worker_index() == 0:
        print(f"step {step}  loss {loss.item():.4f}", flush=True)
