"""What decode workers do with KV that waits for them: seen at the start, logged, shown."""

from __future__ import annotations

import httpx
import pytest
from fake_engine import METRICS, FakeEngine, Kv
from stories import configured, fakes, story

from coterie.engines.vllm_nixl import VllmNixl
from coterie.errors import EngineError
from coterie.gateway.server import serving

FETCHED = b'vllm:external_prefix_cache_hits_total{engine="0"} 7.0'
RECOMPUTES = b'{"vllm_config": {"kv_transfer_config": {"kv_load_failure_policy": "recompute"}}}'


async def shown_for(decode: FakeEngine, prefill: FakeEngine) -> dict[str, object]:
    """The decode worker's row on the admin side, after a start."""
    async with serving(configured([prefill], [decode]), VllmNixl()) as served, httpx.AsyncClient() as client:
        assert served.gateway.ready
        rows = (await client.get(f"{served.admin_url}/workers")).json()["workers"]
        assert rows[0]["transfer"] is None  # the prefill worker's
        return rows[1]["transfer"]


@pytest.mark.parametrize(
    ("metrics", "settings", "shown", "warnings"),
    [
        (METRICS, None, {"fetches": True, "on_lost": None}, []),
        (METRICS, RECOMPUTES.replace(b"recompute", b"fail"), {"fetches": True, "on_lost": "fail"}, []),
        (
            METRICS,
            RECOMPUTES,
            {"fetches": True, "on_lost": "recompute"},
            ["computes prompts itself whose KV it cannot fetch"],
        ),
        (
            METRICS.replace(b" 7.0", b" 0.0"),
            None,
            {"fetches": False, "on_lost": None},
            ["computes prompts itself, though a prefill worker has done so: start it with --kv-transfer-config"],
        ),
        (
            METRICS.replace(b"external_prefix_cache_hits", b"renamed_since"),
            None,
            {"fetches": None, "on_lost": None},
            ["cannot be seen: the metrics do not show vllm:external_prefix_cache_hits_total"],
        ),
    ],
    ids=["fetches", "fails", "recomputes", "computes", "hidden"],
)
@story
async def test_how_a_decode_worker_comes_by_kv_is_shown_and_warned_about(
    metrics: bytes,
    settings: bytes | None,
    shown: dict[str, object],
    warnings: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    kv = Kv()
    async with fakes(1, kv) as (prefill,), fakes(1, kv) as (decode,):
        decode.metrics, decode.settings = metrics, settings
        assert await shown_for(decode, prefill) == shown
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == len(warnings)
        assert all(words in message for words, message in zip(warnings, said, strict=True))


@story
async def test_a_filter_whose_figure_no_worker_shows_ends_the_start() -> None:
    kv = Kv()
    async with fakes(1, kv) as prefill, fakes(2, kv) as decode:
        decode[1].metrics = FETCHED
        with pytest.raises(EngineError, match=r"decode-1 .* cannot be filtered .* vllm:kv_cache_usage_perc; leave out"):
            async with serving(configured(prefill, decode, kv_limit=0.9), VllmNixl()):
                pass
        async with serving(configured(prefill, decode), VllmNixl()) as served:
            assert served.gateway.ready
