"""Backwards from several roots."""

import paddle


def backward_from(roots: list[paddle.Tensor], grads: list[paddle.Tensor]) -> None:
    """As ``paddle.autograd.backward``, which refuses a tensor that comes twice: its gradients are added up here."""
    if len({id(root) for root in roots}) == len(roots):
        paddle.autograd.backward(roots, grads)
        return
    summed: dict[int, tuple[paddle.Tensor, paddle.Tensor]] = {}
    for root, grad in zip(roots, grads):
        summed[id(root)] = (root, summed[id(root)][1] + grad if id(root) in summed else grad)
    paddle.autograd.backward([root for root, _ in summed.values()], [grad for _, grad in summed.values()])
