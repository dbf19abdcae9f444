"""From what a client wrote to what the fleet runs: prompts become token ids, options become sampling parameters."""

import random
import uuid
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from nearline.controller.durable.registry import Target
from nearline.controller.http.door import Caller, Door
from nearline.controller.http.generation import Call
from nearline.controller.http.numbers import MAX_COUNT
from nearline.controller.http.schemas import ChatFields, MessageBody, PromiseFields, SamplingBody
from nearline.controller.policy.agreement import Wish, agreed
from nearline.controller.shown import shown
from nearline.controller.text.models import TextModel
from nearline.controller.text.vocabulary import check_chars
from nearline.protocol import RequestId, SamplingParams, SloClass
from nearline.protocol.errors import ContextLengthExceeded, InvalidRequest
from nearline.protocol.request import Request

_SEED_MASK = 2**63 - 1
UNLIMITED = 1 << 30
MAX_ID_DIGITS = 10
MAX_CHARS_PER_TOKEN = 16
"""A text with more characters than this times the context is refused unread: prose has about four a token."""


async def chat_prompt(
    target: Target, text: TextModel, body: ChatFields, messages: list[MessageBody]
) -> tuple[int, ...]:
    """Render and tokenise a conversation. Raises InvalidRequest for what we cannot honour."""
    if body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("a forced tool call is not supported yet; use tool_choice auto", param="tool_choice")
    tools = None if body.tool_choice == "none" else body.tools
    plain = [message.model_dump() for message in messages]
    return await text.encode_chat(plain, tools, body.chat_template_kwargs, _max_chars(target))


async def text_prompt(target: Target, text: TextModel, prompt: str | list[int]) -> tuple[int, ...]:
    """Tokenise a raw prompt, or check the token ids a client made itself."""
    if isinstance(prompt, str):
        ids = await text.vocabulary.encode(prompt, max_chars=_max_chars(target))
    else:
        _room(target, len(prompt), "prompt", least=0)
        ids, size = tuple(prompt), vocab_size(target, text)
        wrong = next((i for i in ids if not 0 <= i < size), None)
        if wrong is not None:
            raise InvalidRequest(f"token id {shown(wrong)} is outside the vocabulary of {size} ids", param="prompt")
    if not ids and text.vocabulary.bos_token_id is not None:
        ids = (text.vocabulary.bos_token_id,)
    if not ids:
        raise InvalidRequest("the prompt is empty and this model has no beginning-of-text token", param="prompt")
    return ids


def vocab_size(target: Target, text: TextModel) -> int:
    return target.model.checkpoint.vocab_size or text.vocabulary.vocab_size


def make_call(
    caller: Caller,
    target: Target,
    text: TextModel,
    prompt: tuple[int, ...],
    body: SamplingBody,
    default_max_tokens: int,
    logprobs: int | None = None,
) -> Call:
    """Put one request together. Raises ContextLengthExceeded or InvalidRequest before anything runs."""
    is_chat = isinstance(body, ChatFields) and getattr(body, "messages", None) is not None
    asked = _max_tokens(body, default_max_tokens)
    room = _room(target, len(prompt), "messages" if is_chat else "prompt", min(asked, 1))
    sampling = _sampling(body, text, target, min(asked, room))
    checkpoint = target.model.checkpoint
    eos = () if body.ignore_eos else checkpoint.eos_token_ids
    adapter = target.adapter
    request = Request(
        request_id=RequestId(f"req_{uuid.uuid4().hex}"),
        model_id=target.model.model_id,
        prompt_token_ids=prompt,
        sampling=replace(sampling, logprobs=logprobs),
        slo=agreed(wish_of(body), caller.slo or target.model.slo, caller.slo_cap),
        tenant=caller.tenant,
        adapter_id=adapter.adapter_id if adapter else None,
        adapter_digest=adapter.checkpoint.digest if adapter else None,
        priority=body.priority,
        salt="" if caller.tenant == "default" else caller.tenant,
    )
    hidden = frozenset({*body.stop_token_ids, *eos})
    return Call(request, text, tuple(body.stop or ()), hidden, continues_prompt=not is_chat)


def choices(call: Call, n: int) -> list[Call]:
    """Repeat a call with seeds that follow each other, so that the choices differ and yet can be repeated."""
    request = call.request
    calls = [call]
    for index in range(1, n):
        sampling = replace(request.sampling, seed=(request.sampling.seed + index) & _SEED_MASK)
        again = replace(request, request_id=RequestId(f"{request.request_id}-{index}"), sampling=sampling)
        calls.append(replace(call, request=again))
    return calls


