"""The client that users have, while workers fail."""

import signal

import openai
import pytest
from fault_cluster import PROMPTS, TOKENS
from fault_proxy import Moment, Stop, Trap, refuse

from waiting import wait_until

ASK = {
    "model": "tiny",
    "prompt": PROMPTS[0],
    "max_tokens": TOKENS,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


def client_of(cluster, retries):
    return openai.OpenAI(base_url=f"{cluster.gateway.url}/v1", api_key="k", max_retries=retries, timeout=30)


def test_a_stream_whose_worker_is_killed_goes_on_unnoticed(cluster, matrix):
    async def kill(tunnel):
        tunnel.proxy.shut()
        cluster.engine(tunnel.proxy.name).process.signal(signal.SIGKILL)
        raise Stop

    with cluster.lying_in_wait("decode", trap := Trap(Moment.MIDST, kill)), client_of(cluster, 0) as client:
        parts = list(client.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for part in parts for choice in part.choices) == matrix.texts[PROMPTS[0]]
    assert len({part.id for part in parts}) == 1
    assert parts[-1].usage.completion_tokens == TOKENS
    cluster.engine(trap.caught.result(0).name).restart()
    wait_until(cluster.all_available, what="the return of the killed worker")


def test_a_500_is_an_exception_of_its_own_and_the_client_s_retry_is_served(cluster, matrix):
    with client_of(cluster, 0) as impatient, client_of(cluster, 2) as patient:
        with (
            cluster.lying_in_wait("decode", Trap(Moment.BEFORE, refuse(500))),
            pytest.raises(openai.InternalServerError, match="made to fail"),
        ):
            impatient.completions.create(**ASK)
        with cluster.lying_in_wait("decode", Trap(Moment.BEFORE, refuse(500))):
            assert patient.completions.create(**ASK).choices[0].text == matrix.texts[PROMPTS[0]]
