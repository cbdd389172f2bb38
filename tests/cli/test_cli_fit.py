import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coterie.activations import ActivationTrace
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
    assert run(trace, "--clusters", "8", "--output", str(output), "--pairs", "2000") == 0
    shown, profile = capsys.readouterr().out, Profile.load(output)
    for k, line in enumerate(shown.splitlines()[1:9]):
        cluster, requests, labels = line.split(maxsplit=2)
        assert (cluster, requests) == (str(k), str(profile.sizes[k]))
        assert labels.startswith(f"{profile.labels[k]} {profile.shares[k]:.0%}")
    assert f"purity {profile.purity:.2f}" in shown
    assert "tiny-moe, 5 layers x 64 experts, top-4" in shown
    assert f"rho {profile.rho.value:.3f} ({profile.rho.low:.3f} to {profile.rho.high:.3f}, 2000 pairs)" in shown
    assert f"within labels {profile.rho_within_labels.value:.3f}" in shown
    assert f"count_idf over {len(profile.transform.layers)} of 5 layers (rho of the choice" in shown
    assert str(output) in shown


def test_the_json_report_says_what_the_profile_holds(trace, tmp_path, capsys):
    output = tmp_path / "tiny.profile"
    options = ("--seed", "5", "--starts", "1", "--pairs", "500", "--json")
    assert run(trace, "--clusters", "4", "--output", str(output), *options) == 0
    report, profile = json.loads(capsys.readouterr().out), Profile.load(output)
    assert [cluster["size"] for cluster in report["clusters"]] == profile.sizes.tolist()
    assert [cluster["label"] for cluster in report["clusters"]] == list(profile.labels)
    assert [cluster["share"] for cluster in report["clusters"]] == profile.shares.tolist()
    assert [list(cluster["labels"].values()) for cluster in report["clusters"]] == profile.label_counts.tolist()
    first = profile.characteristic_experts(0)[0]
    assert report["clusters"][0]["experts"][0] == {"layer": first.layer, "expert": first.expert, "lead": first.lead}
    assert (report["seed"], report["model"], report["profile"]) == (5, "tiny-moe", str(output))
    assert report["geometry"] == {"layers": 5, "experts": 64, "top_k": 4}
    assert (report["transform"], report["layers"]) == ("count_idf", list(profile.transform.layers))
    assert report["rho"]["value"] == profile.rho.value
    assert report["layer_choice"]["rho_of_all"] == profile.layer_choice.rho_of_all
    assert (report["trace_digest"], report["donor"]) == (profile.trace_digest, None)


@pytest.mark.parametrize(
    ("given", "kept"), [(["--layers", "all"], (0, 1, 2, 3, 4)), (["--layers", "0,3", "--transform", "sqrt"], (0, 3))]
)
def test_layers_and_transform_can_be_given(trace, tmp_path, given, kept, capsys):
    output = tmp_path / "tiny.profile"
    assert run(trace, "--clusters", "2", "--output", str(output), "--starts", "1", "--pairs", "100", *given) == 0
    profile = Profile.load(output)
    assert profile.transform.layers == kept
    assert profile.transform.kind == ("sqrt" if "sqrt" in given else "count_idf")
    assert "rho of the choice" not in capsys.readouterr().out


def test_what_is_not_defined_is_said_in_words(tmp_path, capsys):
    whole = tiny_moe_trace().select(range(4))
    nothing = np.zeros_like(whole.decode)
    silent = replace(whole, decode=nothing, decode_covered=np.zeros(4, np.int64), decode_ids=None, labels=("",) * 4)
    silent.save(tmp_path / "silent.trace")
    given = (str(tmp_path / "silent.trace"), "--clusters", "2", "--output", str(tmp_path / "out"))
    assert run(*given) == 1
    assert "4 of 4 requests have no output counts" in capsys.readouterr().err
    assert run(*given, "--layers", "all") == 0
    shown = capsys.readouterr().out
    assert "rho is not defined: the trace has no output counts, or no variation" in shown
    assert shown.splitlines()[1].split() == ["0", "2", "-"]
    assert "purity" not in shown


# --- with another model's clusters --------------------------------------------------------------------