def wish_of(body: PromiseFields) -> Wish:
    """What a body asks for as its promise, in seconds."""
    deadlines_s = [body.deadline_s, body.deadline_ms and body.deadline_ms / 1e3]
    return Wish(
        slo_class=None if body.slo is None else SloClass(body.slo),
        ttft_s=None if body.ttft_ms is None else body.ttft_ms / 1e3,
        tpot_s=None if body.tpot_ms is None else body.tpot_ms / 1e3,
        deadline_s=min((deadline_s for deadline_s in deadlines_s if deadline_s is not None), default=None),
    )


def most_tokens(calls: Iterable[Call]) -> int:
    """Tokens that calls use at most: every prompt, and all they may generate."""
    return sum(len(call.request.prompt_token_ids) + call.request.sampling.max_tokens for call in calls)


def check_length(target: Target, prompt: str | list[int], least: int) -> None:
    """Refuse a prompt that cannot fit with `least` tokens behind it, whatever it is. Raises ContextLengthExceeded."""
    if isinstance(prompt, str):
        check_chars(len(prompt), _max_chars(target), "prompt")
    else:
        _room(target, len(prompt), "prompt", least)


def _max_chars(target: Target) -> int | None:
    limit = target.model.checkpoint.max_context_tokens
    return limit * MAX_CHARS_PER_TOKEN if limit else None


def _room(target: Target, num_prompt_tokens: int, param: str, least: int = 1) -> int:
    """Tokens that fit behind the prompt. Raises ContextLengthExceeded if they are fewer than `least`."""
    limit = target.model.checkpoint.max_context_tokens
    if not limit:
        return UNLIMITED
    if num_prompt_tokens + least > limit:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens, but the context of {shown(target.name)} holds {limit} with at"
            f" least {least} for the answer; shorten the prompt",
            param=param,
        )
    return limit - num_prompt_tokens


def _max_tokens(body: SamplingBody, default: int) -> int:
    asked = getattr(body, "max_completion_tokens", None)
    asked = asked if asked is not None else body.max_tokens
    if asked is None:
        return max(default, body.min_tokens)
    if body.min_tokens > asked:
        raise InvalidRequest(f"min_tokens {body.min_tokens} is more than max_tokens {asked}", param="min_tokens")
    return asked


def _sampling(body: SamplingBody, text: TextModel, target: Target, max_tokens: int) -> SamplingParams:
    size = vocab_size(target, text)
    wrong = next((i for i in body.stop_token_ids if not 0 <= i < size), None)
    if wrong is not None:
        raise InvalidRequest(f"token id {shown(wrong)} is outside the vocabulary of {size} ids", param="stop_token_ids")
    is_sampled = body.default_temperature == 0 and text.defaults.get("do_sample") is True
    temperature = _chosen(body.temperature, text, "temperature", 1.0 if is_sampled else body.default_temperature)
    top_p = _chosen(body.top_p, text, "top_p", 1.0)
    if top_p == 0:  # the smallest set is the likeliest token alone
        temperature, top_p = 0.0, 1.0
    top_k = int(_chosen(body.top_k, text, "top_k", 0))
    seed = body.seed & _SEED_MASK if body.seed is not None else random.getrandbits(62)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(body.min_tokens, max_tokens),
        temperature=temperature,
        top_k=min(max(top_k, 0), MAX_COUNT),
        top_p=top_p,
        min_p=_chosen(body.min_p, text, "min_p", 0.0),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=_chosen(body.repetition_penalty, text, "repetition_penalty", 1.0),
        logit_bias=_logit_bias(body.logit_bias or {}, size),
        seed=seed,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
    )


def _chosen(asked: float | None, text: TextModel, name: str, default: float) -> float:
    """The client's value, else the one the model's authors recommend, else the neutral one."""
    if asked is not None:
        return float(asked)
    recommended: Any = text.defaults.get(name)
    is_number = isinstance(recommended, (int, float)) and not isinstance(recommended, bool)
    is_number = is_number and -MAX_COUNT <= recommended <= MAX_COUNT  # not true of NaN
    return float(recommended) if is_number else default


def _logit_bias(bias: dict[str, float], size: int) -> tuple[tuple[int, float], ...]:
    found = []
    for key, value in bias.items():
        if not key.isdecimal() or len(key) > MAX_ID_DIGITS or int(key) >= size:
            raise InvalidRequest(f"{shown(key)} is no token id below {size}", param="logit_bias")
        found.append((int(key), float(value)))
    return tuple(sorted(found))


async def load(door: Door, name: str) -> tuple[Target, TextModel]:
    """Find what a name means and its text model. Raises ModelNotFound."""
    target = door.registry.resolve(name)
    adapter = target.adapter.checkpoint if target.adapter else None
    return target, await door.texts.get(target.model.checkpoint, adapter)
