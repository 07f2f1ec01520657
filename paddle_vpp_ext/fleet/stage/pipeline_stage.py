"""Stage on a PipelineLayer: the forwards and backwards of one rank's chunks."""

from typing import Any, NamedTuple, Optional

import paddle

from ...schedule.dependencies import Transfer
from .. import versions
from ..messages import Boundaries, Payload, Signature, flatten, spec_of, unflatten
from .autograd import backward_from
from .data import MicroBatches


class SavedForBackward(NamedTuple):
    """What a chunk's forward leaves for its backward.

    ``leaves``: the received tensors that need a gradient. ``roots``: the outputs that need one; on
    the last part the loss, or nothing if it needs none. ``seen``: input and output as micro-step
    callbacks get them, None where there are no callbacks.
    """

    leaves: list[paddle.Tensor]
    roots: list[paddle.Tensor]
    seen: tuple[Any, Any]


class PipelineStage:
    """Computes for one engine of Paddle's, whose micro-step callbacks it fires as Paddle does.

    ``engine`` is one of the classes in pipeline.py.
    """

    def __init__(self, engine: Any, boundaries: Boundaries):
        self._engine, self._boundaries = engine, boundaries
        self._layers = engine._layers
        self._locations = versions.micro_step_locations()
        self._p, self._rank = engine.num_stages, engine.stage_id
        self._num_chunks = self._layers.get_num_virtual_stages()
        self._last_part = self._p * self._num_chunks - 1
        self._saved: dict[tuple[int, int], Any] = {}  # SavedForBackward; a stage of another kind may save something else

    def begin(self, batches: MicroBatches, training: bool, compute_loss: bool, loss_fn_idx: int, scaler: Any) -> None:
        """Starts a step; what an earlier one that failed has left is dropped."""
        self._saved.clear()
        self._batches, self._training, self._compute_loss = batches, training, compute_loss
        self._loss_fn_idx, self._scaler = loss_fn_idx, scaler
        self._losses: list[dict[int, paddle.Tensor]] = []
        self._outputs: dict[int, Any] = {}
        self._count = {"F": 0, "B": 0}
        self._observed = self._locations is not None and any(self._engine.callbacks.hooks.values())

    def losses(self) -> list[list[paddle.Tensor]]:
        """Per loss function the detached losses of all micro-batches, in their order (last stage only)."""
        return [[by_micro_batch[i] for i in sorted(by_micro_batch)] for by_micro_batch in self._losses]

    def outputs(self) -> list[Any]:
        """The model's outputs per micro-batch, when no loss was computed (last stage only)."""
        return [self._outputs[i] for i in sorted(self._outputs)]

    # ---- what the executor calls

    def forward(self, chunk: int, micro_batch: int, message: Optional[tuple[Signature, list[paddle.Tensor]]]) -> Any:
        value, leaves = self._begin_forward(chunk, micro_batch, message)
        output = self._layers.forward(value, chunk_id=chunk if self._num_chunks > 1 else None)
        self._end_forward(chunk, value, output)
        if self._part(chunk) == self._last_part:
            root, payload = self._finish(micro_batch, output), None
            roots, output = ([root], root) if root is not None else ([], None)
        else:
            payload = self._pack(chunk, micro_batch, output)
            roots = [tensor for tensor in payload.tensors if not tensor.stop_gradient]
        if self._training:
            self._saved[chunk, micro_batch] = SavedForBackward(leaves, roots, self._seen(message, value, output))
        return payload

    def backward(self, chunk: int, micro_batch: int, grads: Optional[list[paddle.Tensor]]) -> Payload:
        leaves, roots, seen = self._begin_backward(chunk, micro_batch, grads)
        with versions.without_amp():
            if roots and grads is None:
                self._backward_from_loss(roots[0])
            elif roots and grads is not None:
                backward_from(roots, grads)
        # A gradient that nothing asked for is zero: the other end waits for all that it needs.
        input_grads = [paddle.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        return self._end_backward(seen, grads, input_grads)

    def sent(self, transfer: Transfer, payload: Payload) -> None:
        """Frees the memory of a sent activation; its place in the graph stays for the backward."""
        if transfer.kind != "F":
            return
        for tensor in payload.tensors:
            # A leaf may be the user's own: a parameter, a buffer, the data. Unheld ones go by themselves.
            if not tensor.stop_gradient and not tensor.is_leaf:
                self._engine._release_output(tensor)

    def chunk_done(self, chunk: int) -> None:
        self._engine.gradient_sync.start(chunk)

    # ---- parts of a forward and of a backward

    def _begin_forward(self, chunk, micro_batch, message):
        """The value that the chunk's forward gets, and the received tensors that need a gradient."""
        self._engine.set_virtual_pipeline_rank(chunk)
        if message is None:
            value = self._batches.inputs(micro_batch)
            leaves: list[paddle.Tensor] = []
            self._batches.drop(micro_batch)
        else:
            leaves, value = self._take(*message)
        self._call_back("FORWARD_BEGIN", "F", input_tensor=value)
        return value, leaves

    def _end_forward(self, chunk, value, output):
        self._engine.set_virtual_pipeline_rank(chunk)
        self._call_back("FORWARD_END", "F", input_tensor=value, output_tensor=output)
        self._count["F"] += 1
        if self._part(chunk) in (0, self._last_part):
            self._engine.micro_batch_id += 1

    def _part(self, chunk):
        return chunk * self._p + self._rank

    def _begin_backward(self, chunk, micro_batch, grads):
        """What the forward has left."""
        self._engine.set_virtual_pipeline_rank(chunk)
        saved = self._saved.pop((chunk, micro_batch))
        value, output = saved.seen
        self._call_back("BACKWARD_BEGIN", "B", input_tensor=value, output_tensor=output, output_tensor_grad=_in_form_of(output, grads))
        return saved

    def _end_backward(self, seen: tuple[Any, Any], grads: Any, input_grads: list[paddle.Tensor]) -> Payload:
        """What goes to the part before."""
        value, output = seen
        self._call_back(
            "BACKWARD_END",
            "B",
            input_tensor=value,
            output_tensor=output,
            output_tensor_grad=_in_form_of(output, grads),
            input_tensor_grad=_in_form_of(value, input_grads),
        )
        self._count["B"] += 1
        return Payload(input_grads)

    def _seen(self, message, value, output):
        """What callbacks of the backward get; held only if there are any. The data of the first part are not an input to them."""
        return (value if message else None, output) if self._observed else (None, None)

    def _take(self, signature: Signature, tensors: list[paddle.Tensor]) -> tuple[list[paddle.Tensor], Any]:
        """The leaves that received tensors become, and the value that the chunk's forward gets."""
        given, leaves = [], []
        for tensor, spec in zip(tensors, signature.specs):
            if self._training and not spec.stop_gradient:
                tensor.stop_gradient = False
                leaves.append(tensor)
                # A view, so that a layer may change its input in place, which it may not do with a leaf.
                tensor = versions.view_of(tensor)
            given.append(tensor)
        return leaves, unflatten(signature.form, given)

    def _pack(self, chunk: int, micro_batch: int, output: Any) -> Payload:
        """The message of an output that goes to the next part."""
        part = self._part(chunk)
        form, tensors = flatten(output, f"the output of part {part} of the model ({self._name_of(chunk)})")
        signature = Signature(form, tuple(map(spec_of, tensors)))
        is_new = self._boundaries.announce(Transfer("F", part, micro_batch), signature)
        return Payload(tensors, signature if is_new else None)

    def _finish(self, micro_batch: int, output: Any) -> Optional[paddle.Tensor]:
        """On the last part: the losses, or without one the output itself. Returns the root of the backward, if any."""
        if not self._compute_loss:
            self._outputs[micro_batch] = output
            return None
        labels = self._take_labels(micro_batch)
        root: Any = None
        for k, function in enumerate(versions.loss_functions(self._layers)):
            loss = self._scaled(function(output, labels), k)
            self._keep_loss(k, micro_batch, loss)
            if k == self._loss_fn_idx:
                root = loss
        return root if self._training and not root.stop_gradient else None

    def _take_labels(self, micro_batch):
        labels = self._batches.labels(micro_batch)
        self._batches.drop(micro_batch)
        return labels

    def _scaled(self, loss, k):
        if not isinstance(loss, paddle.Tensor):
            raise TypeError(f"loss function {k} gave a {type(loss).__name__}, not a tensor")
        scale = self._loss_scale()
        with versions.without_amp():
            return loss / scale if scale else loss

    def _loss_scale(self):
        """By what a micro-batch's loss is divided; None: by nothing."""
        m = self._engine.accumulate_steps
        return m if m > 1 and not self._engine._delay_scale_loss else None

    def _keep_loss(self, k, micro_batch, loss):
        self._losses = self._losses or [{} for _ in versions.loss_functions(self._layers)]
        self._losses[k][micro_batch] = loss.detach()

    def _backward_from_loss(self, loss):
        scale = versions.align_mode_scale()
        if scale:
            loss = loss / scale
        paddle.autograd.backward(versions.scale_loss(self._scaler, loss))

    def _call_back(self, location, kind, **what):
        if self._observed:
            # Paddle's 1F1B engine counts no steps in an evaluation, its interleaved ones do.
            step_id = self._count[kind] if self._training or self._num_chunks > 1 else None
            self._engine.callbacks.on_location(self._locations[location], step_id=step_id, **what)

    def _name_of(self, chunk):
        layers = self._layers.get_model_chunks()[chunk].get_run_function() if self._num_chunks > 1 else self._layers.run_function
        last = layers[-1] if len(layers) else None
        return getattr(last, "__name__", None) or type(last).__name__


def _in_form_of(value, tensors):
    """Tensors as micro-step callbacks get them: one for a tensor, else a tuple; None where there are none."""
    if not tensors:
        return None
    return tensors[0] if isinstance(value, paddle.Tensor) else tuple(tensors)
