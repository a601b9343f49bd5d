"""The bodies of requests: the OpenAI API's fields, vLLM's extensions, and ``speculation``. Anything else is refused.

What is not supported at all has no field here, so that it is refused by name and never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from secondguess.errors import did_you_mean
from secondguess.server.errors import encodable
from secondguess.types import MAX_LOGPROBS

STRICT = ConfigDict(strict=True, allow_inf_nan=False)
# Lists stop at their first fault, as bodies of a million faults would hold up everybody.
Whole = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[Whole], Field(fail_fast=True)]
ListsOfIds = Annotated[list[TokenIds], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Bias = Annotated[float, Field(ge=-100, le=100)]
MAX_CHOICES = 128
MAX_NAME = 100  # characters of an unknown field that are told


def choose(branch_of: Callable[[Any], TypeAdapter[Any]]) -> WrapValidator:
    """Of a union, only the branch that the value looks like is tried, so that errors are that one's alone."""
    return WrapValidator(lambda value, _: branch_of(value).validate_python(value))


def check_biases(given: Any) -> Any:
    """Stops at the first fault, which pydantic offers for lists alone."""
    for bias in given.values() if isinstance(given, dict) else ():
        BIAS.validate_python(bias)
    return given


TEXT, TEXTS = TypeAdapter(str, config=STRICT), TypeAdapter(Texts, config=STRICT)
IDS, LISTS_OF_IDS = TypeAdapter(TokenIds, config=STRICT), TypeAdapter(ListsOfIds, config=STRICT)
TRUTH, BIAS = TypeAdapter(bool, config=STRICT), TypeAdapter(Bias, config=STRICT)


def branch_of_prompt(given: Any) -> TypeAdapter[Any]:
    if not isinstance(given, list):
        return TEXT
    first = given[0] if given else ""
    return TEXTS if isinstance(first, str) else LISTS_OF_IDS if isinstance(first, list) else IDS


class Body(BaseModel):
    """A JSON object without unknown members. null stands for the default everywhere, also of what is not supported."""

    model_config = ConfigDict(extra="forbid") | STRICT

    @model_validator(mode="before")
    @classmethod
    def refuse_unknown(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        known = [field.alias or name for name, field in cls.model_fields.items()]
        if unknown := next((str(name)[:MAX_NAME] for name in given if name not in known), None):
            where = {"name": encodable(unknown), "near": did_you_mean(unknown, known)}
            raise PydanticCustomError("unknown_field", "unknown or unsupported field {name}{near}", where)
        return given


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="usage so far with every chunk, as vLLM has it")
    drafting: bool | None = Field(None, description="chunks that tell who guessed what, and show every draft tree")


class SpeculationChoice(Body):
    method: str | None = Field(None, description="one of the methods that /server_info lists")
    budget: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(None, description="draft tokens per cycle, at most")


WISH = TypeAdapter(SpeculationChoice)


class StructuredOutputs(Body):
    """vLLM's field: what the answer has to be."""

    regex: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="json")


class Sampled(Body):
    """What chat and plain completions have in common."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: float | None = Field(None, ge=0, description="default 1, as in the OpenAI API")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(None, description="0 and -1 keep all tokens")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(check_biases)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Annotated[str | Texts, choose(lambda given: TEXTS if isinstance(given, list) else TEXT)] | None = None
    stop_token_ids: TokenIds | None = None
    min_tokens: Whole | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="who asks; changes nothing")
    structured_outputs: StructuredOutputs | None = None
    speculation: (
        Annotated[bool | SpeculationChoice, choose(lambda given: WISH if isinstance(given, dict) else TRUTH)] | None
    ) = Field(None, description="false decodes without; same text")

    @property
    def num_choices(self) -> int:
        return self.n or 1


AnyBody = TypeVar("AnyBody", bound=Sampled)


class CompletionBody(Sampled):
    prompt: Annotated[str | Texts | TokenIds | ListsOfIds, choose(branch_of_prompt)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


Parts = Annotated[list[TextPart], Field(fail_fast=True)]
PARTS = TypeAdapter(Parts)


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Parts, choose(lambda given: PARTS if isinstance(given, list) else TEXT)] | None = None
    name: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class JSONSchema(Body):
    name: str
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="the schema is always kept to")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class ChatBody(Sampled):
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Objects | None = Field(None, description="given to the chat template; calls come as text")
    tool_choice: Literal["none", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds
