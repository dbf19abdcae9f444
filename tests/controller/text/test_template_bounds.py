"""Calls that would make gigabytes are refused; those that templates are made of are not."""

import pytest

from nearline.controller.text.templates import ChatTemplate
from nearline.protocol.errors import InvalidRequest

LARGE = [
    "{{ 'x' * 10**9 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%.1000000000f' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%(a)1000000000s' % {'a': 1} }}",
    "{{ ('%999999d' * 1000) % ([1] * 1000) }}",
    "{{ '%1000000000s'|format('a') }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 1000000000) }}",
    "{{ 'x'|center(1000000000) }}",
    "{{ 'x'.center(1000000000) }}",
    "{{ 'x'.ljust(1000000000) }}",
    "{{ 'x'.rjust(1000000000, '-') }}",
    "{{ '1'.zfill(1000000000) }}",
    "{{ ('\\t' * 100000).expandtabs(tabsize=100000) }}",
    "{{ 'x'.encode().ljust(1000000000) }}",
    "{{ 'x'.encode() * 1000000000 }}",
    "{{ ((((9**64)**64)**64)**64) % 7 }}",
    "{% set n = namespace(v=9) %}{% for i in range(40) %}{% set n.v = n.v * n.v %}{% endfor %}{{ n.v % 7 }}",
]


@pytest.mark.parametrize("source", LARGE)
async def test_one_call_makes_no_gigabytes(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render"):
        await ChatTemplate(source, {}).render([])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '%05.1f|%s' % (2.25, 'a') }}", "002.2|a"),
        ("{{ '%d%% of %s' % (50, '1234567890') }}", "50% of 1234567890"),
        ("{{ '%(a)s'|format(a=3) }}", "3"),
        ('{{ \'{{"n": "{}", "at": {:>4}}}\'.format(\'f\', 1700000000) }}', '{"n": "f", "at": 1700000000}'),
        ("{{ 'x'|center(5) }}{{ 'x'.ljust(3) }}|", "  x  x  |"),
        ("{{ '7'.zfill(3) ~ ('-' * 3) ~ 2**10 ~ 7 % 4 ~ 2.5 * 2 }}", "007---10243" + "5.0"),
        ("{{ ('a,' * 400000).split(',', 400)|length }}", "401"),
        ("{{ 123456789 * 987654321 }}", "121932631112635269"),
    ],
)
async def test_ordinary_ones_give_what_python_gives(source: str, text: str) -> None:
    assert await ChatTemplate(source, {}).render([]) == text
