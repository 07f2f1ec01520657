"""What the Trainers of PaddleFormers and PaddleNLP call, read and assign: values against one process.

They never call ``train_batch``; they step the optimizer themselves. ci/clients.sh runs the real ones.
"""

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineParallel, PipelineParallelWithInterleave

from paddle_vpp_ext.fleet import versions
from pool import get_pool
from training import WIDTH, OneProcess, assert_same_bits, build, merged, named_layers, weights

P, V, ROWS = 3, 2, 2
LENGTHS = (5, 8, 3, 1, 5)  # accumulate_steps from step to step: below p, and again one that there was


class Entry(nn.Layer):
    """As a language model's: (tokens, positions) become hidden states, positions and a rotary table."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)

    def forward(self, inputs):
        tokens, positions = inputs
        positions.stop_gradient = True
        table = paddle.sin(positions.astype("float32")).unsqueeze(-1)
        table.stop_gradient = True
        return self.embedding(tokens), positions.clone(), table.clone()


class Block(nn.Layer):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        hidden, positions, table = inputs
        positions.stop_gradient = table.stop_gradient = True
        return hidden + paddle.tanh(self.linear(hidden)) * table, positions.clone(), table.clone()


class Head(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, 16)

    def forward(self, inputs):
        return super().forward(inputs[0])


def criterion(logits, labels):
    return nn.functional.cross_entropy(logits, labels)


def descs():
    return [LayerDesc(Entry), *(LayerDesc(Block) for _ in range(P * V)), LayerDesc(Head)]


def micro_batches(seed, count, ragged):
    """A list of dicts, as a data collator makes them."""
    random = np.random.RandomState(seed)
    result = []
    for _ in range(count):
        shape = [ROWS, random.randint(3, 7) if ragged else 4]
        tokens, labels = (paddle.to_tensor(random.randint(0, 16, shape)) for _ in range(2))
        result.append({"input_ids": tokens, "position_ids": paddle.arange(shape[1]).tile([ROWS, 1]), "labels": labels})
    return result


def first_and_last(inputs):
    """What the Trainers put into ``_prepare_pipeline_inputs_func``: data of the first stage and of the last, by micro-batch."""
    lists = {key: [each.pop(key) for each in inputs] for key in list(inputs[0])}
    return [(lists["input_ids"], lists["position_ids"]), lists["labels"]]


class FakeTrainer:
    """PaddleNLP's Trainer, in the order of its calls on the engine."""

    flags = {}

    def __init__(self, m, **options):
        self.m = m
        self.model, self.optimizer = build(
            descs(), V, accumulate_steps=m, micro_batch_size=ROWS, loss_fn=criterion, **options, **self.flags
        )
        self.model._prepare_pipeline_inputs_func = first_and_last

    def train_step(self, inputs):
        model = self.model
        model.train()
        assert not (model._dp_comm_overlap or model._sharding_comm_overlap)
        before = model.micro_batch_size, model.accumulate_steps
        model.micro_batch_size, model.accumulate_steps = ROWS, len(inputs)
        data = model._prepare_training(model._prepare_pipeline_inputs_func(inputs), self.optimizer, None)
        model.optimizer = None
        model.lr_scheduler = None
        loss = model.forward_backward_pipeline(data, None)
        model.micro_batch_size, model.accumulate_steps = before
        self.update(len(inputs))
        return loss.detach().item()

    def update(self, count):
        self.optimizer.step()
        self.optimizer.clear_grad()

    def clear_cache(self):
        if versions.total_loss_is_list():  # 2.6 has no such call, and PaddleNLP makes none there
            self.model._p2p_helper.clear_meta_cache()

    def evaluate(self, inputs):
        model = self.model
        model.eval()
        data = model._prepare_pipeline_inputs_func(inputs)
        self.clear_cache()
        with paddle.no_grad():
            loss = model.eval_batch(data, compute_loss=True)
        self.clear_cache()
        return loss.mean().detach().item()


