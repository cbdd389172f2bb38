"""The cluster file: what it may say, and what is an error."""

import sys
from pathlib import Path

import pytest

from coterie.errors import ConfigError
from coterie.up.config import ExpertsConfig, PoolConfig, load_cluster_config
from coterie.up.embedded_command import embedded_command
from coterie.up.experts_command import expert_shares, monitor_command, server_command

TINY = Path(__file__).parents[2] / "models" / "coterie-tiny"

MINIMAL = """
model: ./model
served_model_name: tiny
prefill: {count: 1}
decode: {count: 2}
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "model").mkdir()

    def read(text):
        file = tmp_path / "cluster.yaml"
        file.write_text(text)
        return load_cluster_config(file, engine_env=Path("/env"))

    return read


def test_a_minimal_file_gets_the_defaults(load, tmp_path):
    config = load(MINIMAL)
    assert config.model == str(tmp_path / "model")
    assert config.decode == PoolConfig(count=2)
    assert config.engine_env == Path("/env")
    assert (config.engine_port, config.side_channel_port) == (0, 0)
    assert config.gateway is None


def test_the_embedded_engine_needs_no_environment_and_keeps_its_weights_in_the_run_dir(load, tmp_path):
    config = load(MINIMAL + "engine: embedded\nrun_dir: run\n")
    assert config.engine == "embedded"
    command = embedded_command(config, "prefill", "127.0.0.1", 8001, 9001)
    assert command[:5] == (sys.executable, "-m", "coterie", "engine", str(tmp_path / "model"))
    options = dict(zip(command[5::2], command[6::2], strict=True))
    assert options == {
        "--role": "prefill",
        "--served-model-name": "tiny",
        "--host": "127.0.0.1",
        "--port": "8001",
        "--kv-host": "127.0.0.1",
        "--kv-port": "9001",
        "--weights-dir": str(tmp_path / "run" / "weights"),
    }


EXPERTS = MINIMAL + "engine: embedded\nexperts: "


def test_expert_servers_share_the_experts_so_that_several_stand_in_for_each(load, tmp_path):
    config = load(EXPERTS + "{servers: 4, replicas: 2}\n")
    assert config.experts == ExpertsConfig(servers=4, replicas=2)
    assert expert_shares(config.experts, str(TINY)) == ["0-15,16-31", "16-31,32-47", "32-47,48-63", "0-15,48-63"]
    assert expert_shares(ExpertsConfig(servers=3), str(TINY)) == ["0-20", "21-41", "42-63"]
    assert expert_shares(ExpertsConfig(servers=2, replicas=2), str(TINY)) == ["0-31,32-63"] * 2
    with pytest.raises(ConfigError, match="65 servers for 64 experts of a layer; use 64 at most"):
        expert_shares(ExpertsConfig(servers=65), str(TINY))


def test_expert_servers_and_engines_are_told_of_the_monitor(load, tmp_path):
    config = load(EXPERTS + '{servers: 1, args: [--slots, "4"], env: {A: b}, monitor_port: 8100}\n')
    url = "http://127.0.0.1:8100"
    assert monitor_command("127.0.0.1", 8100)[3:] == ("experts", "monitor", "--host", "127.0.0.1", "--port", "8100")
    command = server_command(config.experts, config.model, "experts-0", "0-63", url, "127.0.0.1", 8200)
    assert command[3:6] == ("experts", "serve", config.model)
    options = dict(zip(command[6::2], command[7::2], strict=True))
    assert options == {
        "--experts": "0-63",
        "--name": "experts-0",
        "--monitor": url,
        "--host": "127.0.0.1",
        "--port": "8200",
        "--slots": "4",
    }
    assert ("--experts-from", url) == embedded_command(config, "decode", "127.0.0.1", 1, 2, url)[-2:]


def test_everything_can_be_said(load, tmp_path):
    config = load("""
model: org/name
served_model_name: tiny
engine: vllm
engine_env: env
prefill: {count: 1, args: [--max-num-seqs, "4"], env: {OMP_NUM_THREADS: "2"}}
decode: {count: 1}
ports: {engines: 9000, side_channels: 9100}
run_dir: logs
ready_timeout_s: 60
gateway: {decode_policy: locality, profile: p.profile, port: 8100}
""")
    assert config.model == "org/name"
    assert config.prefill.args == ("--max-num-seqs", "4")
    assert config.prefill.env == {"OMP_NUM_THREADS": "2"}
    assert (config.engine_port, config.side_channel_port) == (9000, 9100)
    assert config.engine_env == tmp_path / "env"
    assert config.run_dir == tmp_path / "logs"
    assert config.gateway == {"decode_policy": "locality", "profile": str(tmp_path / "p.profile"), "port": 8100}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("served_model_name: tiny", "", "cluster.yaml: missing key 'served_model_name'"),
        ("decode: {count: 2}", "", "cluster.yaml: missing key 'decode'"),
        ("decode: {count: 2}", "decode: {}", "cluster.yaml: decode: missing key 'count'"),
        ("count: 2", "count: 0", "decode: count must be a whole number from 1 to 256, got 0"),
        ("count: 2", "count: true", "decode: count must be a whole number from 1 to 256, got True"),
        ("count: 2", "count: 2, arg: []", "cluster.yaml: decode: unknown key 'arg'"),
        ("count: 2", "count: 2, args: [1]", r"decode: args must be a list of texts \(quote numbers\), got \[1\]"),
        ("count: 2", "count: 2, env: {A: 1}", "decode: env must be names and texts"),
        ("model: ./model", "model: ./mode", "model: there is no folder .*/mode"),
        ("decode:", "decoder:", "missing key 'decode'"),
        ("served_model_name: tiny", "served_model_name: 3", "served_model_name must be a text, got 3"),
        ("model: ./model", "model: ./model\nengine: sglang", "engine must be one of vllm, embedded, got 'sglang'"),
        ("model: ./model", "model: org/name\nengine: embedded", "there is no folder"),
        ("model: ./model", "model: ./model\nengine: embedded\nengine_env: env", "engine_env is for vLLM; remove it"),
        ("model: ./model", "model: ./model\nports: {engine: 1}", "ports: unknown key 'engine'"),
        ("model: ./model", "model: ./model\nports: {engines: 70000}", "engines must be a whole number from 0 to 65535"),
        ("model: ./model", "model: ./model\nexperts: {servers: 2}", "experts is for engine: embedded; remove it"),
        (MINIMAL, EXPERTS + "{servers: 2, replicas: 3}", "replicas must be a whole number from 1 to 2, got 3"),
        (MINIMAL, EXPERTS + "{servers: 2, replica: 1}", "experts: unknown key 'replica'"),
        ("model: ./model", "model: ./model\nnodes: 2", "cluster.yaml: unknown key 'nodes'"),
        ("model: ./model", "model: ./model\ngateway: 3", "gateway must be keys and values, got 3"),
        ("model: ./model", "model: ./model\ngateway: {taus: 1}", "cluster.yaml: gateway: .*unknown keys taus"),
        ("model: ./model", "model: ./model\ngateway: {decode: [x]}", "gateway: decode is filled in by `coterie up`"),
        ("model: ./model", "model: ./model\ngateway: {port: -1}", "gateway: port: must be from 0 to 65535"),
        (MINIMAL, "- a", "expected keys and values, got"),
        (MINIMAL, "{", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(load, old, new, problem):
    assert old in MINIMAL
    with pytest.raises(ConfigError, match=problem):
        load(MINIMAL.replace(old, new))


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"/no/such\.yaml: cannot be read"):
        load_cluster_config(Path("/no/such.yaml"), engine_env=Path("/env"))
