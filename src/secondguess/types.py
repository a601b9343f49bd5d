"""Data that crosses module boundaries. Shapes are in the names.

R requests in the batch, N tree nodes (node 0 is the root), D path length, V vocabulary, H hidden size,
W columns of the K/V cache that a row may look at, L tapped layers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from secondguess.config import option
from secondguess.errors import require
from secondguess.fields import check_numbers

if TYPE_CHECKING:  # not at run time: the command line reads SamplingParams before torch is needed
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from secondguess.engine.cycle import CycleTrace
    from secondguess.engine.grammar import Grammar

FinishReason = Literal["stop", "length", "abort"]
MAX_LOGPROBS = 20  # vLLM's limit too


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Names and meanings are vLLM's; greedy is the default.

    Order: penalties, logit bias, temperature, min-p, top-k, top-p. A request without a seed draws one and reports it.
    Raises UserError when a field is out of range.
    """

    temperature: float = option(0.0, "0 takes the most probable token, 1 samples the model's own distribution")
    top_k: int = option(0, "sample among the k most probable tokens; 0 keeps all")
    top_p: float = option(1.0, "sample among the most probable tokens that together have this probability")
    min_p: float = option(0.0, "drop tokens less probable than this share of the most probable one")
    repetition_penalty: float = option(1.0, "divides the scores of tokens seen in prompt or answer; 1 is off")
    presence_penalty: float = option(0.0, "taken off the score of a token that the answer holds")
    frequency_penalty: float = option(0.0, "taken off the score of a token each time that the answer holds it")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = option(None, "same seed, same text; drawn and reported if not given")
    max_tokens: int = option(128, "new tokens at most")
    min_tokens: int = option(0, "new tokens at least: no end before that")
    stop: tuple[str, ...] = option((), "end the text before any of these strings")
    stop_token_ids: tuple[int, ...] = option((), "end the text at any of these tokens")
    ignore_eos: bool = option(False, "go on after the model's end token")
    logprobs: int | None = option(None, "report each token's log-probability, and those of so many best tokens")
    prompt_logprobs: int | None = option(None, "the same for the prompt's tokens but the first")

    def __post_init__(self) -> None:
        if isinstance(self.stop, str | list):
            object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        self._check_types()
        t = self.temperature
        require(math.isfinite(t) and t >= 0, f"temperature must be 0 or more, got {t}", "temperature")
        require(self.top_k >= 0, f"top_k must be 0 (off) or more, got {self.top_k}", "top_k")
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}", "top_p")
        require(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}", "min_p")
        r = self.repetition_penalty
        require(math.isfinite(r) and r > 0, f"repetition_penalty must be above 0, got {r}", "repetition_penalty")
        for name in ("presence_penalty", "frequency_penalty"):
            require(-2 <= getattr(self, name) <= 2, f"{name} must be in [-2, 2], got {getattr(self, name)}", name)
        require(self.seed is None or 0 <= self.seed < 2**63, f"seed must be in [0, 2^63), got {self.seed}", "seed")
        require(self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}", "max_tokens")
        fits = 0 <= self.min_tokens <= self.max_tokens
        require(fits, "min_tokens must be between 0 and max_tokens", "min_tokens")
        require(all(self.stop), "stop strings must not be empty", "stop")
        for name in ("logprobs", "prompt_logprobs"):
            n = getattr(self, name)
            require(n is None or 0 <= n <= MAX_LOGPROBS, f"{name} must be in [0, {MAX_LOGPROBS}], got {n}", name)

    def _check_types(self) -> None:
        """What Python would take and only a later step would choke on, or take for something else."""
        check_numbers(self)
        strings = isinstance(self.stop, Sequence) and all(isinstance(text, str) for text in self.stop)
        require(strings, f"stop must be a tuple of strings, got {self.stop!r}", "stop")
        tables = isinstance(self.stop_token_ids, Sequence) and isinstance(self.logit_bias, Mapping)
        ids = tables and all(isinstance(token, int) for token in (*self.stop_token_ids, *self.logit_bias))
        require(ids, "stop_token_ids and the keys of logit_bias must be token ids (whole numbers)")
        finite = all(isinstance(bias, int | float) and math.isfinite(bias) for bias in self.logit_bias.values())
        require(finite, "the values of logit_bias must be finite numbers", "logit_bias")


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A draft tree per request, parents before children, siblings with distinct tokens. int64 unless said.

    (Where a study keeps siblings with the same token, ``merge=append``, the first of them is walked.)
    """

    tokens_RN: Tensor  # target token ids; node 0 is the newest emitted token
    parents_RN: Tensor  # node index of the parent, -1 at the root and at padding
    depths_RN: Tensor  # 0 at the root
    levels_RN: Tensor  # 0: offered by a one-pass feature, 1: created or won by a reconsidered one
    scores_RN: Tensor  # float: path score, sum of edge log-probs (temperature 1)
    valid_RN: Tensor  # bool: False marks padding, always at the end
    deepest: int | None = field(default=None, kw_only=True)  # no node is deeper; None: the host knows no such number


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one forward pass over the slot K/V cache; row (r, n) writes its K/V to column ``columns_RN``.

    A row sees column w iff ``visible_RNW`` is True there (its own column included). Padding rows write to columns
    past the committed length, which nobody sees.
    """

    slots_R: Tensor  # int64: cache slot of each request
    tokens_RN: Tensor  # int64
    positions_RN: Tensor  # int64: RoPE position
    columns_RN: Tensor  # int64
    visible_RNW: Tensor  # bool
    column_positions_RW: Tensor  # int64: position of what each column holds (sliding windows are cut by position)
    slots: tuple[int, ...] | None = None  # ``slots_R`` on the host, if known there: else the device is waited for


