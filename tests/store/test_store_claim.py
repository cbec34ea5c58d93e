"""One Hub has a database for itself, for as long as it lives."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine, make_url, text

from fgpu_scheduler import BadSettings
from fgpu_scheduler.store import claim as module
from fgpu_scheduler.store.claim import Claim


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL gives a lock back a moment after its connection has ended, on a busy machine a long one."""
    monkeypatch.setattr(module, "GONE_AFTER_S", 60)


def refusal(claim: Claim) -> str:
    """Return the words with which somebody is refused; who is, is not kept waiting here."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "GONE_AFTER_S", 0)
        with pytest.raises(BadSettings) as found:
            claim.take()
    return str(found.value)


@pytest.fixture
def first(url: str) -> Iterator[Claim]:
    claim = Claim(url)
    claim.take()
    yield claim
    claim.close()


@pytest.fixture
def second(url: str) -> Iterator[Claim]:
    claim = Claim(url)
    yield claim
    claim.close()


def test_a_second_one_is_refused_in_words_that_name_the_database_and_what_would_work(
    first: Claim, second: Claim
) -> None:
    said = refusal(second)
    assert re.search(r"another Hub serves the sessions of \S+; end it, or give this one", said)


def test_who_has_it_may_take_it_again(first: Claim) -> None:
    first.take()


def test_it_is_free_once_its_holder_has_gone(first: Claim, second: Claim) -> None:
    first.close()
    second.take()
    assert refusal(first)


def test_what_postgresql_has_cut_is_taken_anew_unless_another_was_quicker(url: str) -> None:
    if make_url(url).get_backend_name() != "postgresql":
        pytest.skip("a file's lock is not cut by anybody")
    first, second = Claim(url), Claim(url)
    first.take()
    cut(url)
    first.take()
    assert refusal(second)
    cut(url)
    second.take()
    assert refusal(first)
    second.close()
    first.take()
    first.close()


def cut(url: str) -> None:
    """End the connection of whoever holds the claim, as a restart of the server does."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        ended = (
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory' "
                    "AND classid = :key "
                    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
                    "AND objid = (hashtext(current_schema())::bigint & 4294967295)"
                ),
                {"key": module.HUB_LOCK},
            )
            .scalars()
            .all()
        )
    engine.dispose()
    assert ended == [True]
