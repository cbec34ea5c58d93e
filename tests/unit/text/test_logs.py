"""A session's log is shown without secrets and without control characters."""

from __future__ import annotations

import time

import pytest

from fgpuspawner.text.logs import MASK, masked, shown_lines


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Cloning https://ann:pa55@host.org/x.git", f"Cloning https://{MASK}@host.org/x.git"),
        ("git clone https://ghp_x@github.com/a/b", f"git clone https://{MASK}@github.com/a/b"),
        ("Authorization: Bearer abc.def-123", f"Authorization: Bearer {MASK}"),
        ("{'Authorization': 'token 12ab'}", f"{{'Authorization': 'token {MASK}'}}"),
        ("WANDB_API_KEY=12 and API-KEY: 'a b'", f"WANDB_API_KEY={MASK} and API-KEY: {MASK}"),
        ("GET /lab?token=0af3&x=1", f"GET /lab?token={MASK}&x=1"),
        ('{"db_password": "a b", "n": 1}', f'{{"db_password": {MASK}, "n": 1}}'),
        ("login --password hunter2 --user ann", f"login --password {MASK} --user ann"),
        ("hf_abcdefghijklmnopqrstu is used", f"{MASK} is used"),
        ("0123456789abcdef0123456789abcdef", MASK),
        (
            "commit 0123456789abcdef0123456789abcdef01234567",
            "commit 0123456789abcdef0123456789abcdef01234567",
        ),
        ("tokens per second: 12; a key figure", "tokens per second: 12; a key figure"),
        ("http://127.0.0.1:8888/lab is ready", "http://127.0.0.1:8888/lab is ready"),
    ],
)
def test_what_looks_like_a_secret_is_masked(line: str, expected: str) -> None:
    assert masked(line) == expected


def test_own_values_are_masked_wherever_they_stand() -> None:
    text = b"key is s3cret!x and s3cret\ntwo\nlines here\n1"
    assert shown_lines(text, most=9, secrets=["s3cret", "s3cret!x", "two\nlines", "1"]) == [
        f"key is {MASK} and {MASK}",
        f"{MASK} here",
        "1",
    ]


def test_last_lines_are_shown_without_control_characters() -> None:
    text = b"first\n\x1b[31mred\x1b[0m\x1b]0;title\x07 \x00\xff\n 1 %\r99 %\r\n\n"
    assert shown_lines(text, most=2) == ["red \ufffd\ufffd", "99 %"]
    assert shown_lines(b"", most=2) == []


@pytest.mark.parametrize("piece", ["token", "--", "--token", "a_key-", "Authorization: ", "://", "token = "])
def test_a_hostile_log_takes_no_long_time(piece: str) -> None:
    text = (piece * 300_000)[: 256 << 10].encode()
    began = time.process_time()
    shown_lines(text, most=1000)
    shown_lines(b"\n".join(text[i : i + 250] for i in range(0, len(text), 250)), most=1000)
    assert time.process_time() - began < 3
