"""The bodies of requests: the OpenAI API's fields, vLLM's extensions, and ``speculation``. Anything else is refused.

What is not supported at all has no field here, so that it is refused by name and never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from secondguess.errors import did_you_mean
from secondguess.server.errors import encodable
from secondguess.types import MAX_LOGPROBS

Whole = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = list[Whole]
MAX_CHOICES = 128


class Body(BaseModel):
    """A JSON object without unknown members. null stands for the default everywhere."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def refuse_unknown(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            known = [field.alias or name for name, field in cls.model_fields.items()]
            for name in data:
                if name not in known:
                    near = did_you_mean(str(name), known)
                    where = {"name": encodable(str(name)), "near": near}
                    raise PydanticCustomError("unknown_field", "unknown or unsupported field {name}{near}", where)
        return data


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="usage so far with every chunk, as vLLM has it")
    drafting: bool | None = Field(None, description="chunks that tell who guessed what, and show every draft tree")


class SpeculationChoice(Body):
    method: str | None = Field(None, description="one of the methods that /server_info lists")
    budget: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(None, description="draft tokens per cycle, at most")


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
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    min_tokens: Whole | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="who asks; changes nothing")
    structured_outputs: StructuredOutputs | None = None
    speculation: bool | SpeculationChoice | None = Field(None, description="false decodes without; same text")

    @property
    def num_choices(self) -> int:
        return self.n or 1


AnyBody = TypeVar("AnyBody", bound=Sampled)


class CompletionBody(Sampled):
    prompt: str | list[str] | TokenIds | list[TokenIds]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """Fields that may only be null come with answers of the official client when these are sent back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None


class JSONSchema(Body):
    name: str
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="the schema is always kept to")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class ChatBody(Sampled):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = Field(None, description="given to the chat template; calls come as text")
    tool_choice: Literal["none", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds
