import json

import pytest

from coterie.calibration import Profile
from coterie.cli import main
from traces import tiny_moe_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "tiny.trace"
    tiny_moe_trace().save(path)
    return str(path)


def run(*arguments):
    """Exit status of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["fit", *arguments])
    return ended.value.code


def test_fit_writes_a_profile_and_shows_its_clusters(trace, tmp_path, capsys):
    output = tmp_path / "tiny.profile"
    assert run(trace, "--clusters", "8", "--output", str(output)) == 0
    shown = capsys.readouterr().out
    profile = Profile.load(output)
    rows = [line.split() for line in shown.splitlines()[1:9]]
    assert rows == [
        [str(k), str(size), label, f"{share:.0%}"]
        for k, (size, label, share) in enumerate(zip(profile.sizes, profile.labels, profile.shares, strict=True))
    ]
    assert f"purity {profile.purity:.2f}" in shown
    assert "tiny-moe, 5 layers x 64 experts, top-4" in shown
    assert str(output) in shown


def test_the_json_report_says_what_the_profile_holds(trace, tmp_path, capsys):
    output = tmp_path / "tiny.profile"
    assert run(trace, "--clusters", "4", "--output", str(output), "--seed", "5", "--starts", "1", "--json") == 0
    report, profile = json.loads(capsys.readouterr().out), Profile.load(output)
    assert report["clusters"] == [
        {"size": int(size), "label": label, "share": float(share)}
        for size, label, share in zip(profile.sizes, profile.labels, profile.shares, strict=True)
    ]
    assert (report["seed"], report["model"], report["profile"]) == (5, "tiny-moe", str(output))
    assert report["geometry"] == {"layers": 5, "experts": 64, "top_k": 4}
    assert report["trace_digest"] == profile.trace_digest


def test_an_existing_profile_is_overwritten_only_by_force(trace, tmp_path, capsys):
    output = tmp_path / "tiny.profile"
    output.write_text("precious")
    assert run(trace, "--clusters", "2", "--output", str(output)) == 1
    assert "tiny.profile exists; give another --output, or --force" in capsys.readouterr().err
    assert output.read_text() == "precious"
    assert run(trace, "--clusters", "2", "--output", str(output), "--force", "--starts", "1") == 0
    assert Profile.load(output).clusters == 2


def test_a_bad_trace_is_one_message_and_writes_nothing(tmp_path, capsys):
    alien = tmp_path / "alien.trace"
    alien.write_bytes(b"not a trace at all")
    assert run(str(alien), "--clusters", "2", "--output", str(tmp_path / "out")) == 1
    assert capsys.readouterr().err.startswith(f"coterie: {alien}: truncated or not a safetensors file")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["--clusters", "0"], ["--clusters", "2", "--starts", "0"], ["--seed", "1"]])
def test_wrong_flags_are_usage_errors(trace, tmp_path, arguments, capsys):
    assert run(trace, "--output", str(tmp_path / "out"), *arguments) == 2
    assert "Usage: coterie fit" in capsys.readouterr().err
