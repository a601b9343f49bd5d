"""What a checkpoint keeps of the data that it was trained on, so that a service unlike it can be told later."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from secondguess.prompts import ends_with
from secondguess.target.facts import TargetFacts, served_with
from secondguess.target.hf import HFTarget
from secondguess.train.data import Response

MOST = 0.99  # of the texts are no longer than what is kept as their length


@dataclass(frozen=True, slots=True)
class Origin:
    """``facts``: the target's, its chat template given the ``variables`` that most responses were made with."""

    facts: TargetFacts
    variables: dict[str, Any]
    num_strange: int  # prompts that do not end as that template has it
    length: int  # of all but the longest texts, in tokens
    count: int

    @property
    def notes(self) -> dict[str, Any]:
        """For the checkpoint's ``training``."""
        variables = {"template_variables": self.variables} if self.variables else {}
        strange = round(self.num_strange / self.count, 3)
        return {"num_responses": self.count, "trained_length": self.length, "strange_prompts": strange, **variables}


def origin_of(responses: Sequence[Response], target: HFTarget) -> Origin:
    ((common, _),) = Counter(r.variables for r in responses).most_common(1)
    variables = json.loads(common)
    facts = served_with(target.facts, target.tokenizer, variables)
    lengths = sorted(len(r.input_ids) for r in responses)
    strange = sum(not ends_as_served(r, target, facts.answer_start) for r in responses)
    return Origin(facts, variables, strange, lengths[int(MOST * (len(lengths) - 1))], len(responses))


def ends_as_served(response: Response, target: HFTarget, start: str | None) -> bool:
    """Whether the prompt ends with what the target's chat template puts before an answer, if there is one."""
    return not start or ends_with(target.tokenizer, response.input_ids[: response.prompt_len], start)
