"""`coterie workers` and `coterie reload` against a running gateway."""

from __future__ import annotations

import asyncio
import json

import click
import pytest
from click.testing import CliRunner, Result
from stories import cluster, eventually, story

from coterie.cli.reload import reload
from coterie.cli.workers import workers
from coterie.errors import EngineError


async def said(command: click.Command, *arguments: str) -> Result:
    """What the command printed, or why it failed."""
    return await asyncio.to_thread(CliRunner().invoke, command, arguments)


@story
async def test_workers_are_listed_drained_removed_and_added() -> None:
    async with cluster(health_interval_s=0.05) as running:
        admin = ("--admin", running.admin_url)
        listed = (await said(workers, "list", *admin)).output
        assert [line.split()[:3] for line in listed.splitlines()[-3:]] == [
            ["prefill-0", running.prefill[0].url, "available"],
            ["decode-0", running.decode[0].url, "available"],
            ["decode-1", running.decode[1].url, "available"],
        ]
        url = running.decode[1].url
        drained = await said(workers, "drain", "decode-1", "--wait-s", "5", *admin)
        assert drained.output == f"decode-1 {url} is drained\n"
        assert (await said(workers, "undrain", "decode-1", *admin)).output == f"decode-1 {url} is available\n"
        removed = await said(workers, "remove", "decode-1", "--wait-s", "5", *admin)
        assert removed.output == f"decode-1 {url} is gone\n"
        added = await said(workers, "add", "decode", url, "--wait-s", "5", "--json", *admin)
        assert json.loads(added.output)["state"] == "available"
        await eventually(lambda: len(running.gateway.decode.available()) == 2)


@story
async def test_waiting_for_a_worker_that_does_not_come_ends() -> None:
    async with cluster(health_interval_s=0.05) as running:
        admin = ("--admin", running.admin_url)
        result = await said(workers, "add", "decode", "http://127.0.0.1:9", "--wait-s", "0.3", *admin)
        assert isinstance(result.exception, EngineError)
        assert "decode-2 http://127.0.0.1:9 is unavailable (" in str(result.exception)
        assert "was to be available within 0.3 s" in str(result.exception)


@story
async def test_a_reload_is_told_in_words_and_in_json() -> None:
    async with cluster() as running:
        admin = ("--admin", running.admin_url + "/")
        assert (await said(reload, *admin)).output == "configuration 2 is in effect\nnothing has changed\n"
        assert json.loads((await said(reload, *admin, "--json")).output)["generation"] == 3


@story
async def test_what_the_gateway_refuses_is_told_and_so_is_that_there_is_none() -> None:
    async with cluster() as running:
        result = await said(workers, "remove", "x", "--admin", running.admin_url)
        assert str(result.exception).startswith("the gateway refuses: no worker is named 'x'; there are prefill-0")
        result = await said(workers, "list", "--admin", running.decode[0].url)
        assert "not a gateway's" in str(result.exception)
        result = await said(reload, "--admin", "http://127.0.0.1:9")
        assert "cannot be reached" in str(result.exception)


@story
async def test_an_admin_side_that_wants_its_key_is_shown_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN_KEY", "0123456789abcdef0123")
    monkeypatch.delenv("NO_KEY", raising=False)
    async with cluster(admin_key_env="ADMIN_KEY") as running:
        admin = ("--admin", running.admin_url)
        assert "wants its key" in str((await said(reload, *admin)).exception)
        assert "$NO_KEY: must be set" in str((await said(reload, *admin, "--admin-key-env", "NO_KEY")).exception)
        assert "in effect" in (await said(reload, *admin, "--admin-key-env", "ADMIN_KEY")).output


@pytest.mark.parametrize("command", [workers, reload])
def test_help_says_what_it_does(command: click.Command) -> None:
    assert "running gateway" in CliRunner().invoke(command, ["--help"]).output
