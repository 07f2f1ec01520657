"""``paddle-vpp run``, given to Paddle's launcher as the script, enables the extension for an unmodified script."""

import os
import sys

from test_examples import launch

SCRIPT = """
import argparse, sys
import paddle
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer
from beside import Block  # a script's own folder is on its path

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--acc", type=int)
    args = parser.parse_args()
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": args.acc, "micro_batch_size": 1}
    fleet.init(is_collective=True, strategy=strategy, log_level="WARNING")
    model = PipelineLayer(layers=[LayerDesc(Block) for _ in range(4)], loss_fn=lambda y, label: (y - label).mean(),
                          seg_method="layer:Block", topology=fleet.get_hybrid_communicate_group().topology(), num_virtual_pipeline_stages=2)
    optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.1, parameters=model.parameters()))
    engine = fleet.distributed_model(model)
    data = [paddle.ones([args.acc, 4]), paddle.zeros([args.acc, 4])]
    loss = engine.train_batch(data, optimizer).item()
    print(f"trained {type(engine).__module__} {sys.argv[1:]} {__name__} {loss:.3f}", flush=True)
"""

BESIDE = """
from paddle import nn

class Block(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
"""


def test_the_launcher_starts_an_unmodified_script_with_the_extension(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "beside.py").write_text(BESIDE, encoding="utf-8")
    command = tmp_path / "bin" / "paddle-vpp"  # as pip would have installed it
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m paddle_vpp_ext "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    launch("paddle-vpp", 2, tmp_path, "run", "train.py", "--acc", "5")
    logs = [path.read_text(encoding="utf-8") for path in sorted((tmp_path / "log").glob("workerlog.*"))]
    for log in logs:
        (line,) = [line for line in log.splitlines() if line.startswith("trained")]
        assert line.startswith("trained paddle_vpp_ext.fleet.engine.pipeline ['--acc', '5'] __main__ ")
    # With p=2 and m=5, which Paddle refuses for V=2; one line says what it trains with.
    assert len(logs) == 2 and sum(log.count("pipeline schedule") for log in logs) == 1
