"""Where webhooks may go: URLs in every form that has fooled a parser, and the addresses behind names."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from idempotency.errors import AddressRefused
from idempotency.hosts import Allowed
from idempotency.webhooks.addresses import addresses_of, is_public, target_of

NONE = Allowed()
ACCEPTED = {
    "https://example.com": "https://example.com/",
    "https://example.com:443/": "https://example.com/",
    "HTTPS://Example.COM./hooks?a=1&b=%20": "https://example.com/hooks?a=1&b=%20",
    "https://example.com:8443/a": "https://example.com:8443/a",
    "https://bücher.example/": "https://xn--bcher-kva.example/",
    "https://93.184.215.14/": "https://93.184.215.14/",
    "https://[2606:2800:21f:cb07:6820:80da:af6b:8b2c]:8443/x": "https://[2606:2800:21f:cb07:6820:80da:af6b:8b2c]:8443/x",
    "https://a_b.example.com/": "https://a_b.example.com/",
}
REFUSED = [
    # not https, or not a URL
    *("http://example.com/", "ftp://example.com", "example.com", "//example.com", "https:", "https://", "https:///x"),
    *("https:example.com", "javascript:alert(1)", "file:///etc/passwd", "gopher://example.com", ""),
    # what parsers disagree about
    *("https://user@example.com/", "https://user:password@example.com/", "https://example.com@127.0.0.1/"),
    *(
        "https://example.com\\@127.0.0.1/",
        "https://example.com/\r\nHost: x",
        "https://exam\tple.com/",
        " https://a.example",
    ),
    *("https://example.com/a b", "https://example.com/#x", "https://example.com/ü", "https://exa%6dple.com/"),
    *("https://example.com:0/", "https://example.com:22/", "https://example.com:80/", "https://example.com:65536/"),
    *("https://example.com:x/", "https://[::1", "https://::1/", "https://[example.com]/", "https://example..com/"),
    *("https://-a.example/", "https://a-.example/", f"https://{'a' * 64}.example/", f"https://{'a.' * 130}example/"),
    *("https://localhost/", "https://intranet:8443/", "https://com/", f"https://example.com/{'a' * 2048}"),
    # IPv4 in other forms
    *("https://127.1/", "https://2130706433/", "https://0x7f000001/", "https://0x7f.0.0.1/", "https://0177.0.0.1/"),
    *("https://017700000001/", "https://127.0.0.1.:8443/", "https://1.1.1/", "https://1.1.1.1.1/", "https://0x/"),
    *("https://example.1/", "https://93.184.215.014/", "https://93.184.215.0x0e/", "https://\uff11\uff12\uff17.0.0.1/"),
    *("https://①②⑦.0.0.1/", "https://127。0。0。1/", "https://256.1.1.1/"),
    # addresses that are not public
    *("https://127.0.0.1/", "https://0.0.0.0/", "https://10.0.0.1/", "https://172.16.0.1/", "https://192.168.1.1/"),
    *(
        "https://169.254.169.254/latest/meta-data",
        "https://100.64.0.1/",
        "https://100.100.100.200/",
        "https://192.0.0.192/",
    ),
    *(
        "https://168.63.129.16/",
        "https://198.18.0.1/",
        "https://203.0.113.1/",
        "https://224.0.0.1/",
        "https://239.1.1.1/",
    ),
    *("https://240.0.0.1/", "https://255.255.255.255/", "https://192.88.99.1/"),
    *("https://[::]/", "https://[::1]/", "https://[fe80::1]/", "https://[fe80::1%25eth0]/", "https://[fc00::1]/"),
    *(
        "https://[fd00:ec2::254]/",
        "https://[fec0::1]/",
        "https://[ff02::1]/",
        "https://[ff0e::1]/",
        "https://[100::1]/",
    ),
    *(
        "https://[::ffff:127.0.0.1]/",
        "https://[::ffff:7f00:1]/",
        "https://[::127.0.0.1]/",
        "https://[::ffff:93.184.215.14]/",
    ),
    *(
        "https://[64:ff9b::7f00:1]/",
        "https://[64:ff9b::5db8:d70e]/",
        "https://[64:ff9b:1::1]/",
        "https://[2002:7f00:1::]/",
        "https://[2600:1f18:0:1:0:5efe:a00:1]/",
        "https://[2600:1f18:0:1:200:5efe:a00:1]/",
    ),
    *("https://[2001:0:53aa:64c::1]/", "https://[2001:db8::1]/", "https://[3fff::1]/", "https://[4000::1]/"),
]


@pytest.mark.parametrize("url", ACCEPTED)
def test_a_url_that_keeps_the_rules_is_read_in_one_form(url: str) -> None:
    target = target_of(url, NONE)
    assert target.url == ACCEPTED[url]
    assert target_of(target.url, NONE) == target


@pytest.mark.parametrize("url", REFUSED)
def test_every_other_url_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(AddressRefused) as refused:
        target_of(url, NONE)
    assert str(refused.value).startswith("url: ")
    assert len(url) < 9 or url[8:] not in str(refused.value)


def written(address: IPv4Address) -> list[str]:
    """An IPv4 address in the forms that inet_aton takes, but the usual one."""
    number, (a, b, c, d) = int(address), address.packed
    forms = [
        str(number),
        hex(number),
        oct(number).replace("0o", "0"),
        f"{a}.{number & 0xFFFFFF}",
        f"{a}.{b}.{c * 256 + d}",
    ]
    return [
        *forms,
        f"{a:#x}.{b:#x}.{c:#x}.{d:#x}",
        f"0{a:o}.0{b:o}.0{c:o}.0{d:o}",
        f"0{a}.{b}.{c}.{d}",
        f"{a}.{b}.{c}.0{d}",
    ]


@pytest.mark.long
@given(st.ip_addresses(v=4))
@example(IPv4Address("127.0.0.1"))
@example(IPv4Address("169.254.169.254"))
@example(IPv4Address("93.184.215.14"))
def test_no_other_form_of_an_ipv4_address_is_taken(address: IPv4Address) -> None:
    for form in written(address):
        with pytest.raises(AddressRefused):
            target_of(f"https://{form}/", NONE)


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_inside_an_ipv6_address_is_never_public(address: IPv4Address) -> None:
    number = int(address)
    inside = [
        number,
        0xFFFF << 32 | number,
        0x64FF9B << 96 | number,
        0x2002 << 112 | number << 80,
        0x20010000 << 96 | number,
    ]
    assert not any(is_public(IPv6Address(each)) for each in inside)


@given(st.ip_addresses(v=6))
def test_only_global_unicast_of_ipv6_is_public(address: IPv6Address) -> None:
    assert not is_public(address) or (address in IPv6Network("2000::/3") and address.is_global)


@given(st.text(max_size=60))
@example("1.1.1.1 &@2.2.2.2# @3.3.3.3/")
@example("[::ffff:127.0.0.1]")
def test_whatever_is_taken_has_a_public_address_or_a_name(rest: str) -> None:
    try:
        target = target_of(f"https://{rest}", NONE)
    except AddressRefused:
        return
    assert target.url.isascii()
    assert not set(target.host) & set("@/\\ %#?")
    assert target.address is None or is_public(target.address)
    assert target_of(target.url, NONE) == target


@pytest.mark.parametrize(
    "found",
    [["93.184.215.14", "127.0.0.1"], ["10.0.0.1"], ["::1"], ["fe80::1%lo"], ["2606:2800::1", "::ffff:8.8.8.8"]],
)
def test_a_name_with_any_address_that_is_not_public_is_refused(found: list[str]) -> None:
    with pytest.raises(AddressRefused, match="public addresses only"):
        addresses_of(target_of("https://example.com", NONE), NONE, lambda *_: [ip_address(each) for each in found])


def test_a_list_of_hosts_and_networks_is_the_only_exception() -> None:
    allowed = Allowed.of(["Hooks.internal", "sandbox", "10.1.0.0/16", "::1"])

    def resolve(host: str, port: int) -> list[IPv4Address]:
        return [IPv4Address("10.9.9.9")]

    for url in ("https://hooks.internal/", "https://sandbox:8443/"):
        assert addresses_of(target_of(url, allowed), allowed, resolve) == (IPv4Address("10.9.9.9"),)
    for url in ("https://10.1.2.3/", "https://[::1]/"):
        target = target_of(url, allowed)
        assert addresses_of(target, allowed, resolve) == (target.address,)
    for url in ("https://10.2.0.1/", "https://127.0.0.1/", "https://box/", "http://sandbox/", "https://sandbox:22/"):
        with pytest.raises(AddressRefused):
            target_of(url, allowed)
    with pytest.raises(AddressRefused):
        addresses_of(target_of("https://other.internal", allowed), allowed, resolve)
