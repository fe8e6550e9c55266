"""Which bodies of requests are the same."""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

import pytest

from idempotency.errors import InvalidArguments
from idempotency.http import body as bodies
from idempotency.http.body import canonical, digest

# Each line one value. The last ones are small, long, and beyond a float's digits.
SAME = [
    ("1.5", "1.50", "15e-1", "0.15E1"),
    ("1", "1.0", "10e-1", "1.000"),
    ("-1", "-1.0", "-1E0"),
    ("0", "0.0", "-0.0", "0e5", "-0"),
    ("1000", "1e3", "1000.00"),
    ("0.000001", "1e-6", "0.0000010"),
    ("0.0000001", "1e-7", "10E-8"),
    ("10.0000005", "100000005e-7"),
    ("1e-99999", "10e-100000"),
    ("0.1",),
    ("0.1000000000000000000001",),
    ("123456789012345678901234567890.1", "123456789012345678901234567890.10"),
    ("0." + "1" * 400, "0." + "1" * 400 + "0"),
    ("9" * 299 + ".5", "9" * 299 + "5e-1"),
    ('"1.5"',),
    ('{"__type__": "decimal", "__value__": "1.5"}', '{"__value__": "1.5", "__type__": "decimal"}'),
    ("true",),
    ('"\\u00e9"', '"é"'),
    ('"\\ud83d\\ude00"', '"😀"'),
]


def test_numbers_are_compared_by_their_exact_value_and_with_nothing_else() -> None:
    forms = [{canonical(each.encode()) for each in line} for line in SAME]
    assert [len(each) for each in forms] == [1] * len(SAME)
    assert len(set.union(*forms)) == len(SAME)


def test_numbers_are_the_same_where_their_decimals_are() -> None:
    digits = random.Random(13)
    texts = [
        f"{digits.choice(('', '-'))}{digits.choice((0, 1, 10, 250))}.{digits.choice(('0', '50', '0000000', '0000005'))}"
        f"{digits.choice(('', 'e2', 'E-2', 'e-12'))}"
        for _ in range(300)
    ]
    by_value: dict[Decimal, set[str]] = {}
    for text in texts:
        by_value.setdefault(Decimal(text), set()).add(canonical(text.encode()))
    assert {len(forms) for forms in by_value.values()} == {1}
    assert len(set.union(*by_value.values())) == len(by_value)


def test_a_plain_number_costs_no_decimal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MiB of them, as an embedding or a time series has, would keep the interpreter busy for half a second."""

    def decimal(_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(bodies, "Decimal", decimal)
    assert canonical(b"[0.1, -12.50, 3.0, 4]") == r'["\u00000.1","\u0000-12.5",3,4]'


def test_a_text_cannot_look_like_a_number() -> None:
    for text in (rb'"\u00001.5"', b'"\x001.5"', rb'{"\u00001.5": 1}'):
        with pytest.raises(InvalidArguments):
            canonical(text)


FORM = b'--{b}\r\nContent-Disposition: form-data; name="scan"\r\n\r\nthe same bytes\r\n--{b}--\r\n'
HEADERS = {
    "bare": "multipart/form-data; boundary={b}",
    "quoted": 'multipart/form-data; charset=utf-8; boundary="{b}"',
    "in capitals": "Multipart/Form-Data; BOUNDARY={b}",
}


def form(boundary: str, body: bytes = FORM, header: str = HEADERS["bare"]) -> dict[str, str]:
    return digest(body.replace(b"{b}", boundary.encode()), header.replace("{b}", boundary))


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_form_sent_again_with_another_boundary_is_the_same(header: str) -> None:
    assert form("abc", header=header) == form("xyz-123", header=header) == form("abc")


def test_a_form_with_other_parts_is_another() -> None:
    others = [FORM.replace(b"the same", b"other"), FORM.replace(b"scan", b"other"), FORM + FORM, b"", b"--{b}--\r\n"]
    forms = [str(form("abc", body)) for body in (FORM, *others)]
    assert len(set(forms)) == len(forms)


@pytest.mark.parametrize(
    "header",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/x; boundary*=utf-9''%ff",
        "a/b; boundary=é\x01",
    ],
)
def test_a_body_whose_parts_cannot_be_told_is_compared_by_its_bytes(header: str) -> None:
    assert digest(b"--abc--", header) != digest(b"--xyz--", header)
    assert digest(b"--abc--", header) == digest(b"--abc--", header)
