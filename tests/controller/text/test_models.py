"""Tokenising and chat templates, judged by transformers on the same files."""

import asyncio
import errno
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from nearline.controller.text import models as text_module
from nearline.controller.text.models import TextModel, TextModels, named_templates
from nearline.controller.text.templates import ChatTemplate
from nearline.controller.text.vocabulary import INLINE_CHARS
from nearline.protocol import CheckpointInfo, CheckpointKind, Digest
from nearline.protocol.errors import InvalidRequest, NoChatTemplate, NodeLost, UnsupportedCheckpoint
from tests.conftest import CHATML

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi ď 👋"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]
TEMPLATES = {
    "chatml": CHATML,
    "llama-like": (
        "{{- bos_token }}\n"
        "{%- if messages[0]['role'] == 'system' %}\n"
        "    {%- set system = messages[0]['content']|trim %}\n"
        "    {%- set messages = messages[1:] %}\n"
        "{%- else %}\n    {%- set system = '' %}\n{%- endif %}\n"
        "{{- '<<' + system + '>>' }}\n"
        "{%- for message in messages %}\n"
        "    {%- if loop.index0 > 90 %}{% break %}{% endif %}\n"
        "    {{- message['role'] + ': ' + message['content'] | trim + '\\n' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- 'assistant: ' }}\n{%- endif %}\n"
    ),
    "tools": "{% for t in tools or [] %}{{ t | tojson(indent=2) }}{% endfor %}{{ messages[-1].content + eos_token }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
}


def files_of(tokenizer_json: dict[str, Any], **config: Any) -> dict[str, bytes]:
    settings = {"bos_token": "<|bos|>", "eos_token": {"content": "<|im_end|>"}, **config}
    return {
        "tokenizer.json": json.dumps(tokenizer_json).encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }


@pytest.mark.parametrize("name", sorted(TEMPLATES))
async def test_a_conversation_becomes_the_prompt_transformers_makes(
    name: str, tiny_tokenizer_json: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tiny_tokenizer_json))
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token="<|bos|>", eos_token="<|im_end|>")
    tools = [{"type": "function", "function": {"name": "f", "description": "<ü>"}}] if name == "tools" else None
    template = ChatTemplate(TEMPLATES[name], {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"})
    expected = oracle.apply_chat_template(
        TALK, tools=tools, chat_template=TEMPLATES[name], add_generation_prompt=True, tokenize=False
    )
    assert await template.render(TALK, tools) == expected
    text = TextModel.of(files_of(tiny_tokenizer_json, chat_template=TEMPLATES[name]))
    ids = await text.encode_chat(TALK, tools, None)
    assert list(ids) == oracle(expected, add_special_tokens=False)["input_ids"]


async def test_a_model_without_a_template_says_so_with_a_code_of_its_own(tiny_tokenizer_json: dict[str, Any]) -> None:
    bare, chats = files_of(tiny_tokenizer_json), files_of(tiny_tokenizer_json, chat_template=TEMPLATES["tools"])
    assert TextModel.of(chats).has_chat_template
    text = TextModel.of(bare)
    assert not text.has_chat_template
    with pytest.raises(NoChatTemplate, match="no chat template") as refused:
        await text.encode_chat(TALK, None, None)
    assert (refused.value.code, refused.value.status, refused.value.param) == ("no_chat_template", 400, "messages")


async def test_a_template_that_refuses_is_quoted() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="Roles must alternate") as refused:
        await template.render(TALK)
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0]['content'].nope.nope }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10**9 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 1 / 0 }}",
    ],
)
async def test_a_template_that_misbehaves_is_the_callers_error(source: str) -> None:
    with pytest.raises(InvalidRequest):
        await ChatTemplate(source, {}).render(TALK)


async def test_a_template_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearline.controller.text.templates.RENDER_LIMIT_S", 0.2)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="simplify"):
        await ChatTemplate(loops, {}).render(TALK)


