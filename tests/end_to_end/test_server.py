"""`llmc serve` in a process of its own, asked by OpenAI's client, by hand, and by those who mean it no good."""

from __future__ import annotations

import base64
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import numpy as np
import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from server_process import KEY, Server, serving

import llmc
from llmc.compiler.driver import compile_model

OTHER_KEY = "of-somebody-else"
MONTHS = [{"role": "user", "content": "List the months of the year."}]
STORY = "Once upon a time there was"
pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def artifact(smollm2_artifact: Callable[..., Path]) -> Path:
    return smollm2_artifact("q8")


@pytest.fixture(scope="module")
def model(artifact: Path) -> Iterator[Any]:
    with llmc.load(artifact, threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def server(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    others = tmp_path_factory.mktemp("keys") / "keys.txt"
    others.write_text(OTHER_KEY)
    options = ("--model-name", "small", "--threads", "1", "--max-tokens", "600", "--max-body-mb", "1")
    with serving(
        artifact, *options, "--allow-origin", "https://page.example", "--api-key-file", str(others)
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server) as own:
        yield own


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0, timeout=120)


def test_chat_says_what_the_model_says(client: openai.OpenAI, model: Any) -> None:
    own = model.chat(MONTHS, max_tokens=40)
    reply = client.chat.completions.create(model="small", messages=MONTHS, temperature=0, max_tokens=40)
    (choice,) = reply.choices
    assert (choice.message.content, choice.finish_reason) == (own.text, own.finish_reason)
    assert "December" in own.text
    assert reply.usage.completion_tokens == len(own.ids)
    assert reply.usage.prompt_tokens == len(own.prompt_ids)


def test_a_stream_is_the_same_text_in_pieces(client: openai.OpenAI, model: Any) -> None:
    own = model.chat(MONTHS, max_tokens=40)
    chunks = list(
        client.chat.completions.create(
            model="small", messages=MONTHS, temperature=0, max_tokens=40, stream=True, logprobs=True, top_logprobs=2,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    *pieces, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == len(own.ids)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == own.text
    assert [p.choices[0].finish_reason for p in pieces if p.choices[0].finish_reason] == [own.finish_reason]
    told = [token for p in pieces if p.choices[0].logprobs for token in p.choices[0].logprobs.content]
    assert "".join(token.token for token in told).startswith(own.text)
    assert all(token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob for token in told)
    assert len({piece.id for piece in chunks}) == 1


def test_several_answers_with_stops_and_biases(client: openai.OpenAI, model: Any) -> None:
    (banned,) = model.encode(" a")
    wishes: dict[str, Any] = {"max_tokens": 30, "temperature": 0.9, "n": 3, "seed": 5, "stop": ["."]}
    first, second = (
        client.chat.completions.create(model="small", messages=MONTHS, logit_bias={str(banned): -100}, **wishes)
        for _ in range(2)
    )
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert not any("." in text for text in texts)
    own = model.chat(MONTHS, logit_bias={banned: -100}, **wishes)
    assert texts == [own.text, *(other.text for other in own.others)]
    streamed: dict[int, str] = {}
    for chunk in client.chat.completions.create(model="small", messages=MONTHS, stream=True,
                                                logit_bias={str(banned): -100}, **wishes):  # fmt: skip
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert [streamed[index] for index in range(3)] == texts


def test_texts_and_token_ids_are_continued(client: openai.OpenAI, model: Any) -> None:
    ids = model.encode(STORY)
    wanted = model.generate(STORY, max_tokens=12)
    ask: dict[str, Any] = {"model": "small", "temperature": 0, "max_tokens": 12}
    both = client.completions.create(prompt=[STORY, "2 + 2 ="], **ask)
    assert [choice.text for choice in both.choices] == [wanted.text, model.generate("2 + 2 =", max_tokens=12).text]
    (choice,) = client.completions.create(prompt=ids, logprobs=2, **ask).choices
    assert choice.text == wanted.text
    assert "".join(choice.logprobs.tokens) == wanted.text
    assert len(choice.logprobs.token_logprobs) == 12
    assert choice.logprobs.text_offset[1] == len(choice.logprobs.tokens[0])
    (choice,) = client.completions.create(prompt=STORY, echo=True, **ask).choices
    assert choice.text == STORY + wanted.text
    pieces = client.completions.create(prompt=STORY, echo=True, stream=True, **ask)
    assert "".join(piece.choices[0].text for piece in pieces) == STORY + wanted.text


def test_options_of_ours_go_beside_openais(client: openai.OpenAI, model: Any) -> None:
    own = model.chat(MONTHS, strategy="fsd", max_tokens=20, min_tokens=20)
    reply = client.chat.completions.create(
        model="small", messages=MONTHS, max_tokens=20, extra_body={"strategy": "fsd", "min_tokens": 20}
    )
    assert reply.choices[0].message.content == own.text


def test_a_prediction_is_guessed_by(client: openai.OpenAI, model: Any) -> None:
    """As OpenAI's client sends it; the answer is the same, and the usage tells what the guesses were worth."""
    asked = [{"role": "user", "content": "Name the planets of the solar system, each on a line."}]
    said = model.chat(asked, max_tokens=80, ignore_eos=True, temperature=0).text
    reply = client.chat.completions.create(
        model="small", messages=asked, max_tokens=80, temperature=0, extra_body={"ignore_eos": True},
        prediction={"type": "content", "content": said},
    )  # fmt: skip
    assert reply.choices[0].message.content == said
    details = reply.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 40
    assert details.rejected_prediction_tokens >= 0


def test_keys_share_nothing(server: Server) -> None:
    """Neither pages of what was read, nor guesses by what was said."""
    body = {"prompt": "The keys of this house are " * 8, "max_tokens": 30, "temperature": 2.0, "seed": 3}

    def asked(key: str) -> tuple[int, int]:
        _, _, told = server.ask("/v1/completions", body, key=key)
        usage = told["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return cached, usage["completion_tokens_details"]["accepted_prediction_tokens"]

    first, again, other = asked(KEY), asked(KEY), asked(OTHER_KEY)
    assert first[0] == other[0] == 0
    assert again[0] >= 32
    assert again[1] > 10 > max(first[1], other[1])


PERSON = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip


def test_answers_have_the_form_that_is_asked_for(client: openai.OpenAI, server: Server, model: Any) -> None:
    asked = [{"role": "user", "content": "Ada Lovelace is 36 years old. Give her name and age as JSON."}]
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    ask: dict[str, Any] = {"model": "small", "messages": asked, "max_tokens": 200, "temperature": 0}
    reply = client.chat.completions.create(response_format=form, **ask).choices[0]
    assert reply.finish_reason == "stop"
    jsonschema.validate(json.loads(reply.message.content), PERSON)
    assert json.loads(reply.message.content)["name"] == "Ada Lovelace"
    assert reply.message.content == model.chat(asked, max_tokens=200, json_schema=PERSON).text
    reply = client.chat.completions.create(response_format={"type": "json_object"}, **ask).choices[0]
    assert isinstance(json.loads(reply.message.content), dict)
    reply = client.chat.completions.create(extra_body={"regex": "(yes|no)"}, **ask).choices[0]
    assert reply.message.content in ("yes", "no")
    wrong = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "wat"}}}
    status, _, told = server.ask(CHAT, {**GOOD, "response_format": wrong})
    assert (status, told["error"]["message"]) == (400, "json_schema: Invalid type: wat")


def test_many_at_once_say_what_each_says_alone(client: openai.OpenAI, model: Any) -> None:
    asked = [[{"role": "user", "content": f"Count from {n} to {n + 5}."}] for n in range(8)]
    alone = [model.chat(messages, max_tokens=24).text for messages in asked]

    def ask(messages: Any) -> str:
        pieces = client.chat.completions.create(
            model="small", messages=messages, temperature=0, max_tokens=24, stream=True
        )
        return "".join(piece.choices[0].delta.content or "" for piece in pieces)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, asked)) == alone


