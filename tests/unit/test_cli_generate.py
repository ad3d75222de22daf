"""`glm generate` and `glm chat` against a service that answers from a script."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from deploy.cli.client import RequestError, inference
from deploy.cli.conversation import Conversation
from deploy.cli.main import app
from glmserve.inference.v1 import inference_pb2
from tests.unit.cli_harness import PIECES, ScriptedService, serve


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()  # type: ignore[abstract]  # the commands call no other method


@pytest.fixture
def target(service: ScriptedService) -> Iterator[str]:
    server, address = serve(service)
    yield address
    server.stop(None).wait()


def test_text_goes_to_stdout_and_figures_to_stderr(target: str) -> None:
    result = CliRunner().invoke(app, ["generate", "--prompt", "The capital", "--target", target])
    assert result.exit_code == 0
    assert result.stdout == " Paris.\n"
    assert result.stderr == (
        "time to first token 0.500 s, 2.0 tokens/s, prompt 5 tokens (2 cached), completion 3 tokens, finish: length\n"
    )


def test_json_is_one_object(target: str) -> None:
    args = ["generate", "--prompt-ids", "504,3575", "--json", "--logprobs", "1", "--target", target]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert json.loads(result.stdout) == {
        "prompt_ids": [504, 3575],
        "token_ids": [100, 101, 102],
        "text": " Paris.",
        "finish_reason": "length",
        "logprobs": [{"id": id_, "logprob": -0.5, "top": [{"id": 7, "logprob": -2.5}]} for id_ in (100, 101, 102)],
        "usage": {"prompt_tokens": 5, "cached_prompt_tokens": 2, "completion_tokens": 3},
        "timings": {"queue_us": 10, "first_token_us": 500_000, "total_us": 1_500_000, "tokens_per_s": 2.0},
    }


def test_flags_reach_the_request(service: ScriptedService, target: str) -> None:
    args = ["generate", "--prompt-ids", "1,2", "--max-tokens", "9", "--temperature", "0.5", "--seed", str(2**64 - 1)]
    args += ["--model", "models/tiny", "--stop", "x", "--stop", "é", "--json"]
    result = CliRunner().invoke(app, [*args, "--target", target])
    assert json.loads(result.stdout)["logprobs"] is None
    assert service.generated == [
        inference_pb2.GenerateRequest(
            model="tiny",
            prompt_ids=inference_pb2.TokenIds(ids=[1, 2]),
            sampling=inference_pb2.SamplingOptions(max_tokens=9, temperature=0.5, seed=2**64 - 1, stop=["x", "é"]),
            return_prompt_ids=True,
        )
    ]


def test_an_empty_prompt_is_the_routers_to_refuse(service: ScriptedService, target: str) -> None:
    CliRunner().invoke(app, ["generate", "--prompt", "", "--target", target])
    assert service.generated[0].WhichOneof("input") == "prompt"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [(grpc.StatusCode.INVALID_ARGUMENT, 2), (grpc.StatusCode.UNAVAILABLE, 1), (grpc.StatusCode.INTERNAL, 1)],
)
def test_an_error_status_is_one_line(
    service: ScriptedService, target: str, code: grpc.StatusCode, exit_code: int
) -> None:
    service.refusal = (code, "prompt: must not be [empty]")
    result = CliRunner().invoke(app, ["generate", "--prompt", "a", "--target", target])
    assert result.exit_code == exit_code
    assert result.stdout == ""
    assert result.stderr == f"error: {code.name}: prompt: must not be [empty]\n"


def test_no_router_is_said_with_its_address() -> None:
    result = CliRunner().invoke(app, ["generate", "--prompt", "a", "--target", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "UNAVAILABLE" in result.stderr
    assert "127.0.0.1:1" in result.stderr


def test_chat_sends_the_whole_conversation(service: ScriptedService, target: str) -> None:
    args = ["chat", "--system", "Be brief.", "--temperature", "0", "--target", target]
    result = CliRunner().invoke(app, args, input="Hello\n\nAnd now?\n")
    assert result.exit_code == 0
    assert result.stdout.count(" Paris.\n") == 2
    assert [(message.role, message.content) for message in service.chatted[-1].messages] == [
        (inference_pb2.ROLE_SYSTEM, "Be brief."),
        (inference_pb2.ROLE_USER, "Hello"),
        (inference_pb2.ROLE_ASSISTANT, " Paris."),
        (inference_pb2.ROLE_USER, "And now?"),
    ]
    assert service.chatted[-1].sampling.temperature == 0
    assert not service.chatted[-1].sampling.HasField("max_tokens")


def test_chat_shows_reasoning_apart_and_asks_for_results_of_calls(
    service: ScriptedService, target: str, tmp_path: Path
) -> None:
    tool = {"name": "weather", "description": "Of a city.", "parameters": {"type": "object"}}
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([{"type": "function", "function": tool}]))
    delta, answer = inference_pb2.ToolCallDelta, inference_pb2.ChatResponse
    service.answers.append(
        [
            answer(reasoning="They "),
            answer(reasoning="ask."),
            answer(content="I look."),
            answer(tool_calls=[delta(id="a", name="weather"), delta(arguments_json='{"city": ')]),
            answer(
                tool_calls=[delta(arguments_json='"Paris"}'), delta(index=1, id="b", name="now", arguments_json="{}")]
            ),
            answer(finish=inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_TOOL_CALLS)),
        ]
    )
    args = ["chat", "--no-thinking", "--tools", str(file), "--target", target]
    result = CliRunner().invoke(app, args, input="Hello\n12\nnoon\n")
    assert result.exit_code == 0
    assert "They ask.\n" in result.stderr
    assert 'I look.\nweather({"city": "Paris"}) = now({}) =  Paris.\n' in result.stdout
    [first, second] = service.chatted
    assert first.enable_thinking is False
    assert first.HasField("enable_thinking")
    assert [(tool.name, json.loads(tool.parameters_json_schema)) for tool in first.tools] == [
        ("weather", {"type": "object"})
    ]
    asked, said, *results = second.messages
    assert (asked.content, said.content, said.reasoning) == ("Hello", "I look.", "They ask.")
    assert [(call.id, call.name, call.arguments_json) for call in said.tool_calls] == [
        ("a", "weather", '{"city": "Paris"}'),
        ("b", "now", "{}"),
    ]
    assert [(message.role, message.tool_call_id, message.content) for message in results] == [
        (inference_pb2.ROLE_TOOL, "a", "12"),
        (inference_pb2.ROLE_TOOL, "b", "noon"),
    ]


def test_calls_that_were_cut_short_are_not_kept(service: ScriptedService, target: str) -> None:
    cut = inference_pb2.ToolCallDelta(id="a", name="weather", arguments_json='{"city": "Pa')
    length = inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_LENGTH)
    service.answers.append([inference_pb2.ChatResponse(content="So", tool_calls=[cut], finish=length)])
    result = CliRunner().invoke(app, ["chat", "--target", target], input="Hello\nAgain\n")
    assert result.exit_code == 0
    assert [message.content for message in service.chatted[1].messages] == ["Hello", "So", "Again"]
    assert not service.chatted[1].messages[1].tool_calls


@pytest.mark.parametrize("text", ["{", "{}5", "5", "[5]", '[{"function": {"name": 5}}]', "[{}]", "\ufeff"])
def test_a_file_of_something_else_is_no_file_of_tools(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tools.json"
    file.write_text(text, encoding="utf-8")
    result = CliRunner().invoke(app, ["chat", "--tools", str(file), "--target", "127.0.0.1:1"])
    assert result.exit_code == 2
    assert "tools.json" in result.stderr


def test_chat_goes_on_after_a_refused_turn(service: ScriptedService, target: str) -> None:
    service.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "messages: too long")
    result = CliRunner().invoke(app, ["chat", "--target", target], input="Hello\nAgain\n")
    assert result.exit_code == 0
    assert result.stderr.count("error: INVALID_ARGUMENT: messages: too long") == 2
    assert [[message.content for message in request.messages] for request in service.chatted] == [["Hello"], ["Again"]]


def test_ctrl_c_ends_the_answer_and_not_the_program(service: ScriptedService, target: str) -> None:
    service.interrupts = 1
    result = CliRunner().invoke(app, ["chat", "--target", target], input="Hello\nAgain\n")
    assert result.exit_code == 0
    assert service.cancelled.is_set()
    assert "(stopped)" in result.stderr
    assert result.stdout.endswith(" Paris.\n> \n")
    assert service.chatted[1].messages[-1].content == "Again"


def test_an_aborted_answer_stays_as_far_as_it_came(target: str) -> None:
    with inference(None, target) as client:
        conversation = Conversation(client, inference_pb2.ChatRequest(), None)
        with contextlib.closing(conversation.say("Hello")) as pieces:
            assert next(pieces).content == PIECES[0]
        assert [message.content for message in conversation.messages] == ["Hello", PIECES[0]]
        assert "".join(piece.content for piece in conversation.say("Again")) == "".join(PIECES)


def test_a_turn_without_an_answer_is_taken_back(service: ScriptedService, target: str) -> None:
    service.refusal = (grpc.StatusCode.UNAVAILABLE, "draining")
    with inference(None, target) as client:
        conversation = Conversation(client, inference_pb2.ChatRequest(), "Be brief.")
        with pytest.raises(RequestError, match="draining"):
            list(conversation.say("Hello"))
    assert [message.content for message in conversation.messages] == ["Be brief."]
