"""What sets the training methods apart."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Of one method; everything else is shared.

    arXiv 2611.05724 compares with HASS and puts PR on top of it (Table 6), but what its HASS arm is we do not know:
    HASS (arXiv 2408.15766) belongs to EAGLE-1, with one tapped layer, a frozen head and a loss on features. Ours has
    EAGLE-3.1's network, data and steps, and of HASS what can be carried over:

    - Passes in harmony with decoding: at pass j a query sees the target's features of the older positions, and at the
      last j positions what passes 1 to j of its own draft were fed. Seen from where the draft started, this is the
      mask of EAGLE-3's training-time test, so ``unroll`` is the same for both.
    - No gradient through the feature that a pass hands to the next. In EAGLE-3 it flows back through all passes.
    - Beside the loss on the whole distribution, one on the target's ``top_k`` most probable tokens.

    HASS's loss on features is left out, as EAGLE-3 left out EAGLE-1's: a fused feature has none to be compared with.
    """

    level1: bool = False  # a second look at every step
    through_time: bool = True  # gradient flows from step to step, through the feature
    top_k_loss: bool = False


RECIPES = {
    "eagle3.1": Recipe(),
    "pr": Recipe(level1=True),
    "hass": Recipe(through_time=False, top_k_loss=True),
    "hass+pr": Recipe(level1=True, through_time=False, top_k_loss=True),
}
