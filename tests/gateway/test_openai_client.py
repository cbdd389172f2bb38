"""The client that users have."""

from __future__ import annotations

import openai
import pytest
from fake_engine import die_after, refuse
from stories import Cluster, cluster, story


def client_of(running: Cluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="k", max_retries=0)


@story
async def test_completions_and_chat_streamed_and_not() -> None:
    async with cluster() as running, client_of(running) as client:
        messages = [{"role": "user", "content": "hi"}]
        whole = await client.completions.create(model="tiny", prompt="x", max_tokens=3)
        assert whole.choices[0].text == "t0 t1 t2 "
        chat = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=3)
        assert chat.choices[0].message.content == "t0 t1 t2 "
        stream = await client.completions.create(model="tiny", prompt="x", max_tokens=3, stream=True)
        assert [part.choices[0].text async for part in stream] == ["t0 ", "t1 ", "t2 "]
        chats = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=3, stream=True)
        assert [part.choices[0].delta.content async for part in chats] == ["t0 ", "t1 ", "t2 "]
        assert [model.id async for model in client.models.list()] == ["tiny"]
        await running.idle()


@story
async def test_errors_reach_the_client_as_its_own_exceptions() -> None:
    async with cluster() as running, client_of(running) as client:
        running.prefill[0].answer = refuse(404, b'{"error": {"message": "no model x", "type": "NotFoundError"}}')
        with pytest.raises(openai.NotFoundError, match="no model x"):
            await client.completions.create(model="x", prompt="x")
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await client.completions.create(model="x", prompt="x", max_tokens="many")  # type: ignore[call-overload]


@story
async def test_a_lost_worker_is_an_error_in_the_stream() -> None:
    async with cluster() as running, client_of(running) as client:
        running.decode[0].answer = die_after(2)
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        seen = []

        async def read() -> None:
            async for part in stream:
                seen.append(part.choices[0].text)  # noqa: PERF401  (what came before the error)

        with pytest.raises(openai.APIError, match="decode-0"):
            await read()
        assert seen == ["t0 ", "t1 "]
