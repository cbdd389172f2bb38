"""What is refused at start, by name."""

from __future__ import annotations

import fcntl
from types import SimpleNamespace

import numpy as np
import pytest

from coterie.core import ModelGeometry
from coterie.errors import UnsupportedError
from coterie.vllm_plugin import support
from coterie.vllm_plugin.slots import Layout, Slots

SMALL = Layout(1, ModelGeometry(1, 2, 1), page_tokens=4)


def config(**changes):
    values = {
        "experts": 64,
        "speculative": None,
        "pp": 1,
        "dcp": 1,
        "pcp": 1,
        "ubatch": False,
        "nodes": 1,
        "executor": "mp",
        "v2": False,
        "full_graphs": False,
        **changes,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(get_num_experts=lambda: values["experts"]),
        speculative_config=values["speculative"],
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=values["pp"],
            decode_context_parallel_size=values["dcp"],
            prefill_context_parallel_size=values["pcp"],
            use_ubatching=values["ubatch"],
            nnodes=values["nodes"],
            distributed_executor_backend=values["executor"],
        ),
        use_v2_model_runner=values["v2"],
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: values["full_graphs"])
        ),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 0}, "dense model.*remove CountsConnector"),
        ({"speculative": object()}, "speculative decoding"),
        ({"pp": 2}, "pipeline parallelism"),
        ({"dcp": 2}, "context parallelism"),
        ({"pcp": 2}, "context parallelism"),
        ({"ubatch": True}, "--enable-dbo"),
        ({"nodes": 2}, "one host"),
        ({"executor": "ray"}, "one host"),
        ({"v2": True, "full_graphs": True}, "PIECEWISE"),
    ],
)
def test_each_unsupported_option_is_refused_with_its_remedy(changes, message):
    with pytest.raises(UnsupportedError, match=message):
        support.check_config(config(**changes))


@pytest.mark.parametrize("changes", [{}, {"v2": True}, {"full_graphs": True}, {"executor": "uni"}])
def test_supported_options_pass(changes):
    support.check_config(config(**changes))


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.320.0", "1.0"])
def test_an_untested_release_is_refused_unless_the_operator_insists(version):
    with pytest.raises(UnsupportedError, match=rf"{version} was not tested.*coterie_allow_untested_vllm"):
        support.check_version(version, {})
    support.check_version(version, {"coterie_allow_untested_vllm": True})
    support.check_version("0.32.0+cpu", {})


class FullAttentionSpec:
    block_size = 32


class SlidingWindowSpec:
    block_size = 16


def kv_config(*specs):
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer{i}"]) for i, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups)


def test_the_full_attention_group_is_chosen_among_several():
    group = support.full_attention_group(kv_config(SlidingWindowSpec(), FullAttentionSpec()))
    assert group == support.KVGroup(index=1, layer="layer1", block_size=32)


def test_a_group_of_mixed_layers_counts_as_full_only_if_all_are():
    mixed = SimpleNamespace(kv_cache_specs={"a": FullAttentionSpec(), "b": SlidingWindowSpec()}, block_size=8)
    pure = SimpleNamespace(kv_cache_specs={"a": FullAttentionSpec()}, block_size=8)
    assert support.full_attention_group(kv_config(mixed, pure)).index == 1


@pytest.mark.parametrize("specs", [[], [SlidingWindowSpec()]])
def test_a_model_without_full_attention_is_refused_by_layout(specs):
    with pytest.raises(UnsupportedError, match="no full-attention group among"):
        support.full_attention_group(kv_config(*specs))


def test_a_file_that_is_not_ours_or_gone_is_refused(tmp_path):
    size = SMALL.nbytes
    alien = tmp_path / "alien"
    alien.write_bytes(b"\1" * size)
    with pytest.raises(UnsupportedError, match="not coterie's"):
        Slots.open(str(alien), SMALL)
    with pytest.raises(UnsupportedError, match="one host"):
        Slots.open(str(tmp_path / "gone"), SMALL)
    alien.write_bytes(b"")
    with pytest.raises(UnsupportedError, match="cannot map"):
        Slots.open(str(alien), SMALL)


def test_a_file_that_a_killed_engine_left_is_swept_and_a_live_one_is_kept(tmp_path):
    left, live = tmp_path / "coterie-counts-left", tmp_path / "coterie-counts-live"
    left.write_bytes(b"")
    other = tmp_path / "other"
    other.write_bytes(b"")
    with live.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        _, path = Slots.create(SMALL, folder=str(tmp_path))
        assert sorted(tmp_path.iterdir()) == sorted([live, other, path])
        _, second = Slots.create(SMALL, folder=str(tmp_path))
        assert path.exists()
        assert second.exists()


def test_unlinking_twice_is_harmless_and_keeps_what_is_mapped(tmp_path):
    table, path = Slots.create(SMALL, folder=str(tmp_path))
    table.announce(1)
    table.write(0, 0, 7, 1, np.array([[1, 1]], np.int32))
    table.unlink()
    table.unlink()
    assert not path.exists()
    assert table.read(0, 0, 7)[0] == 1


def test_shared_memory_that_is_too_small_is_an_error_at_start(tmp_path):
    with pytest.raises(UnsupportedError, match=r"cannot create shared memory in .*missing"):
        Slots.create(SMALL, folder=str(tmp_path / "missing"))
    with pytest.raises(UnsupportedError, match="cannot reserve"):
        Slots.create(Layout(1 << 30, ModelGeometry(64, 128, 8), 1), folder=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
