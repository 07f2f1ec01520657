"""A schedule of one's own: FthenB in waves, so that memory does not grow with m."""

import paddle_vpp_ext


def waves(p: int, V: int, m: int) -> list[list[str]]:
    """All forwards of 2p micro-batches, then all their backwards, wave after wave, alike on all ranks."""
    order = []
    for start in range(0, m, 2 * p):
        wave = range(start, min(start + 2 * p, m))
        order += [f"F{chunk}.{i}" for chunk in range(V) for i in wave]
        order += [f"B{chunk}.{i}" for chunk in reversed(range(V)) for i in wave]
    return [order] * p


paddle_vpp_ext.register_schedule("Waves", waves)