async def test_a_render_that_outlasts_the_event_loops_patience_gives_the_same_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nearline.controller.text.render_thread.INLINE_S", 1e-6)
    counts = "{% for a in range(300) %}{% for b in range(300) %}{{ a - b }},{% endfor %}{% endfor %}"
    expected = "".join(f"{a - b}," for a in range(300) for b in range(300))
    assert await ChatTemplate(counts, {}).render(TALK) == expected


def test_a_template_that_is_none_is_refused_when_loaded() -> None:
    with pytest.raises(UnsupportedCheckpoint, match="line 1"):
        ChatTemplate("{% for %}", {})


async def test_parts_nulls_and_developers_are_understood() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}", {})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    talk = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    ]
    assert await template.render(talk) == "system=rules;user=a\nb;assistant=;"
    knowing = ChatTemplate("{{ messages[0].role }}{# developer #}", {})
    assert await knowing.render(talk) == "developer"
    with pytest.raises(InvalidRequest, match="image_url"):
        await template.render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_the_template_file_wins_and_lists_are_read_by_name(tiny_tokenizer_json: dict[str, Any]) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    files = files_of(tiny_tokenizer_json, chat_template=named)
    assert named_templates(files) == {"default": "D", "tool_use": "T"}
    assert named_templates({**files, "chat_template.jinja": b"F"}) == {"default": "F", "tool_use": "T"}


async def test_tools_choose_their_template_and_no_template_names_the_cure(tiny_tokenizer_json: dict[str, Any]) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "TT"}]
    text = TextModel.of(files_of(tiny_tokenizer_json, chat_template=named))
    assert len(await text.encode_chat(TALK, None, None)) == 1
    assert len(await text.encode_chat(TALK, [{"type": "function"}], None)) == 2
    with pytest.raises(InvalidRequest, match=r"chat_template\.jinja"):
        await TextModel.of(files_of(tiny_tokenizer_json)).encode_chat(TALK, None, None)


async def test_a_template_that_cannot_render_is_told_by_its_line_without_a_word_of_python() -> None:
    template = ChatTemplate("{# one #}\n{{ messages[0].content.parts[0].nothing + 3 }}", {})
    with pytest.raises(InvalidRequest) as refused:
        await template.render(TALK)
    assert "cannot render these messages (line 2 of the template)" in refused.value.message
    assert not {"Error", "object", "attribute", "str"} & set(re.findall(r"\w+", refused.value.message))
    assert refused.value.param == "messages"


@pytest.mark.parametrize(("add_bos", "first"), [(True, 256), (False, 97), (None, 97)])
async def test_the_beginning_of_text_is_added_as_the_model_says(
    tiny_tokenizer_json: dict[str, Any], add_bos: bool | None, first: int
) -> None:
    text = TextModel.of(files_of(tiny_tokenizer_json, add_bos_token=add_bos))
    plain = await text.vocabulary.encode("a", add_special=False)
    ids = await text.vocabulary.encode("a")
    assert ids == ((256, *plain) if first == 256 else plain)


async def test_long_texts_are_tokenised_beside_the_event_loop(tiny_tokenizer_json: dict[str, Any]) -> None:
    text = TextModel.of(files_of(tiny_tokenizer_json))
    assert len(await text.vocabulary.encode("ab" * INLINE_CHARS)) == 2 * INLINE_CHARS
    with pytest.raises(InvalidRequest, match="Unicode"):
        await text.vocabulary.encode("\ud800")


def test_a_model_without_a_fast_tokenizer_names_the_cure() -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"tokenizer\.json"):
        TextModel.of({})


