"""Where text ends, on every endpoint, whole, streamed and as a job. Grammars make the model say what a case needs."""

import re
import threading
from pathlib import Path

import pytest

from tests.system.calls import WAYS, Way, frames
from tests.system.conftest import RunningPlatform, register

SAID = "abcDEFGHIJxyz"


@pytest.fixture(scope="module")
def model(platform: RunningPlatform, tiny_model: Path) -> str:
    with platform.client() as client:
        register(client, "stops", tiny_model, keep_alive_s=300, replace=True)
    return "stops"


def saying(text: str) -> dict[str, str]:
    return {"guided_regex": re.escape(text)}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_nothing_of_a_stop_string_that_spans_many_tokens_is_shown(
    platform: RunningPlatform, model: str, way: Way
) -> None:
    def ask(stop: object) -> tuple[str, str]:
        return way.ask(platform.url, model, stop=stop, **saying(SAID))

    assert ask("DEFGHIJ") == ("abc", "stop")
    assert ask(["nowhere", "DEFG", "FGHIJ"]) == ("abc", "stop")
    assert ask("DEFGHIx") == (SAID, "stop"), "held text is released when it turns out not to match"
    assert ask("xyzz") == (SAID, "stop"), "and at the end"


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_characters_of_many_bytes_arrive_whole_and_a_cut_one_ends_in_a_replacement(
    platform: RunningPlatform, model: str, way: Way
) -> None:
    text = "ď 👋 漢"
    assert way.ask(platform.url, model, **saying(text)) == (text, "stop")
    num_bytes = len("ď 👋".encode())
    cut, reason = way.ask(platform.url, model, max_tokens=num_bytes - 1, **saying(text))
    assert reason == "length"
    assert cut.startswith("ď ")
    assert set(cut[2:]) <= {"\ufffd"}


@pytest.mark.parametrize("way", [way for way in WAYS if way.kind != "job"], ids=str)
def test_a_stop_string_and_json_work_together(platform: RunningPlatform, model: str, way: Way) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}
    wanted = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    text, reason = way.ask(platform.url, model, stop='"b"', seed=1, max_tokens=400, **wanted)
    assert '"a"' in text
    assert '"b"' not in text
    assert reason == "stop"


def test_eight_streams_at_once_keep_their_characters(platform: RunningPlatform, model: str) -> None:
    texts = [f"{i}ď 👋 漢 é{i}" for i in range(8)]
    found: dict[int, str] = {}

    def ask(index: int) -> None:
        found[index] = Way("chat", "stream").ask(platform.url, model, **saying(texts[index]))[0]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(8)] == texts


def test_only_what_may_become_the_stop_string_is_held(platform: RunningPlatform, model: str) -> None:
    body = {"model": model, "prompt": "go", "stop": "q" * 60, "max_tokens": 60, **saying("qqab" * 15)}
    pieces = [frame["choices"][0]["text"] for frame in frames(f"{platform.url}/v1/completions", body)]
    assert "".join(pieces) == "qqab" * 15
    assert max(map(len, pieces)) == 3  # "qqa"


def test_the_end_of_text_never_shows(platform: RunningPlatform, model: str) -> None:
    for way in WAYS:
        text, _ = way.ask(platform.url, model, logit_bias={"258": 100}, max_tokens=5)
        assert text == ""
    text, reason = WAYS[0].ask(platform.url, model, logit_bias={"258": 100}, max_tokens=5, ignore_eos=True)
    assert (text, reason) == ("", "length")