@pytest.fixture(scope="module")
def donor(trace, tmp_path_factory):
    path = tmp_path_factory.mktemp("profiles") / "donor.profile"
    assert run(trace, "--clusters", "4", "--output", str(path), "--pairs", "100") == 0
    return str(path)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "few.trace"
    tiny_moe_trace().select(range(0, 768, 24)).save(path)
    return str(path)


def test_few_prompts_are_divided_like_another_models(few, trace, donor, tmp_path, capsys):
    output = tmp_path / "new.profile"
    assert run(few, "--clusters", "4", "--output", str(output), "--like", donor, "--like-trace", trace) == 0
    assert "clusters of tiny-moe" in capsys.readouterr().out
    profile = Profile.load(output)
    assert profile.donor.trace_digest == tiny_moe_trace().digest()
    assert profile.sizes.sum() == 32
    assert profile.transform.layers == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--clusters", "3", "--like", "DONOR", "--like-trace", "TRACE"], "has 4 clusters, not 3: give --clusters 4"),
        (["--clusters", "4", "--like", "DONOR"], "--like and --like-trace belong together"),
        (["--clusters", "4", "--like-trace", "TRACE"], "--like and --like-trace belong together"),
        (["--clusters", "4", "--like", "DONOR", "--like-trace", "TRACE", "--starts", "3"], "--starts has no meaning"),
        (["--clusters", "4", "--like", "TRACE", "--like-trace", "TRACE"], "holds a trace, not a profile"),
    ],
)
def test_a_donor_that_does_not_fit_is_refused(few, trace, donor, tmp_path, given, problem, capsys):
    places = {"DONOR": donor, "TRACE": trace}
    assert run(few, "--output", str(tmp_path / "out"), *(places.get(word, word) for word in given)) == 1
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- refusals -----------------------------------------------------------------------------------------


def test_an_existing_profile_is_overwritten_only_by_force(trace, tmp_path, capsys):
    output = tmp_path / "tiny.profile"
    output.write_text("precious")
    assert run(trace, "--clusters", "2", "--output", str(output)) == 1
    assert "tiny.profile exists; give another --output, or --force" in capsys.readouterr().err
    assert output.read_text() == "precious"
    assert run(trace, "--clusters", "2", "--output", str(output), "--force", "--starts", "1", "--pairs", "100") == 0
    assert Profile.load(output).clusters == 2


def test_no_input_is_overwritten_even_by_force(few, trace, donor, capsys):
    for output in (few, trace, donor):
        before = Path(output).read_bytes()
        given = ["--clusters", "4", "--like", donor, "--like-trace", trace, "--output", output, "--force"]
        assert run(few, *given) == 1
        assert f"{output} is read by this command" in capsys.readouterr().err
        assert Path(output).read_bytes() == before


def test_control_characters_of_labels_and_model_do_not_reach_the_terminal(trace, tmp_path, capsys):
    loaded = ActivationTrace.load(trace).select(range(64))
    evil = replace(loaded, model="\x1b]0;m\x07", labels=("\x1b[31m\u202ered\n",) * len(loaded))
    evil.save(tmp_path / "evil.trace")
    assert run(str(tmp_path / "evil.trace"), "--clusters", "2", "--output", str(tmp_path / "out")) == 0
    shown = capsys.readouterr().out
    assert "red" in shown
    assert all(c == "\n" or c.isprintable() for c in shown)


def test_a_bad_trace_is_one_message_and_writes_nothing(tmp_path, capsys):
    alien = tmp_path / "alien.trace"
    alien.write_bytes(b"not a trace at all")
    assert run(str(alien), "--clusters", "2", "--output", str(tmp_path / "out")) == 1
    assert capsys.readouterr().err.startswith(f"coterie: {alien}: truncated or not a safetensors file")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_there_is_found_before_anything_is_fitted(trace, tmp_path, capsys):
    assert run(trace, "--clusters", "2", "--output", str(tmp_path / "no" / "out")) == 1
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--clusters", "0"],
        ["--clusters", "2", "--starts", "0"],
        ["--seed", "1"],
        ["--clusters", "2", "--layers", "some"],
        ["--clusters", "2", "--transform", "tf_idf"],
        ["--clusters", "2", "--pairs", "0"],
    ],
)
def test_wrong_flags_are_usage_errors(trace, tmp_path, arguments, capsys):
    assert run(trace, "--output", str(tmp_path / "out"), *arguments) == 2
    assert "Usage: coterie fit" in capsys.readouterr().err
