"""A chat's messages, added up: for clients that want the answer whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from glmserve.inference.v1 import inference_pb2


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ChatChoice:
    """One choice of an answer."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprob] = field(default_factory=list)
    finish: inference_pb2.Finish = field(default_factory=inference_pb2.Finish)
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[_Call] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[inference_pb2.ToolCall]:
        return [
            inference_pb2.ToolCall(id=call.id, name=call.name, arguments_json="".join(call.arguments))
            for call in self._calls
        ]

    def add(self, response: inference_pb2.ChatResponse) -> None:
        """Take one message of this choice."""
        self._content.append(response.content)
        self._reasoning.append(response.reasoning)
        self.token_ids.extend(response.token_ids)
        self.logprobs.extend(response.logprobs)
        for delta in response.tool_calls:
            while delta.index >= len(self._calls):
                self._calls.append(_Call())
            call = self._calls[delta.index]
            call.id += delta.id
            call.name += delta.name
            call.arguments.append(delta.arguments_json)
        if response.HasField("finish"):
            self.finish = response.finish


@dataclass(slots=True)
class ChatAnswer:
    """All choices, in order."""

    request_id: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    choices: list[ChatChoice] = field(default_factory=list)

    @classmethod
    async def of(cls, responses: AsyncIterator[inference_pb2.ChatResponse]) -> ChatAnswer:
        """All there is."""
        answer = cls()
        async for response in responses:
            answer.request_id = response.request_id
            answer.prompt_ids.extend(response.prompt_ids)
            while response.choice >= len(answer.choices):
                answer.choices.append(ChatChoice())
            answer.choices[response.choice].add(response)
        return answer