@dataclass(frozen=True, slots=True)
class TargetOut:
    """What the target returns for some rows."""

    hidden_RNH: Tensor  # after the final norm: what the output head reads
    taps_RNLH: Tensor  # residual stream at the inputs of the tapped layers
    logits_RNV: Tensor  # of all rows, or of the last row only ([R, 1, V])


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a cycle accepted. D = deepest path + 1; entries past ``num_emitted_R`` are padding (-1)."""

    path_RD: Tensor  # int64 node indices of the accepted path, root first
    tokens_RD: Tensor  # int64 emitted tokens: the accepted draft tokens, then the bonus token
    num_emitted_R: Tensor  # int64: accepted draft tokens + 1


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a request wants to be drafted for. It changes how fast its tokens come, not which."""

    method: str | None = None  # a method's name; None: the one that the LLM was made for
    budget: int | None = None  # draft tokens per cycle; None: the method's own


AS_USUAL = Speculation()


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to be continued. ``choice`` numbers the answers to one prompt, so that they draw different noise."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    choice: int = 0
    text: str | None = None  # the prompt as it was given, if as text
    speculation: Speculation = AS_USUAL
    grammar: Grammar | None = None  # what the answer has to follow
    traced: bool = False  # whether its deltas tell of every cycle's tree
    counted: bool = True  # False: one token that only shows that the engine runs, and is in no totals


@dataclass(frozen=True, slots=True)
class Stats:
    """What one request cost. Times are seconds of the cycles it took part in; they add up to ``decode_s``."""

    num_tokens: int  # decode tokens: all but the one that prefill emits
    num_cycles: int
    num_accepted: int  # accepted draft tokens (bonus tokens not counted)
    num_refined: int  # of these, level 1
    prefill_s: float
    draft_s: float
    verify_s: float
    walk_s: float
    rest_s: float
    num_drafted: int = 0  # draft tokens verified
    num_steps: int = 0  # forwards of the drafter
    queue_s: float = 0.0  # before prefill
    num_reused: int = 0  # tokens of the prompt whose K/V were there already

    @property
    def decode_s(self) -> float:
        return self.draft_s + self.verify_s + self.walk_s + self.rest_s

    @property
    def acceptance_length(self) -> float:
        """tau: decode tokens emitted / cycles, tokens cut off by a stop or the limit included."""
        return (self.num_accepted + self.num_cycles) / max(self.num_cycles, 1)

    @property
    def tokens_per_second(self) -> float:
        """Decode tokens per second of decoding; 0 when prefill emitted all there is."""
        return self.num_tokens / self.decode_s if self.num_tokens else 0.0