async def test_files_are_fetched_once_and_survive_without_any_node(
    tiny_tokenizer_json: dict[str, Any], tmp_path: Path
) -> None:
    files = files_of(tiny_tokenizer_json, chat_template=CHATML)
    fetched: list[str] = []
    is_up = True

    async def fetch(digest: Digest, name: str) -> bytes:
        if not is_up:
            raise NodeLost("no node")
        fetched.append(name)
        await asyncio.sleep(0.01)
        return files[name]

    info = CheckpointInfo(
        Digest("d"), CheckpointKind.MODEL, 1, "f", "a", "/m", "float32", ("config.json", *files), eos_token_ids=(258,)
    )
    texts = TextModels(tmp_path, fetch)
    found = await asyncio.gather(*[texts.get(info) for _ in range(10)])
    assert len({id(text) for text in found}) == 1
    assert sorted(fetched) == sorted(files)
    is_up = False
    again = await TextModels(tmp_path, fetch).get(info)
    assert await again.vocabulary.encode("a") == await found[0].vocabulary.encode("a")
    other = CheckpointInfo(Digest("e"), CheckpointKind.MODEL, 1, "f", "a", "/m", "float32", tuple(files))
    with pytest.raises(NodeLost):
        await texts.get(other)
    is_up = True
    await texts.get(other)
    own = CheckpointInfo(Digest("ad"), CheckpointKind.ADAPTER, 1, "f", "a", "/m", "float32", ("chat_template.jinja",))
    files["chat_template.jinja"] = b"X"
    assert len(await (await texts.get(info, own)).encode_chat(TALK, None, None)) == 1
    older = replace(own, digest=Digest("ae"), files=("tokenizer_config.json",))
    files["tokenizer_config.json"] = b'{"chat_template": "YZ"}'
    assert len(await (await texts.get(info, older)).encode_chat(TALK, None, None)) == 2


async def test_texts_go_once_nothing_needs_them_those_of_earlier_runs_too(
    tmp_path: Path, tiny_tokenizer_json: dict[str, Any]
) -> None:
    fetched: list[Digest] = []

    async def fetch(digest: Digest, name: str) -> bytes:
        fetched.append(digest)
        return json.dumps(tiny_tokenizer_json).encode()

    kept, gone = [
        CheckpointInfo(Digest(digest), CheckpointKind.MODEL, 1, "f", "a", "/m", "float32", ("tokenizer.json",))
        for digest in ("kept", "gone")
    ]
    texts = TextModels(tmp_path, fetch)
    await texts.sweep(())
    for info in (kept, gone):
        await texts.get(info)
    (tmp_path / "earlier").mkdir()
    needed = {kept.digest: 1}
    await texts.sweep(needed)
    assert len(list(tmp_path.iterdir())) == 3, "a name may be on its way"
    await texts.sweep(needed)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    needed[gone.digest] = 1
    for info in (kept, gone):
        await texts.get(info)
    assert fetched == ["kept", "gone", "gone"]
    for _ in range(2):
        await texts.sweep(needed)
    assert len(list(tmp_path.iterdir())) == 2


async def test_a_file_that_a_crash_has_torn_is_fetched_again(
    tmp_path: Path, tiny_tokenizer_json: dict[str, Any]
) -> None:
    async def fetch(digest: Digest, name: str) -> bytes:
        return json.dumps(tiny_tokenizer_json).encode()

    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "tokenizer.json").write_bytes(b"")
    files = ("tokenizer.json",)
    info = CheckpointInfo(Digest("d"), CheckpointKind.MODEL, 1, "f", "a", "/m", "float32", files)
    assert await (await TextModels(tmp_path, fetch).get(info)).vocabulary.encode("a")


