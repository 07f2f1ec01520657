"""The selector's rule: which schedule for which accumulate_steps."""


def select(num_stages: int, num_chunks: int, accumulate_steps: int) -> str:
    """``"VPP"`` or ``"FthenB"``, by the rule of Paddle since 3.0 (with V = 1, VPP is 1F1B).

    V = 1: 1F1B. Else m >= 2p: interleaved; p <= m < 2p: FthenB; m < p: ValueError.
    """
    p, m = num_stages, accumulate_steps
    if num_chunks == 1 or m >= 2 * p:
        return "VPP"
    if m >= p:
        return "FthenB"
    raise ValueError(
        f"The accumulate_steps({m}) should be greater than or equal to pp_degree({p}). "
        f'pipeline_configs["schedule_mode"] = "VPP" runs any accumulate_steps of at least 1, '
        f"or set accumulate_steps to {p} or more."
    )