@dataclass(slots=True)
class Drafting:
    """What was drafted, and what of it was accepted. Roots and bonus tokens are not counted."""

    cycles: Counter[tuple[int, int]] = field(default_factory=Counter)  # by (tokens drafted, tokens accepted)
    num_drafted_refined: int = 0  # of the drafted tokens, those of level 1
    num_accepted_refined: int = 0
    num_steps: int = 0  # forwards of the drafter

    def count(self, drafted: int, accepted: int, drafted_refined: int, accepted_refined: int, num_steps: int) -> None:
        """One cycle of one request."""
        self.num_steps += num_steps
        self.cycles[drafted, accepted] += 1
        self.num_drafted_refined += drafted_refined
        self.num_accepted_refined += accepted_refined

    def copy(self) -> Drafting:
        return Drafting(Counter(self.cycles), self.num_drafted_refined, self.num_accepted_refined, self.num_steps)

    def __sub__(self, before: Drafting) -> Drafting:
        """What has been counted since ``before``."""
        return Drafting(
            self.cycles - before.cycles,
            self.num_drafted_refined - before.num_drafted_refined,
            self.num_accepted_refined - before.num_accepted_refined,
            self.num_steps - before.num_steps,
        )

    @property
    def num_cycles(self) -> int:
        return self.cycles.total()

    @property
    def num_drafts(self) -> int:
        """Cycles in which there was a draft."""
        return sum(n for (drafted, _), n in self.cycles.items() if drafted)

    @property
    def num_drafted(self) -> int:
        return sum(n * drafted for (drafted, _), n in self.cycles.items())

    @property
    def num_accepted(self) -> int:
        return sum(n * accepted for (_, accepted), n in self.cycles.items())

    @property
    def acceptance_length(self) -> float:
        """tau over the cycles in which there was a draft; 1 if there was none."""
        return 1 + self.num_accepted / max(self.num_drafts, 1)


@dataclass(slots=True)
class Totals:
    """What an engine did since it was made."""

    num_prompt_tokens: int = 0
    num_tokens: int = 0  # emitted
    drafting: Drafting = field(default_factory=Drafting)
    num_preemptions: int = 0  # requests sent back to the queue, their K/V dropped
    num_reused_tokens: int = 0  # of the prompts' tokens, those whose K/V were there already

    def copy(self) -> Totals:
        return replace(self, drafting=self.drafting.copy())

    def __sub__(self, before: Totals) -> Totals:
        """What has been done since ``before``."""
        return Totals(
            self.num_prompt_tokens - before.num_prompt_tokens,
            self.num_tokens - before.num_tokens,
            self.drafting - before.drafting,
            self.num_preemptions - before.num_preemptions,
            self.num_reused_tokens - before.num_reused_tokens,
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-probability under the target's own law (temperature 1, nothing processed), and the best tokens'."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, log-probability), the best first


Origin = Literal["prefill", "level0", "refined", "bonus"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What a streaming request emitted since its last delta: the prefill token, or what one cycle or more accepted.

    Its text may lag behind: unfinished characters and what may become a stop string wait for more tokens.
    """

    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    text: str
    finish_reason: FinishReason | None = None
    output: Output | None = None  # with the last delta
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each token, if they were asked for
    cycles: tuple[CycleTrace, ...] = ()  # as batches of one, if the request is traced


@dataclass(frozen=True, slots=True)
class Output:
    """A finished request."""

    given: str | None  # the prompt, if it was given as text
    prompt_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    finish_reason: FinishReason
    seed: int
    stats: Stats
    drafting: Drafting = field(default_factory=Drafting)
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each token, if they were asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of each token of the prompt but the first, likewise
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False, compare=False)

    @property
    def prompt(self) -> str:
        """As it was given if as text, else decoded when it is asked for; nothing without a tokenizer."""
        if self.given is not None or self.tokenizer is None:
            return self.given or ""
        return str(self.tokenizer.decode(list(self.prompt_ids)))
