"""What a client says the whole answer must look like: response_format and vLLM's guided_* extras."""

from dataclasses import replace

from nearline.controller.http.door import Door
from nearline.controller.http.generation import Call
from nearline.controller.http.schemas import ResponseFormat, SamplingBody
from nearline.controller.text.grammars import choice_grammar
from nearline.protocol import Grammar, GrammarKind, TenantId
from nearline.protocol.errors import InvalidRequest

ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')


async def grammar_of(door: Door, tenant: TenantId, body: SamplingBody) -> Grammar | None:
    """Read and check the grammar of a body. Raises InvalidRequest naming the field, and for a schema the place."""
    found: list[tuple[str, Grammar]] = []
    if body.response_format is not None and body.response_format.type != "text":
        found.append(_format_grammar(body.response_format))
    if body.guided_regex is not None:
        found.append(("guided_regex", Grammar(GrammarKind.REGEX, body.guided_regex)))
    if body.guided_choice is not None:
        found.append(("guided_choice", choice_grammar(body.guided_choice)))
    if body.guided_grammar is not None:
        found.append(("guided_grammar", Grammar(GrammarKind.LARK, body.guided_grammar)))
    if len(found) > 1:
        raise InvalidRequest(f"{found[0][0]} and {found[1][0]} exclude each other; send one", param=found[1][0])
    for param, grammar in found:
        await door.grammars.check(grammar, param, tenant)
        return grammar
    return None


def bounded(call: Call, grammar: Grammar | None) -> Call:
    """Have a call keep to a grammar."""
    if grammar is None:
        return call
    sampling = replace(call.request.sampling, grammar=grammar)
    return replace(call, request=replace(call.request, sampling=sampling))


def _format_grammar(wanted: ResponseFormat) -> tuple[str, Grammar]:
    if wanted.type == "json_object":
        return "response_format", ANY_OBJECT
    if wanted.json_schema is None:
        raise InvalidRequest(
            "response_format of type json_schema needs json_schema: {name, schema}", param="response_format.json_schema"
        )
    text = wanted.json_schema.schema_
    grammar = ANY_OBJECT if text is None else Grammar(GrammarKind.JSON_SCHEMA, text)
    return "response_format.json_schema.schema", grammar
