"""When speculation over a part of the KV pays: the phase boundary, in times and in bytes (pure).

Knows no sequence and no device. `scheduler/phase.py` applies the time form per round.
"""

import math


def expected_tokens(k: int, a: float) -> float:
    """Tokens that a round of `k` drafts emits, bonus token included: E = (1 - a^(k+1)) / (1 - a).

    `a` is the probability that one drafted token is accepted, given that those before it were.
    """
    assert k >= 0
    assert 0 <= a <= 1
    return k + 1.0 if a == 1 else (1 - a ** (k + 1)) / (1 - a)


def gain(k: int, a: float, proposal_seconds: float, verify_seconds: float, full_seconds: float) -> float:
    """Speed of a round of `k` drafts over `full`: E * T_full / (k * t_prop + T_verify); above 1 it pays."""
    return expected_tokens(k, a) * full_seconds / (k * proposal_seconds + verify_seconds)


def bandwidth_margin(h: float, s: float, kv_bytes: float, weight_bytes: float) -> float:
    """(h - s) * KV - (1 - h) * W, in bytes saved per draft: above 0 speculation pays if only bytes cost time.

    `h`: accepted / proposed of a round (not the acceptance `a`: h = (E - 1) / k). `s`: share of the KV that a proposal
    reads. KAP/GraphSpec's inequality (arXiv 2607.24260); it is `gain` > 1 with times W + s * KV and W + KV.
    """
    return (h - s) * kv_bytes - (1 - h) * weight_bytes


def break_even_kv_bytes(h: float, s: float, weight_bytes: float) -> float:
    """KV bytes from which `bandwidth_margin` is positive; infinite if a proposal reads no less than is accepted."""
    return (1 - h) * weight_bytes / (h - s) if h > s else math.inf