class FakeFormersTrainer(FakeTrainer):
    """PaddleFormers': the data comes when the step begins, the gradients are scaled after it."""

    flags = {"delay_scale_loss": True}

    def train_step(self, inputs):
        model = self.model
        model.train()
        model.optimizer = None
        model.lr_scheduler = None
        model.accumulate_steps = len(inputs)
        preprocessor = getattr(versions.pipeline_module(), "PipelineDatasetPreprocessor", lambda function: function())
        data = preprocessor(lambda: model._prepare_training(model._prepare_pipeline_inputs_func(inputs), self.optimizer, None))
        loss = model.forward_backward_pipeline(data, None)
        model.accumulate_steps = self.m
        self.update(len(inputs))
        return loss.detach().item()

    def update(self, count):
        with paddle.no_grad():
            for parameter in self.model._layers.parameters():
                if parameter.grad is not None:
                    parameter.grad.scale_(1 / count)
        super().update(count)


def train_and_evaluate(trainer, evaluate_first, ragged):
    made = trainer(LENGTHS[0], **({"schedule": "1F1B:enable_dynamic_shape=on"} if ragged else {}))
    losses = []
    if evaluate_first:
        losses.append(made.evaluate(micro_batches(100, LENGTHS[0], ragged)))
    for step, count in enumerate(LENGTHS):
        losses.append(made.train_step(micro_batches(step, count, ragged)))
        losses.append(made.evaluate(micro_batches(step, LENGTHS[0], ragged)))
    return losses, weights(named_layers(made.model))


def expected(evaluate_first, ragged):
    one = OneProcess(descs(), criterion)
    pairs = lambda seed, count: [((b["input_ids"], b["position_ids"]), b["labels"]) for b in micro_batches(seed, count, ragged)]

    def evaluate(seed):
        with paddle.no_grad():
            return one.step(pairs(seed, LENGTHS[0]), update=False).item()

    losses = [evaluate(100)] if evaluate_first else []
    for step, count in enumerate(LENGTHS):
        losses += [one.step(pairs(step, count)).item(), evaluate(step)]
    return losses, weights(one.layers)


@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("evaluate_first", [False, True])
@pytest.mark.parametrize("trainer", [FakeTrainer, FakeFormersTrainer])
def test_a_trainers_steps_and_evaluations(trainer, evaluate_first, ragged):
    results = get_pool(P).run(train_and_evaluate, trainer, evaluate_first, ragged)
    losses, final = expected(evaluate_first, ragged)
    found = merged(mine for _, mine in results)
    for mine, _ in results:  # every rank has the mean loss
        np.testing.assert_allclose(mine, losses, rtol=0, atol=1e-6)
    if trainer is FakeTrainer:
        assert_same_bits(found, final)
    else:  # scaling after adding up rounds differently
        assert found.keys() == final.keys()
        for key in final:
            np.testing.assert_allclose(found[key], final[key], rtol=0, atol=1e-6, err_msg=str(key))


def what_a_trainer_reads():
    made = FakeTrainer(5)
    model, layers = made.model, made.model._layers
    plans = []
    for count in LENGTHS:
        made.train_step(micro_batches(0, count, False))
        plans.append(len(model.runner.plans))
    names = ["_num_stages", "_num_virtual_pipeline_stages", "segment_parts", "_total_stages_with_virtual_stages"]
    return {
        "classes": isinstance(model, PipelineParallel) and isinstance(model, PipelineParallelWithInterleave),
        "engine": [model._compute_loss, model._dp_comm_overlap, model._sharding_comm_overlap, dict(model._chunk_2_comm_buffers)],
        "total_loss": model.total_loss is not None,
        "hook": callable(model.register_sharding_comm_overlap_hook),
        "layers": [getattr(layers, name) for name in names],
        "parameters": [id(p) for p in model.parameters()] == [id(p) for p in layers.parameters()],
        "plans": plans,
    }


def test_what_a_trainer_reads_is_there():
    for rank, found in enumerate(get_pool(P).run(what_a_trainer_reads)):
        assert found["classes"] and found["hook"] and found["parameters"]
        assert found["engine"] == [True, False, False, {}]
        assert found["total_loss"] == (rank == P - 1)
        assert found["layers"][:2] == [P, V] and len(found["layers"][2]) == P * V + 1 and found["layers"][3] == P * V
        assert found["plans"] == [1, 2, 3, 4, 4]  # one for each accumulate_steps
