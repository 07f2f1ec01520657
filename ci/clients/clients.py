"""The clients: how each is told what all are told in other words."""

from collections.abc import Mapping
from typing import NamedTuple


class Client(NamedTuple):
    """``stages``, ``chunks``: its arguments for p and V. ``options``: what it needs beside what all get."""

    name: str
    script: str
    stages: str
    chunks: str
    options: Mapping = {}
    options_when_ragged: Mapping = {}
    environment_when_ragged: Mapping = {}
    cli: bool = False


# PaddleNLP has no argument for micro-batches of different lengths, so that ours comes by the environment.
_PADDLENLP = dict(
    script="paddlenlp_train.py",
    stages="pipeline_parallel_degree",
    chunks="virtual_pp_degree",
    environment_when_ragged={"PADDLE_VPP_SCHEDULE": "1F1B:enable_dynamic_shape=on"},
)

CLIENTS = {
    client.name: client
    for client in (
        Client(
            "paddleformers-1.2.0",
            script="paddleformers_train.py",
            stages="pipeline_model_parallel_size",
            chunks="virtual_pipeline_model_parallel_size",
            options={"amp_master_grad": False, "max_grad_norm": 0},  # in 32 bits its Trainer fails with their defaults
            options_when_ragged={"variable_seq_lengths": True},
            cli=True,
        ),
        Client("paddlenlp-2.8.1", **_PADDLENLP),
        Client("paddlenlp-3.0.0b4", **_PADDLENLP),
    )
}
