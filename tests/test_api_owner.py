"""Whose request it is: told by the key, which goes no further than the ingress."""

import logging

import pytest

from tests.helpers.scripted_api import ScriptedApi
from tests.helpers.scripted_client import delta

KEY = "sk-very-secret"
BODIES = {
    "/v1/completions": {"model": "tiny", "prompt": ["one", "two"]},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "one"}]},
}


async def owners(api: ScriptedApi, path: str, authorization: str | None) -> set[int]:
    headers = {} if authorization is None else {"Authorization": authorization}
    num_before = len(api.engine.requests)
    response = await api.post(path, BODIES[path], headers)
    assert response.status_code == 200
    return {request.owner for request in api.engine.requests[num_before:]}


@pytest.mark.parametrize("path", BODIES)
async def test_a_key_names_its_owner(path):
    api = ScriptedApi(lambda request: [[delta("x", [5], finish="stop")]])
    (own,) = await owners(api, path, f"Bearer {KEY}")
    assert await owners(api, path, f"bearer  {KEY} ") == {own}
    others = [await owners(api, path, value) for value in (f"Bearer {KEY}2", f"Basic {KEY}", "Bearer", None, "")]
    assert {own} not in others
    assert others[3] == others[4] == {0}, "without a key all are one owner"
    assert len(set.union(*others)) == 4
    assert -(2**63) <= own < 2**63


async def test_a_key_is_neither_kept_nor_logged(caplog):
    caplog.set_level(logging.DEBUG)
    api = ScriptedApi(lambda request: [[delta("x", [5], finish="stop")]])
    await owners(api, "/v1/completions", f"Bearer {KEY}")
    (first, *_) = api.engine.requests
    assert KEY not in repr(vars(first))
    assert str(first.owner) not in repr(first)
    assert KEY not in caplog.text
