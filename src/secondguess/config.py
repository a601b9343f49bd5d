"""Frozen configurations. Every field is validated once, here, with a message that says what to change."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from secondguess.errors import require
from secondguess.fields import check_choices, check_numbers


def option(default: Any, help: str) -> Any:
    """A dataclass field with a default and the help that its command-line flag shows."""
    return field(default=default, metadata={"help": help})


AUTO_BUDGET = 63  # at most: so many guesses change no bit of a text (see ``target.stable``)
LIMITS = {
    "budget": (1, 1024),
    "num_steps": (1, 64),
    "grow_width": (1, 256),
    "offer_width": (1, 256),
    "num_reconsider": (0, 256),
    "extra_advance": (0, 256),
}
DEFAULT_CONTEXT = 8192  # tokens of prompt and answer together, where a target would take more
CHAIN = 3  # draft tokens of engines that draft no tree
MAX_LAYERS = 8  # of a drafter's block
MAX_OFFERS = 2**20  # in one draft: ``tree.candidates.pack`` numbers them with 20 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondLook:
    """What a second look is made of. A drafter learns one way, and its checkpoint says which.

    Raises UserError when a field is out of range.
    """

    see_own_level0: bool = option(True, "a second look attends to its node's first")
    query_slot: Literal["self_query", "own_token", "soft_pred"] = option(
        "self_query", "stands where level 0 has the token's embedding; soft_pred is the mean embedding under q0"
    )
    query_rope: Literal["same", "next"] = option("same", "position of a second look: its node's own, or one further")

    def __post_init__(self) -> None:
        check_choices(self)
        check_numbers(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconsider(SecondLook):
    """How nodes get their second look: what the paper (arXiv 2611.05724) leaves open, the likeliest reading first.

    A node's level-0 feature f offers its children with log-probs q0, its level-1 feature f' with q1. ``merge``:

    - ``max`` a token offered by both keeps the larger; ``replace`` it takes q1; ``logmean`` it takes their mean
    - ``rescore_all`` every child takes q1, whether f' offers it or not
    - ``drop`` it keeps q0; ``novel_only`` the same, and f' offers its best outside of what f has offered
    - ``union`` every child keeps the larger, whether f' offers it or not, and f' offers its best outside of them (ours)
    - ``append`` both stay, as siblings with the same token

    ``select``, first come: ``low_top1`` the lowest top-1 probability c; ``path`` the highest path probability times
    1 - c; ``entropy`` the highest entropy; ``margin`` the smallest distance from the first to the second probability;
    ``random`` a hash of token and depth.

    Raises UserError when a field is out of range.
    """

    merge: Literal["max", "replace", "rescore_all", "logmean", "drop", "novel_only", "union", "append"] = option(
        "max", "what becomes of a token that both levels offer"
    )
    propagate: bool = option(True, "path scores below a re-scored edge follow it")
    select: Literal["low_top1", "path", "entropy", "margin", "random"] = option("low_top1", "which nodes come first")
    threshold: float = option(1.0, "nodes with a higher top-1 probability are passed over")
    pool: Literal["prev_batch", "any_unreconsidered"] = option("prev_batch", "nodes that are chosen from")
    root_eligible: bool = option(True, "the root can be chosen too")
    reconsider_steps: int | None = option(None, "only the first so many steps of a draft reconsider; none: every step")
    reconsider_cap: int | None = option(None, "nodes reconsidered in one draft, at most; none: no limit")
    refined_offer_width: int | None = option(None, "children offered by one second look; none: offer_width")
    child_feature: Literal["level1", "level0"] = option("level1", "feature that feeds the children of a second look")

    def __post_init__(self) -> None:
        check_choices(self)
        check_numbers(self)
        require(0 <= self.threshold <= 1, f"threshold must be in [0, 1], got {self.threshold}")
        for name in ("reconsider_steps", "reconsider_cap", "refined_offer_width"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, got {value}")

    @property
    def asks_for_known(self) -> bool:
        """Whether level 1 has to know which tokens level 0 has offered."""
        return self.rates_known or self.offers_novel

    @property
    def rates_known(self) -> bool:
        """Whether merging needs what level 1 says of these tokens."""
        return self.merge in ("rescore_all", "union")

    @property
    def offers_novel(self) -> bool:
        """Whether level 1 offers others."""
        return self.merge in ("novel_only", "union")


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeConfig:
    """Shape of the draft tree. Defaults are the paper's (arXiv 2611.05724, Section "Defaults").

    ``budget="auto"``: each cycle's nodes, steps and second looks are chosen by what they cost and promise, within
    ``num_steps``, ``num_reconsider`` and 63 nodes; where nothing pays, decoding is plain (see ``engine.policy``).
    Raises UserError when a field is out of range, or set but of no use.
    """

    budget: int | Literal["auto"] = option(
        48, "draft tokens verified per cycle (the paper's B), or auto; above 63, texts may part at near-ties"
    )
    num_steps: int = option(8, "drafter forwards per cycle (gamma)")
    grow_width: int = option(6, "nodes forwarded per draft step (B_w)")
    offer_width: int = option(6, "children offered by one forwarded node (k)")
    num_reconsider: int = option(3, "nodes that get a second look per draft step (m); 0 is EAGLE-3.1")
    extra_advance: int = option(0, "in place of second looks (the paper's Table 4), so many nodes forward a child more")
    coupled: bool = option(False, "where tokens are sampled, offer by the noise that they will be drawn with")
    reconsider: Reconsider = field(default=Reconsider(), metadata={"help": "how the second looks are taken"})

    @property
    def max_budget(self) -> int:
        """Nodes of the largest tree, the root not counted."""
        return self.budget if isinstance(self.budget, int) else AUTO_BUDGET

    @property
    def rows_per_step(self) -> int:
        """Rows of one drafter forward, at most."""
        return self.grow_width + self.num_reconsider + self.extra_advance

    def __post_init__(self) -> None:
        check_numbers(self)
        for name, (low, high) in LIMITS.items():
            value = self.max_budget if name == "budget" else getattr(self, name)
            require(value >= low, f"{name} must be at least {low}, got {value}")
            require(value <= high, f"{name} must be at most {high}, got {value}")
        rows = "(grow_width + num_reconsider + extra_advance)"
        too_many = f"num_steps x {rows} x offer_width must be below 2^20: lower one"
        require(self.num_steps * self.rows_per_step * self.offer_width < MAX_OFFERS, too_many)
        if self.num_reconsider:
            require(not self.extra_advance, "extra_advance stands in for second looks: set num_reconsider (m) to 0")
        else:
            changed = [f.name for f in fields(Reconsider) if getattr(self.reconsider, f.name) != f.default]
            require(not changed, f"{', '.join(changed)} would change nothing: num_reconsider (m) is 0")
        refined = self.reconsider.refined_offer_width or self.offer_width
        too_wide = f"refined_offer_width must be at most offer_width ({self.offer_width}), got {refined}"
        require(refined <= self.offer_width, too_wide)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """Shape of an EAGLE-3.1 / PR drafter. Field names follow the flat EAGLE-3 ``config.json``.

    What is below ``second_look`` is what EAGLE-3 drafters of other trainers differ in; the defaults are EAGLE-3.1.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # of the target
    draft_vocab_size: int
    target_hidden_size: int
    target_num_layers: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    num_layers: int = 1  # of M; EAGLE-3.1 has one
    second_look: SecondLook | None = None  # that level 1 was trained with; None: there is only level 0
    lens: bool = False  # level 1 reads level 0's feature through a matrix of its own; not in the paper
    fc_norm: bool = True  # a norm for each tapped state, before they are joined
    norm_before_fc: bool = False  # one norm for all of them, joined
    norm_before_residual: bool = False  # the block adds to the normed feature, not to the raw one
    norm_output: bool = True  # the feature that is fed back is normed, as the one that the head reads always is
    own_embedding: bool = False  # a token embedding of its own, not the target's
    tap_layers: tuple[int, ...] | None = None  # layers whose inputs feed it; none: EAGLE-3's three
    rope_scaling: dict[str, Any] | None = None  # see ``drafter.rope``
    max_position_embeddings: int | None = None  # none: not said

    @property
    def has_self_query(self) -> bool:
        return self.second_look is not None and self.second_look.query_slot == "self_query"

    @property
    def level1_tensors(self) -> tuple[str, ...]:
        """Names of the parameters that only second looks use."""
        return ("self_query",) * self.has_self_query + ("lens.weight",) * self.lens

    @property
    def num_taps(self) -> int:
        return 3 if self.tap_layers is None else len(self.tap_layers)
