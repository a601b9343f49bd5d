"""Which token a row emits: argmax(processed scores + keyed Gumbel noise), or plain argmax at temperature 0.

A processor touches only the rows that asked for it, so a row's scores do not depend on its batch-mates.

R requests, V vocabulary, S rows that use a setting, P rows with penalties, C single entries, T largest scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from secondguess import device
from secondguess.engine.noise import gumbel
from secondguess.engine.sampler_state import SamplerState, Settings, record

__all__ = ["SamplerState", "choose", "perturbed", "process", "record"]

_FEW = 8  # the noise of one token in so many, each with its row, takes less than that of all
_HEAD = 1024  # top-p first looks at this many tokens: ten times cheaper than a full sort of 49,152


def choose(logits_RV: Tensor, state: SamplerState, positions_R: Tensor) -> Tensor:
    """The rows' next tokens, int64 [R]. Ties go to the lowest token id.

    ``positions_R`` (int64) are the absolute positions that the tokens will have. ``state`` must hold the history of
    exactly the tokens before them.
    """
    if state.settings.plain:
        return logits_RV.argmax(-1)
    return perturbed(logits_RV, state, positions_R).argmax(-1)


def perturbed(logits_RV: Tensor, state: SamplerState, positions_R: Tensor) -> Tensor:
    """The scores that ``choose`` takes the argmax of: processed, plus noise in rows with a temperature."""
    scores_RV = process(logits_RV, state)
    if state.settings.temperature is not None:
        _perturb_(scores_RV, state.settings, state.settings.temperature.rows_S, positions_R)
    return scores_RV


def _perturb_(scores_RV: Tensor, settings: Settings, rows_S: Tensor, positions_R: Tensor) -> None:
    """A removed token needs no noise: -inf it stays. Where few are left, only theirs is evaluated."""
    scores_SV, positions_S = scores_RV[rows_S], positions_R[rows_S]
    if settings.narrow and device.at_hand(scores_SV):  # a GPU has the noise sooner than the host their number
        in_S, tokens_C = (scores_SV > -torch.inf).nonzero(as_tuple=True)
        if len(tokens_C) * _FEW < scores_SV.numel():
            words = settings.seeds_S[in_S], settings.choices_S[in_S], positions_S[in_S]
            scores_RV[rows_S[in_S], tokens_C] += gumbel(*words, tokens_C[:, None], scores_RV.dtype)[:, 0]
            return
    token_ids_V = torch.arange(scores_RV.shape[-1], device=scores_RV.device)
    noise_SV = gumbel(settings.seeds_S, settings.choices_S, positions_S, token_ids_V, scores_RV.dtype)
    scores_RV[rows_S] = scores_SV.add_(noise_SV)


def process(logits_RV: Tensor, state: SamplerState) -> Tensor:
    """Scores whose softmax is the law of the next token, [R, V], float64 for float64 logits, else float32.

    Penalties, logit bias, min_tokens, grammar, temperature, min-p, top-k, top-p, in this order; removed tokens are at
    -inf.
    Tokens that tie with the last one kept by top-k or top-p are kept, so one token at least always is.
    """
    settings = state.settings
    dtype = torch.promote_types(logits_RV.dtype, torch.float32)
    if settings.plain:
        return logits_RV.to(dtype)
    scores_RV = logits_RV.to(dtype, copy=True)
    _penalise_(scores_RV, state)
    _edit_cells_(scores_RV, state)
    _forbid_(scores_RV, state)
    if (temperature := settings.temperature) is not None:
        scores_RV[temperature.rows_S] = _temper(scores_RV[temperature.rows_S], temperature.value_S1)
    if (min_p := settings.min_p) is not None:
        scores_RV[min_p.rows_S] = _min_p(scores_RV[min_p.rows_S], min_p.value_S1)
    if (top_k := settings.top_k) is not None:
        scores_RV[top_k.rows_S] = _top_k(scores_RV[top_k.rows_S], top_k.value_S1, settings.max_top_k)
    if (top_p := settings.top_p) is not None:
        scores_RV[top_p.rows_S] = _top_p(scores_RV[top_p.rows_S], top_p.value_S1)
    return scores_RV


def _penalise_(scores_RV: Tensor, state: SamplerState) -> None:
    penalties, history = state.settings.penalties, state.history
    if penalties is None:
        return
    scores_PV = scores_RV[penalties.rows_P]
    repetition_P1, presence_P1, frequency_P1 = (
        value_P1.to(scores_PV.dtype)
        for value_P1 in (penalties.repetition_P1, penalties.presence_P1, penalties.frequency_P1)
    )
    emitted_PV = history.output_counts_PV > 0
    repeated_PV = torch.where(scores_PV > 0, scores_PV / repetition_P1, scores_PV * repetition_P1)
    scores_PV = torch.where(emitted_PV | history.in_prompt_PV, repeated_PV, scores_PV)
    scores_PV -= presence_P1 * emitted_PV
    scores_PV -= frequency_P1 * history.output_counts_PV
    scores_RV[penalties.rows_P] = scores_PV


def _edit_cells_(scores_RV: Tensor, state: SamplerState) -> None:
    if (bias := state.settings.logit_bias) is not None:
        scores_RV[bias.rows_C, bias.tokens_C] += bias.value_C.to(scores_RV.dtype)
    if (cells := state.settings.min_tokens) is not None:
        early_C = state.history.num_emitted_R[cells.rows_C] < cells.value_C
        scores_C = scores_RV[cells.rows_C, cells.tokens_C]
        scores_RV[cells.rows_C, cells.tokens_C] = scores_C.masked_fill(early_C, -torch.inf)


def _forbid_(scores_RV: Tensor, state: SamplerState) -> None:
    for r, follower in state.settings.followers:
        if (allowed_V := follower.allowed()) is not None:
            scores_RV[r].masked_fill_(~allowed_V.to(scores_RV.device), -torch.inf)


def _temper(scores_SV: Tensor, temperature_S1: Tensor) -> Tensor:
    # With the largest score at 0, a tiny temperature cannot overflow, and differences near the top stay exact.
    return (scores_SV - scores_SV.amax(-1, keepdim=True)) / temperature_S1.to(scores_SV.dtype)


def _min_p(scores_SV: Tensor, min_p_S1: Tensor) -> Tensor:
    # p < min_p * p_max; the largest score is 0 after _temper.
    return _drop_below(scores_SV, min_p_S1.log().to(scores_SV.dtype))


def _top_k(scores_SV: Tensor, top_k_S1: Tensor, max_top_k: int) -> Tensor:
    return _drop_below(scores_SV, scores_SV.topk(max_top_k).values.gather(-1, top_k_S1 - 1))


def _top_p(scores_SV: Tensor, top_p_S1: Tensor) -> Tensor:
    """Keep the fewest largest scores whose probabilities reach top_p.

    In float64: some devices' sums depend on the number of rows, and their rounding should not move the boundary.
    """
    log_total_S1 = scores_SV.double().logsumexp(-1, keepdim=True)
    # A GPU sorts sooner than it could say whether a part is enough.
    num_sorted = scores_SV.shape[-1] if scores_SV.is_cuda else min(_HEAD, scores_SV.shape[-1])
    sorted_ST = scores_SV.topk(num_sorted).values
    num_kept_S1 = _num_kept(sorted_ST, log_total_S1, top_p_S1)
    if num_sorted < scores_SV.shape[-1] and (num_kept_S1 == num_sorted).any():  # the last may lie further down
        sorted_ST = scores_SV.sort(descending=True).values
        num_kept_S1 = _num_kept(sorted_ST, log_total_S1, top_p_S1)
    return _drop_below(scores_SV, sorted_ST.gather(-1, (num_kept_S1 - 1).clamp(min=0)))  # none: no score is a number


def _num_kept(sorted_ST: Tensor, log_total_S1: Tensor, top_p_S1: Tensor) -> Tensor:
    mass_ST = (sorted_ST.double() - log_total_S1).exp()
    mass_before_ST = mass_ST.cumsum(-1) - mass_ST
    return (mass_before_ST < top_p_S1).sum(-1, keepdim=True)  # the first has exactly nothing before it


def _drop_below(scores_SV: Tensor, threshold_S1: Tensor) -> Tensor:
    return scores_SV.masked_fill(scores_SV < threshold_S1, -torch.inf)
