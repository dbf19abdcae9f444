"""Templates that Python cannot compile, and which of them may wait for others; test_models.py has what they render."""

from typing import Any

import pytest

from nearline.controller.text import templates as module
from nearline.controller.text.templates import ChatTemplate
from nearline.protocol.errors import InvalidRequest, UnsupportedCheckpoint


@pytest.mark.parametrize(
    "source",
    [
        "{% if 1 %}" * 400 + "x" + "{% endif %}" * 400,
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
    ],
    ids=["deep blocks", "deep parentheses", "deep loops"],
)
def test_a_template_that_python_cannot_compile_is_refused_in_our_words(source: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="nested too deeply"):
        ChatTemplate(source, {})


async def test_a_template_is_slow_until_it_has_been_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    run = module._renders.run

    async def noted(work: Any, limit_s: float, is_quick: bool) -> Any:
        seen.append(is_quick)
        return await run(work, limit_s, is_quick)

    monkeypatch.setattr(module._renders, "run", noted)
    template = ChatTemplate("{% for a in range(n) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", {})
    monkeypatch.setattr(module, "QUICK_S", 60.0)
    await template.render([], options={"n": 1})
    monkeypatch.setattr(module, "RENDER_LIMIT_S", 0.2)
    with pytest.raises(InvalidRequest, match="simplify"):
        await template.render([], options={"n": 99999})
    monkeypatch.setattr(module, "RENDER_LIMIT_S", 60.0)
    monkeypatch.setattr(module, "QUICK_S", 0.0)
    await template.render([], options={"n": 1})
    await template.render([], options={"n": 1})
    assert seen == [False, True, False, False]