def test_what_else_there_is_to_ask(client: openai.OpenAI, server: Server) -> None:
    assert [each.id for each in client.models.list()] == ["small"]
    assert client.models.retrieve("small").id == "small"
    assert server.ask("/health", key=None)[::2] == (200, {"status": "ok"})
    before = server.figure("llmc_completion_tokens_total")
    client.completions.create(model="small", prompt=STORY, max_tokens=3, temperature=0, extra_body={"ignore_eos": True})
    assert server.figure("llmc_completion_tokens_total") == before + 3
    assert server.figure("llmc_engine_pages_free") > 0


GOOD = {"messages": MONTHS, "max_tokens": 2}
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/nothing", None, 404, "no such address"),
        (CHAT, None, 405, "not by this method"),
        (CHAT, {**GOOD, "model": "large"}, 404, "'large' is not here; this server has 'small'"),
        ("/v1/models/large", None, 404, "'large' is not here"),
        (CHAT, b"{", 400, "the body is not JSON"),
        (CHAT, b"\xff\xfe", 400, "the body is not JSON"),
        (CHAT, b"[" * 200_000, 400, "the body is not JSON"),
        (CHAT, b'{"messages": NaN}', 400, "NaN is not JSON"),
        (CHAT, b'{"n": 1, "n": 2}', 400, "keys given twice: n"),
        (CHAT, b"[]", 400, "no JSON object"),
        (CHAT, b"", 400, "the body is not JSON"),
        (CHAT, b" " * (1 << 20) + b"{}", 413, "more than 1048576 bytes"),
        (CHAT, {**GOOD, "wat": 1, "tools": [{}]}, 400, "wat: unknown field"),
        (CHAT, {**GOOD, "temperature": -1, "n": 0}, 400, "temperature: got -1"),
        (CHAT, {**GOOD, "max_tokens": 601}, 400, "at most 600"),
        (CHAT, {"messages": []}, 400, "at least one message"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        (CHAT, {"messages": [{"role": "u\n", "content": "x"}]}, 400, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 40_000}]}, 400, "context"),
        ("/v1/completions", {"prompt": [5, 10**9], "max_tokens": 2}, 400, "token"),
        ("/v1/completions", {"prompt": [STORY, ""], "max_tokens": 2, "logit_bias": {"99999999": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": STORY, "regex": "(a?){300}a{300}"}, 400, "regex: lexer error: too many"),
        ("/v1/embeddings", {"input": "a"}, 400, "cannot embed"),
    ],
)
def test_wrong_requests_get_a_status_and_a_line(server: Server, path: str, body: Any, status: int, words: str) -> None:
    got, _, reply = server.ask(path, body)
    assert (got, words in reply["error"]["message"]) == (status, True), reply
    assert "\n" not in reply["error"]["message"]
    assert reply["error"]["type"] == "invalid_request_error"
    assert server.ask(CHAT, GOOD)[0] == 200
    assert server.settles("llmc_engine_running", 0)


def test_a_key_is_wanted_and_a_json_body(server: Server) -> None:
    for key in (None, "", "wrong", KEY + "x"):
        for path, body in ((CHAT, GOOD), ("/v1/models", None), ("/metrics", None)):
            got, headers, reply = server.ask(path, body, key=key)
            assert (got, headers["WWW-Authenticate"], reply["error"]["code"]) == (401, "Bearer", "invalid_api_key")
    assert server.ask(CHAT, GOOD, Content_Type="text/plain")[0] == 415
    allowed = "Access-Control-Allow-Origin"
    assert server.ask(CHAT, GOOD, Origin="https://page.example")[1][allowed] == "https://page.example"
    assert server.ask(CHAT, GOOD, Origin="https://other.example")[1][allowed] is None


@pytest.mark.parametrize("streamed", [True, False])
def test_who_hangs_up_is_worked_for_no_more(server: Server, streamed: bool) -> None:
    asked = {"messages": MONTHS, "max_tokens": 600, "ignore_eos": True, "stream": streamed}
    with _connected(server) as line:
        line.sendall(_post(asked))
        if streamed:
            assert b"200 OK" in line.recv(4096)
        assert server.settles("llmc_engine_running", 1)
    assert server.settles("llmc_engine_running", 0, seconds=5)
    made = server.figure("llmc_engine_tokens_total")
    time.sleep(0.3)
    assert server.figure("llmc_engine_tokens_total") == made


def test_noise_on_the_line_hurts_nobody(server: Server) -> None:
    noise = [
        b"\x16\x03\x01\x02\x00" * 100, b"GET\r\n\r\n", b"POST " + b"/" * 200_000, b"\x00" * 5000,
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 50_000,
        _post(GOOD)[:-20],
    ]  # fmt: skip
    for each in noise:
        with _connected(server) as line:
            try:
                line.sendall(each)
                line.shutdown(socket.SHUT_WR)
                while line.recv(1 << 16):
                    pass
            except OSError:
                pass  # hung up on
    assert server.ask(CHAT, GOOD)[0] == 200
    assert server.settles("llmc_engine_running", 0)


def test_a_crowd_is_told_to_come_back(artifact: Path) -> None:
    options = ("--cache-tokens", "512", "--max-waiting", "1", "--threads", "1")
    with serving(artifact, *options) as server, ThreadPoolExecutor(3) as pool:
        long = {"prompt": STORY, "max_tokens": 400, "ignore_eos": True}
        replies = []
        for running in (1, 2, 3):
            replies.append(pool.submit(server.ask, "/v1/completions", long))
            assert server.settles("llmc_engine_running", running)
        assert server.settles("llmc_engine_waiting", 2)  # the cache has room for one
        status, headers, reply = server.ask("/v1/completions", long)
        assert (status, headers["Retry-After"], reply["error"]["code"]) == (503, "1", "overloaded")
        assert [each.result()[0] for each in replies] == [200] * 3
        assert server.ask("/v1/completions", {**long, "max_tokens": 2})[0] == 200


def test_sigterm_lets_answers_end(artifact: Path) -> None:
    with serving(artifact, "--threads", "1") as server, client_of(server) as client:
        stream = client.completions.create(
            model=None, prompt=STORY, max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )  # type: ignore[call-overload]
        next(iter(stream))
        threading.Timer(0.05, server.process.send_signal, [signal.SIGTERM]).start()
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert server.process.wait(20) == 143
        assert server.process.stderr is not None
        assert server.process.stderr.read() == ""


def test_an_encoder_gives_vectors(minilm: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "minilm.llmc"
    compile_model(str(minilm), str(artifact))
    texts = ["a cat", "a kitten", "a bus"]
    with llmc.load(artifact, threads=1) as model:
        wanted = model.embed(texts)
        tokens = sum(len(model.encode(text)) for text in texts)
    with serving(artifact, "--threads", "1") as server, client_of(server) as client:
        reply = client.embeddings.create(model="minilm", input=texts)  # in base64, unless told otherwise
        np.testing.assert_array_equal(np.array([each.embedding for each in reply.data], np.float32), wanted)
        assert reply.usage.prompt_tokens == tokens
        _, _, plain = server.ask("/v1/embeddings", {"input": "a cat"})
        np.testing.assert_allclose(plain["data"][0]["embedding"], wanted[0], atol=1e-6)
        _, _, packed = server.ask("/v1/embeddings", {"input": "a cat", "encoding_format": "base64"})
        vector = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
        np.testing.assert_allclose(vector, wanted[0], atol=1e-6)
        for wrong in ([1, 2], "word " * 2000):
            assert server.ask("/v1/embeddings", {"input": wrong})[0] == 400
        assert server.ask(CHAT, GOOD)[0] == 400


def test_a_script_is_told_where_it_is(artifact: Path) -> None:
    command = [sys.executable, "-m", "llmc", "serve", str(artifact), "--port", "0", "--json", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "}\n")
            told = json.loads("".join(lines) + "}")
            assert (told["model"], told["keys"]) == (artifact.stem, False)
            with urllib.request.urlopen(f"{told['address']}/health") as reply:
                assert reply.status == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
        finally:
            process.kill()


def test_what_cannot_be_served_is_said_in_a_line(artifact: Path, tmp_path: Path) -> None:
    def said(*options: str) -> str:
        done = subprocess.run([sys.executable, "-m", "llmc", "serve", *options], capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        return line

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "cannot listen there" in said(str(artifact), "--port", str(taken.getsockname()[1]))
    assert "no such file" in said(str(artifact), "--port", "0", "--api-key-file", str(tmp_path / "none"))
    (tmp_path / "empty").write_text("# none yet\n")
    assert "holds no key" in said(str(artifact), "--port", "0", "--api-key-file", str(tmp_path / "empty"))
    (tmp_path / "bad").write_text("a key with spaces\n")
    assert "printable ASCII" in said(str(artifact), "--port", "0", "--api-key-file", str(tmp_path / "bad"))
    assert "none.llmc" in said(str(tmp_path / "none.llmc"), "--port", "0")


def _connected(server: Server) -> socket.socket:
    where = urlsplit(server.address)
    assert where.hostname is not None
    assert where.port is not None
    return socket.create_connection((where.hostname, where.port), timeout=20)


def _post(body: Any) -> bytes:
    sent = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer {KEY}\r\n"
    return f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent
