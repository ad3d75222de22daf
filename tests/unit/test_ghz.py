"""The kit for ghz: its calls exist, its data parses as their requests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from google.protobuf import json_format

from glmserve.inference.v1 import inference_pb2
from router.validation import check_sampling

ROOT = Path(__file__).parents[2]
KIT = ROOT / "deploy" / "ghz"
# Of runner.Config in ghz; it drops what it does not know without a word.
KNOWN = {
    *("proto", "protoset", "import-paths", "call", "host", "authority", "data", "data-file", "binary-file"),
    *("insecure", "skipTLS", "cacert", "cert", "key", "cname", "metadata", "metadata-file"),
    *("total", "duration", "duration-stop", "max-duration", "rps", "concurrency", "connections", "async"),
    *("timeout", "connect-timeout", "keepalive", "name", "tags", "output", "format", "cpus"),
}


@pytest.mark.parametrize(
    ("config", "message"),
    [("generate.json", inference_pb2.GenerateRequest), ("chat.json", inference_pb2.ChatRequest)],
)
def test_the_data_parses_as_the_calls_request(
    config: str, message: type[inference_pb2.GenerateRequest | inference_pb2.ChatRequest]
) -> None:
    settings = json.loads((KIT / config).read_text())
    assert set(settings) <= KNOWN
    assert re.fullmatch(r"\d+s", settings["timeout"])
    service, _, method = settings["call"].rpartition(".")
    descriptor = inference_pb2.DESCRIPTOR.services_by_name[service.rpartition(".")[2]]
    assert descriptor.full_name == service
    assert descriptor.methods_by_name[method].input_type.full_name == message.DESCRIPTOR.full_name
    assert (ROOT / settings["proto"]).is_file()
    requests = json.loads((ROOT / settings["data-file"]).read_text())
    assert requests
    for request in requests:
        parsed = json_format.ParseDict(request, message())
        assert parsed.sampling.max_tokens == 32
        check_sampling(parsed.sampling, vocab_size=1000)
