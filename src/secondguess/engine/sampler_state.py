"""What the sampler knows about the requests of a batch: their settings as tensors, and their tokens so far.

R requests, V vocabulary, S requests that use a setting, P requests with penalties, C single entries of the scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.engine.grammar import Follower
from secondguess.errors import UserError
from secondguess.types import Request, SamplingParams

GREEDY_BELOW = 1e-5  # vLLM's limit too: such a temperature differs from 0 only by its rounding errors


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """What fixes one request's draws, besides its tokens."""

    params: SamplingParams
    seed: int
    choice: int
    end_ids: tuple[int, ...]  # tokens that end the request
    follower: Follower | None = None  # of its grammar; ``record`` tells it of every token

    @property
    def penalised(self) -> bool:
        p = self.params
        return (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class History:
    """Tokens so far. ``record`` updates ``num_emitted_R`` and ``output_counts_PV`` in place."""

    num_emitted_R: Tensor  # int64
    in_prompt_PV: Tensor  # bool
    output_counts_PV: Tensor  # int32


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting, of the rows that use it."""

    rows_S: Tensor  # int64
    value_S1: Tensor  # float64, or int64 for top-k


@dataclass(frozen=True, slots=True)
class Cells:
    """Single entries [row, token] of the scores, and a number for each."""

    rows_C: Tensor  # int64
    tokens_C: Tensor  # int64
    value_C: Tensor  # float64, or int64 for min_tokens


@dataclass(frozen=True, slots=True)
class Penalties:
    rows_P: Tensor  # int64
    repetition_P1: Tensor  # float64, like the next two
    presence_P1: Tensor
    frequency_P1: Tensor


@dataclass(frozen=True, slots=True)
class Settings:
    """The rows' settings. None: no row uses it. Greedy rows use no temperature, min-p, top-k and top-p."""

    penalties: Penalties | None
    logit_bias: Cells | None
    min_tokens: Cells | None
    followers: tuple[tuple[int, Follower], ...]  # (row, follower) of each row with a grammar
    temperature: Knob | None
    min_p: Knob | None
    top_k: Knob | None
    top_p: Knob | None
    max_top_k: int  # on the host, so that asking for it does not wait for the device
    seeds_S: Tensor  # int64, of the rows with a temperature, like choices_S
    choices_S: Tensor

    @property
    def plain(self) -> bool:
        """Whether the scores are the logits: every row is greedy and nothing changes its logits."""
        changes = (self.penalties, self.logit_bias, self.min_tokens, self.temperature)
        return not self.followers and all(change is None for change in changes)

    @property
    def narrow(self) -> bool:
        """Whether some rows' scores may be left with few tokens."""
        knobs = (self.min_p, self.top_k, self.top_p)
        return bool(self.followers) or any(knob is not None for knob in knobs)


@dataclass(frozen=True, slots=True)
class SamplerState:
    """The sampler's side of a batch. Build it with ``start``, ``join`` and ``keep``."""

    rows: tuple[SamplerRow, ...]
    vocab_size: int
    settings: Settings
    history: History


def start(
    requests: Sequence[Request],
    seeds: Sequence[int],
    *,
    vocab_size: int,
    eos_ids: Sequence[int] = (),
    device: torch.device | str = "cpu",
) -> SamplerState:
    """The state of requests that have emitted nothing yet.

    ``seeds`` are given apart from ``requests`` because the caller draws one for a request without. Raises UserError
    when a request names a token outside the vocabulary.
    """
    rows = tuple(_row(request, seed, vocab_size, eos_ids) for request, seed in zip(requests, seeds, strict=True))
    penalised = [request for request, row in zip(requests, rows, strict=True) if row.penalised]
    in_prompt_PV = torch.zeros(len(penalised), vocab_size, dtype=torch.bool, device=device)
    for request, in_prompt_V in zip(penalised, in_prompt_PV, strict=True):
        in_prompt_V[torch.tensor(request.prompt_ids, device=device)] = True
    history = History(
        num_emitted_R=torch.zeros(len(rows), dtype=torch.int64, device=device),
        in_prompt_PV=in_prompt_PV,
        output_counts_PV=torch.zeros_like(in_prompt_PV, dtype=torch.int32),
    )
    return SamplerState(rows, vocab_size, _settings(rows, vocab_size, history.num_emitted_R.device), history)


def join(states: Sequence[SamplerState]) -> SamplerState:
    """One batch of the rows of all ``states``, in order. The histories are copies."""
    rows = tuple(row for state in states for row in state.rows)
    histories = [state.history for state in states]
    history = History(
        num_emitted_R=torch.cat([h.num_emitted_R for h in histories]),
        in_prompt_PV=torch.cat([h.in_prompt_PV for h in histories]),
        output_counts_PV=torch.cat([h.output_counts_PV for h in histories]),
    )
    vocab_size = states[0].vocab_size
    return SamplerState(rows, vocab_size, _settings(rows, vocab_size, history.num_emitted_R.device), history)


def keep(state: SamplerState, kept: Sequence[int]) -> SamplerState:
    """The batch of the rows ``kept``, in that order. The history is a copy."""
    rows = tuple(state.rows[r] for r in kept)
    penalised = [r for r, row in enumerate(state.rows) if row.penalised]
    device = state.history.num_emitted_R.device
    kept_R = torch.tensor(kept, dtype=torch.int64, device=device)
    kept_P = torch.tensor([penalised.index(r) for r in kept if r in penalised], dtype=torch.int64, device=device)
    history = History(
        num_emitted_R=state.history.num_emitted_R[kept_R],
        in_prompt_PV=state.history.in_prompt_PV[kept_P],
        output_counts_PV=state.history.output_counts_PV[kept_P],
    )
    return SamplerState(rows, state.vocab_size, _settings(rows, state.vocab_size, device), history)


def record(state: SamplerState, tokens_R: Tensor, active_R: Tensor) -> None:
    """Count ``tokens_R`` (int64) as emitted by the rows ``active_R`` (bool). Other rows' tokens may be anything."""
    history, penalties = state.history, state.settings.penalties
    history.num_emitted_R.add_(active_R)
    if penalties is not None:
        tokens_P1 = tokens_R.where(active_R, 0)[penalties.rows_P, None]
        active_P1 = active_R[penalties.rows_P, None]
        history.output_counts_PV.scatter_add_(1, tokens_P1, active_P1.to(torch.int32))
    for r, follower in state.settings.followers:
        if active_R[r]:
            follower.accept(int(tokens_R[r]))


def end_ids(params: SamplingParams, eos_ids: Iterable[int]) -> tuple[int, ...]:
    """The tokens that end a request, each once."""
    return tuple(dict.fromkeys(params.stop_token_ids if params.ignore_eos else (*eos_ids, *params.stop_token_ids)))


def check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises UserError when a setting names a token outside the vocabulary."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise UserError(f"{name} names token {token}, but the vocabulary ends at {vocab_size - 1}", name)


def _row(request: Request, seed: int, vocab_size: int, eos_ids: Sequence[int]) -> SamplerRow:
    params = request.params
    check_ids(params, vocab_size)
    follower = request.grammar.start() if request.grammar else None
    return SamplerRow(params, seed, request.choice, end_ids(params, eos_ids), follower)


def _settings(rows: tuple[SamplerRow, ...], vocab_size: int, device: torch.device) -> Settings:
    drawn = [(r, row) for r, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
    top_ks = [(r, row.params.top_k) for r, row in drawn if 0 < row.params.top_k < vocab_size]
    biases = [(r, token, bias) for r, row in enumerate(rows) for token, bias in row.params.logit_bias.items()]
    early = [(r, token, row.params.min_tokens) for r, row in enumerate(rows) for token in row.end_ids]
    return Settings(
        penalties=_penalties([(r, row.params) for r, row in enumerate(rows) if row.penalised], device),
        logit_bias=_cells(biases, torch.float64, device),
        min_tokens=_cells([cell for cell in early if cell[2] > 0], torch.int64, device),
        followers=tuple((r, row.follower) for r, row in enumerate(rows) if row.follower),
        temperature=_knob([(r, row.params.temperature) for r, row in drawn], torch.float64, device),
        min_p=_knob([(r, row.params.min_p) for r, row in drawn if row.params.min_p > 0], torch.float64, device),
        top_k=_knob(top_ks, torch.int64, device),
        top_p=_knob([(r, row.params.top_p) for r, row in drawn if row.params.top_p < 1], torch.float64, device),
        max_top_k=max((k for _, k in top_ks), default=0),
        seeds_S=torch.tensor([row.seed for _, row in drawn], dtype=torch.int64, device=device),
        choices_S=torch.tensor([row.choice for _, row in drawn], dtype=torch.int64, device=device),
    )


def _knob(used: Sequence[tuple[int, float]], dtype: torch.dtype, device: torch.device) -> Knob | None:
    if not used:
        return None
    rows, values = zip(*used, strict=True)
    return Knob(torch.tensor(rows, device=device), torch.tensor(values, dtype=dtype, device=device)[:, None])


def _cells(used: Sequence[tuple[int, int, float]], dtype: torch.dtype, device: torch.device) -> Cells | None:
    if not used:
        return None
    rows, tokens, values = zip(*used, strict=True)
    return Cells(
        rows_C=torch.tensor(rows, device=device),
        tokens_C=torch.tensor(tokens, device=device),
        value_C=torch.tensor(values, dtype=dtype, device=device),
    )


def _penalties(used: Sequence[tuple[int, SamplingParams]], device: torch.device) -> Penalties | None:
    if not used:
        return None
    values = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for _, p in used]
    repetition_P1, presence_P1, frequency_P1 = (
        torch.tensor(column, dtype=torch.float64, device=device)[:, None] for column in zip(*values, strict=True)
    )
    return Penalties(torch.tensor([r for r, _ in used], device=device), repetition_P1, presence_P1, frequency_P1)