async def test_what_cannot_be_read_though_it_was_fetched_anew_is_left_alone_for_a_while(
    tmp_path: Path, tiny_tokenizer_json: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []
    data = b"{"

    async def fetch(digest: Digest, name: str) -> bytes:
        fetched.append(name)
        return data

    files = ("tokenizer.json",)
    info = CheckpointInfo(Digest("d"), CheckpointKind.MODEL, 1, "f", "a", "/m", "float32", files)
    texts = TextModels(tmp_path, fetch)
    for _ in range(5):
        with pytest.raises(Exception, match="EOF"):
            await texts.get(info)
    assert fetched == ["tokenizer.json"] * 2
    monkeypatch.setattr(text_module, "UNREADABLE_S", 0.0)
    texts = TextModels(tmp_path, fetch)
    with pytest.raises(Exception, match="EOF"):
        await texts.get(info)
    data = json.dumps(tiny_tokenizer_json).encode()
    await asyncio.sleep(0.01)
    assert await (await texts.get(info)).vocabulary.encode("a")


async def test_what_a_full_disk_takes_of_a_text_does_not_stay_there(
    tmp_path: Path, tiny_tokenizer_json: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetch(digest: Digest, name: str) -> bytes:
        return json.dumps(tiny_tokenizer_json).encode()

    def write_in_part(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_in_part)
    files = ("tokenizer.json",)
    info = CheckpointInfo(Digest("d"), CheckpointKind.MODEL, 1, "f", "a", "/m", "float32", files)
    await TextModels(tmp_path, fetch).get(info)
    assert list((tmp_path / "d").iterdir()) == []


def adapter_of(digest: str, *files: str) -> CheckpointInfo:
    return CheckpointInfo(Digest(digest), CheckpointKind.ADAPTER, 1, "f", "a", "/m", "float32", files)


async def test_an_adapters_template_is_read_and_compiled_once_however_often_it_is_called(
    tiny_tokenizer_json: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of(tiny_tokenizer_json, chat_template="base")
    compiled, threads = [], []

    async def fetch(digest: Digest, name: str) -> bytes:
        return f"{digest}{{{{ bos_token }}}}".encode() if name == "chat_template.jinja" else files[name]

    class Counted(ChatTemplate):
        def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
            compiled.append(source)
            threads.append(threading.current_thread())
            super().__init__(source, special_tokens)

    monkeypatch.setattr("nearline.controller.text.templates.ChatTemplate", Counted)
    models = [
        CheckpointInfo(Digest(digest), CheckpointKind.MODEL, 1, "f", "a", "/m", "float32", tuple(files))
        for digest in ("m1", "m2")
    ]
    texts, adapter = TextModels(tmp_path, fetch), adapter_of("ad", "chat_template.jinja")
    for _ in range(5):
        for model in models:
            text = await texts.get(model, adapter)
            expected = (*await text.vocabulary.encode("ad", add_special=False), text.vocabulary.bos_token_id)
            assert await text.encode_chat(TALK, None, None) == expected
    assert compiled == ["ad{{ bos_token }}"] * 2, "once with each model's special tokens"
    assert threading.current_thread() not in threads
    assert (await texts.get(models[0])).vocabulary is (await texts.get(models[0], adapter)).vocabulary
    await texts.sweep({models[0].digest: 1})
    await texts.sweep({models[0].digest: 1})
    await (await texts.get(models[0], adapter)).encode_chat(TALK, None, None)
    assert len(compiled) == 3, "it was forgotten with its files"


async def test_the_templates_of_many_adapters_are_kept_within_a_bound(
    tiny_tokenizer_json: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nearline.controller.text.models.MAX_ADAPTED", 2)
    files = files_of(tiny_tokenizer_json)
    reads: list[object] = []

    async def fetch(digest: Digest, name: str) -> bytes:
        return b"x" if name == "chat_template.jinja" else files[name]

    named = text_module.named_templates

    def noted(found: Mapping[str, bytes]) -> dict[str, str]:
        reads.append(found)
        return named(found)

    monkeypatch.setattr(text_module, "named_templates", noted)
    model = CheckpointInfo(Digest("m"), CheckpointKind.MODEL, 1, "f", "a", "/m", "float32", tuple(files))
    texts = TextModels(tmp_path, fetch)
    for digest in ("a", "b", "b", "c", "b", "a"):  # a went for c, and is read again
        await (await texts.get(model, adapter_of(digest, "chat_template.jinja"))).encode_chat(TALK, None, None)
    assert len(reads) == 1 + 4
