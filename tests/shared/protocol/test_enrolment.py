"""The token that people copy, and the head of an HTTP message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError, WireError
from shared.protocol.enrolment import (
    MOST_BODY,
    MOST_HEAD,
    MOST_TOKEN,
    Token,
    body_length,
    format_token,
    http_date,
    new_secret,
    parse_head,
    parse_http_date,
    parse_token,
)

HOSTS = st.sampled_from(["gateway.local", "192.0.2.7", "fe80::1", "2001:db8::7", "a", "gw-1.roof.example.org"])


@given(HOSTS, st.integers(1, 65535), st.binary(min_size=32, max_size=32))
def test_a_token_says_what_was_put_in_it(host, port, root):
    token = Token(host, port, root, *new_secret())
    line = format_token(token)
    assert len(line) <= MOST_TOKEN
    assert parse_token(f" {line}\n") == token
    assert token.secret not in repr(token)


def read_or_refusal(line):
    try:
        return parse_token(line)
    except ConfigError as error:
        return str(error)


def test_no_character_of_a_token_can_be_changed_without_it_being_another_or_none():
    token = Token("gateway.local", 8443, bytes(range(32)), *new_secret())
    line = format_token(token)
    for at in range(len(line)):
        for other in "Aq,: é":
            changed = line[:at] + other + line[at + 1 :]
            if changed.strip() == line:
                continue
            assert read_or_refusal(changed) != token


@pytest.mark.parametrize("host", ["", "a b", "a,b", "x" * 80, "gate/way", "é"])
def test_a_host_that_no_token_can_carry_is_refused(host):
    with pytest.raises(ConfigError):
        format_token(Token(host, 8443, bytes(32), *new_secret()))


@pytest.mark.parametrize("host", ["[1.2]", "[::1", "::1", "[gateway]", "[fe80::1%eth0]", "[]"])
def test_an_address_in_a_token_is_written_in_one_way(host):
    line = f"ff1,{host}:8443,{'A' * 43},aaaaaa,{'A' * 22}"
    with pytest.raises(ConfigError):
        parse_token(line)


@given(st.text(max_size=200))
def test_any_text_is_a_token_or_refused(text):
    with pytest.raises(ConfigError):
        parse_token(text)


def test_two_tokens_differ():
    assert len({new_secret() for _ in range(100)}) == 100


def test_a_head_is_read():
    first, headers = parse_head(b"POST /join HTTP/1.1\r\nHost: a:1\r\nContent-Length:  12 \r\n\r\n")
    assert first == "POST /join HTTP/1.1"
    assert headers == {"host": "a:1", "content-length": "12"}
    assert body_length(headers) == 12


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"GET / HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 1\r\ncontent-length: 2\r\n\r\n",  # two readers would read two lengths
        b"GET / HTTP/1.1\r\n folded: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nno header\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length : 1\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 65 + b"\r\n",
        b"GET /" + b"x" * MOST_HEAD + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_a_head_that_two_readers_might_read_in_two_ways_is_refused(head):
    with pytest.raises(WireError):
        parse_head(head)


@pytest.mark.parametrize(
    "headers",
    [
        {"content-length": "-1"},
        {"content-length": "+1"},
        {"content-length": "1e3"},
        {"content-length": ""},
        {"content-length": "٣"},
        {"content-length": str(MOST_BODY + 1)},
        {"transfer-encoding": "chunked"},
    ],
)
def test_a_body_of_no_known_length_is_refused(headers):
    with pytest.raises(WireError):
        body_length(headers)


def test_dates_come_back():
    assert parse_http_date(http_date(1_800_000_000.0)) == 1_800_000_000.0
    assert parse_http_date("yesterday") is None


def test_a_refused_token_is_not_repeated_in_the_message():
    token = Token("gateway.local", 8443, bytes(32), *new_secret())
    for line in (format_token(token)[:-1], format_token(token) + "x", format_token(token).replace("ff1", "ff2")):
        assert token.secret[:-1] not in read_or_refusal(line)
