"""The demo's schedule and sums, by hand; its client against a small real server; its report."""

import asyncio
import json
import threading
from collections import Counter, deque
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.calibration import fit
from coterie.calibration.prompts import Prompt
from coterie.errors import ConfigError, EngineError, InputError
from coterie.metrics import RequestTimeline
from coterie.routing import DECODE_POLICIES
from coterie.up.demo import MIXES, POLICIES, DemoOptions, draw_schedule, page
from coterie.up.demo.client import Served, serve_all
from coterie.up.demo.counters import Counters, Sample, Watch, parse
from coterie.up.demo.figures import line_of
from coterie.up.demo.results import PassResult, Routed, measure, sum_up
from coterie.up.demo.run import gateway_keys
from coterie.up.demo.schedule import Pass, quotas
from traces import tiny_moe_trace

CODE, KJV = (Prompt(f"serve.jsonl:{i}", label, "text", None) for i, label in ((1, "code"), (2, "kjv")))


# --- the schedule ----------------------------------------------------------------------------------------


@pytest.fixture
def options(tmp_path):
    """Eight labels of 20 prompts each."""
    file = tmp_path / "serve.jsonl"
    lines = [{"prompt": f"{label}{i}", "label": label} for label in "abcdefgh" for i in range(20)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def make(**changes):
        return DemoOptions(file, file, **{"requests": 16, "rounds": 2, **changes})

    return make


def test_a_skewed_mix_falls_with_the_rank():
    # 11 x (1, 1/2, 1/3) / (11/6) = 6, 3, 2
    assert quotas(3, "skewed", 11) == [[6, 3, 2]]
    # 12 x 6/11 = 6.5, 3.27, 2.18: the largest remainder gets the one that is left
    assert quotas(3, "skewed", 12) == [[7, 3, 2]]
    assert quotas(3, "even", 11) == [[4, 4, 3]]


def test_a_drifting_mix_goes_from_two_labels_to_two_others():
    assert quotas(6, "drifting", 9) == [[3, 2, 0, 0, 0, 0], [0, 0, 2, 2, 0, 0]]
    assert quotas(3, "drifting", 8) == [[4, 0, 0], [0, 4, 0]]


@given(st.integers(1, 20), st.sampled_from(["even", "skewed"]), st.integers(1, 200))
def test_quotas_are_whole_requests_that_differ_from_the_exact_shares_by_less_than_one(labels, mix, requests):
    (counts,) = quotas(labels, mix, requests)
    weights = [1.0 if mix == "even" else 1 / (i + 1) for i in range(labels)]
    assert sum(counts) == requests
    assert all(abs(n - requests * w / sum(weights)) < 1 for n, w in zip(counts, weights, strict=True))


def test_every_policy_serves_the_same_prompts_in_each_round_and_at_every_second_in_reverse(options):
    schedule = draw_schedule(options(repeats=2))
    assert len(schedule) == 2 * 2 * 2 * 5
    rounds = [schedule[i : i + 5] for i in range(0, len(schedule), 5)]
    for passes in rounds:
        assert len({(one.repeat, one.mix, one.round, one.prompts) for one in passes}) == 1
        assert sorted(one.policy for one in passes) == sorted(POLICIES)
    assert [passes[0].policy for passes in rounds[::2]] == ["round_robin", "locality", "least_load", "round_robin"]
    assert [one.policy for one in rounds[2]] == list(POLICIES[::-1])
    assert len({one.name for one in schedule}) == len(schedule)


def test_any_policies_take_turns_in_any_mixes(options):
    schedule = draw_schedule(options(policies=("marginal", "least_load"), mixes=("drifting", "even")))
    assert [(one.round, one.mix, one.policy) for one in schedule] == [
        (0, "drifting", "marginal"), (0, "drifting", "least_load"), (0, "even", "marginal"), (0, "even", "least_load"),
        (1, "drifting", "least_load"), (1, "drifting", "marginal"), (1, "even", "least_load"), (1, "even", "marginal"),
    ]  # fmt: skip


def test_what_is_asked_does_not_depend_on_which_policies_and_mixes_are_named(options):
    alone = draw_schedule(options(policies=("marginal",), mixes=("skewed",)))
    among_others = [one for one in draw_schedule(options()) if (one.mix, one.policy) == ("skewed", "locality")]
    assert [one.prompts for one in alone] == [one.prompts for one in among_others]


def test_each_round_of_a_drifting_mix_changes_its_labels_in_the_middle(options):
    schedule = draw_schedule(options(policies=("marginal",), mixes=("drifting",)))
    halves = [[Counter(prompt.label for prompt in half) for half in (one.prompts[:8], one.prompts[8:])]
              for one in schedule]  # fmt: skip
    assert halves[0] == halves[1]
    before, after = halves[0]
    assert sorted(before.values()) == sorted(after.values()) == [4, 4]
    assert not before.keys() & after.keys()
    assert len({prompt.where for one in schedule for prompt in one.prompts}) == 32


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"policies": ("marginal", "best")}, "--policies: 'best' is none of round_robin, random, .*marginal"),
        ({"policies": ("prefix",)}, "--policies: 'prefix' is none of"),
        ({"policies": ("marginal", "marginal")}, "--policies: marginal is named twice; name each once"),
        ({"policies": ()}, "--policies: none is named; there are round_robin"),
        ({"mixes": ("odd",)}, "--mixes: 'odd' is none of even, skewed, drifting"),
    ],
)
def test_names_that_cannot_be_compared_are_refused(options, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        draw_schedule(options(**changes))


def test_one_label_cannot_drift(tmp_path):
    (tmp_path / "one.jsonl").write_text('{"prompt": "a", "label": "x"}\n')
    with pytest.raises(InputError, match=r"one\.jsonl: all prompts have the label 'x'; a mix that drifts needs two"):
        draw_schedule(DemoOptions(tmp_path, tmp_path / "one.jsonl", mixes=("drifting",)))


def test_prompts_are_a_seeded_choice_and_none_is_served_twice_in_a_repeat(options):
    def prompts(**changes):
        schedule = draw_schedule(options(**changes))
        return [one.prompts for one in schedule if (one.mix, one.policy) == ("even", "locality")]

    assert prompts() == prompts()
    assert prompts() != prompts(seed=1)
    first, second = prompts()
    assert len({prompt.where for prompt in first + second}) == 32
    assert Counter(prompt.label for prompt in first) == dict.fromkeys("abcdefgh", 2)


def test_too_few_prompts_and_a_missing_label_are_named(options, tmp_path):
    with pytest.raises(InputError, match=r"20 prompts with the label '.'; the skewed mix needs 30 for 2 rounds of 40"):
        draw_schedule(options(requests=40))
    file = tmp_path / "plain.jsonl"
    file.write_text('{"prompt": "a", "label": "x"}\n{"prompt": "b"}\n')
    with pytest.raises(InputError, match=r"plain\.jsonl:2: the demo needs a label on every prompt"):
        draw_schedule(DemoOptions(file, file))


def test_each_gateway_gets_what_its_policy_needs():
    asked = DemoOptions(Path("c"), Path("s"), requests=5, seed=3)
    keys = {name: gateway_keys(name, asked, trace=Path("t"), profile=Path("p")) for name in DECODE_POLICIES}
    given = {name: {k: v for k, v in some.items() if k in ("trace", "profile")} for name, some in keys.items()}
    assert {name: some for name, some in given.items() if some} == {
        "domain": {"trace": "t"},
        "locality": {"profile": "p"},
        "locality_refit": {"profile": "p"},
        "locality_adaptive": {"profile": "p"},
    }
    assert keys["marginal"] == {"decode_policy": "marginal", "keep_decisions": 5, "seed": 3}


# --- the sums --------------------------------------------------------------------------------------------


def served(id_, prompt, tokens, sent_s=0.0, first_s=1.0, last_s=2.0):
    return Served(id_, prompt, tokens, RequestTimeline(sent_s, first_s, last_s, len(tokens)))


def result_of(policy, *all_served, mix="even", repeat=0, cpu_s=1.0, active=100.0, routed=None):
    planned = Pass(repeat, mix, 0, policy, tuple(one.prompt for one in all_served))
    counted = Counters(steps=10, active=active, rows=40)
    begin = Counters(steps=5, active=5.0, rows=5)  # one request in a step: not full
    return PassResult(
        planned, all_served, routed or {}, cpu_s, counted, (Sample(0.2, begin), Sample(0.4, counted)), 3.0
    )


def summed(passes):
    trace = tiny_moe_trace()
    return sum_up("tiny", "embedded", list(passes), trace, fit(trace, 4, layers="all", pairs=100))


def test_figures_of_passes_are_taken_together():
    first = result_of(
        "locality",
        served("a", CODE, (1, 2, 3), last_s=3.0),  # TTFT 1 s, TPOT 2 s / 2
        served("b", CODE, (1, 2, 3), sent_s=0.5, last_s=5.0),  # TTFT 0.5 s, TPOT 4 s / 2
        cpu_s=0.5,
    )
    second = result_of("locality", Served("c", KJV, (), None, "status 500"), cpu_s=0.1, active=140.0)
    figures = measure([first, second])
    assert figures.ttft_p50_ms == 750.0
    assert figures.tpot_p50_ms == 1500.0
    assert figures.tpot_p99_ms == pytest.approx(1990.0)  # 1000 + 0.99 x 1000
    assert figures.cpu_ms_per_token == pytest.approx(100.0)  # 0.6 s / 6 tokens
    assert figures.active_experts_mean == 12.0  # (100 + 140) / 20 steps
    assert figures.live_mean == 4.0
    assert figures.experts_per_token == 3.0


def test_a_policy_under_which_all_failed_has_no_times():
    figures = measure([result_of("least_load", Served("a", CODE, (), None, "status 503"))])
    assert (figures.tpot_p50_ms, figures.cpu_ms_per_token) == (None, None)


def test_gains_compare_locality_with_the_best_load_balancer():
    answer = (1, 2)
    cpu_s = {"round_robin": (3.0, 3.0), "least_load": (2.0, 4.0), "power_of_two": (2.0, 2.0), "locality": (1.0, 1.5)}
    passes = [
        result_of(policy, served("a", CODE, answer), repeat=repeat, cpu_s=values[repeat])
        for policy, values in cpu_s.items()
        for repeat in (0, 1)
    ]
    experts, _, cpu = summed(passes).gains
    assert (cpu.figure, cpu.against) == ("cpu_ms_per_token", "power_of_two")
    assert (cpu.low, cpu.value, cpu.high) == pytest.approx((0.25, 0.375, 0.5))  # 1 - 1.5/2, 1 - 1/2
    assert experts.value == 0.0


def test_each_expert_aware_policy_is_compared_on_each_mix_with_the_balancers_that_are_there():
    cpu_s = {"random": 4.0, "marginal": 3.0, "domain": 1.0, "locality_refit": 5.0}
    result = summed(
        result_of(policy, served("a", CODE, (1, 2)), mix=mix, cpu_s=seconds)
        for mix in ("drifting", "even")
        for policy, seconds in cpu_s.items()
    )
    gains = [
        (gain.mix, gain.policy, gain.against, gain.value) for gain in result.gains if gain.figure == "cpu_ms_per_token"
    ]
    assert gains == [
        (mix, policy, "random", value)
        for mix in ("drifting", "even")
        for policy, value in (("marginal", 0.25), ("locality_refit", -0.25))
    ]


def test_rows_are_medians_over_repeats_with_their_spread():
    passes = [
        result_of(policy, served("a", CODE, (1, 2)), repeat=repeat, cpu_s=cpu_s)
        for policy in POLICIES
        for repeat, cpu_s in enumerate((1.0, 4.0, 2.0))
    ]
    row = summed(passes).rows[0]
    assert [one.cpu_ms_per_token for one in (row.low, row.figures, row.high)] == [500.0, 1000.0, 2000.0]
    assert row.requests == 3


def test_outputs_are_compared_with_the_first_of_the_same_prompt():
    passes = [
        result_of("round_robin", served("a", CODE, (1, 2)), served("b", KJV, (3, 4))),
        result_of("least_load", served("b", KJV, (3, 4)), served("a", CODE, (1, 2))),
        result_of("power_of_two", served("a", CODE, (1, 2))),
        result_of("locality", served("a", CODE, (1, 2)), served("b", KJV, (3, 5))),
        result_of("domain", Served("a", CODE, (), None, "status 500")),
    ]
    result = summed(passes)
    equal = {row.policy: (row.outputs_equal, row.outputs_different) for row in result.rows}
    assert equal == {
        "round_robin": (True, 0),
        "least_load": (True, 0),
        "power_of_two": (True, 0),
        "locality": (False, 1),
        "domain": (False, 0),  # no answer is not an equal answer
    }
    assert result.first_errors == ("1.1 even domain, a: status 500",)


def test_shares_tell_where_requests_and_domains_went():
    routed = {"a": Routed("decode-0", 1), "b": Routed("decode-1", 2), "c": Routed("decode-1", 1)}
    asked = [served("a", CODE, (1, 2)), served("b", CODE, (1, 2)), served("c", KJV, (1, 2))]
    passes = [result_of(policy, *asked, routed=routed) for policy in POLICIES]
    row = summed(passes).rows[0]
    assert row.worker_shares == {"decode-0": 1 / 3, "decode-1": 2 / 3}
    assert row.domain_shares == {"code": 0.5, "kjv": 1.0}


def test_an_engine_that_got_nothing_has_a_share_of_zero():
    on = [{"a": Routed(f"decode-{i}", 1)} for i in (1, 0)]
    policies = ("locality", "least_load")
    result = summed(result_of(name, served("a", CODE, (1, 2)), routed=r) for name, r in zip(policies, on, strict=True))
    assert [row.worker_shares for row in result.rows] == [
        {"decode-0": 0.0, "decode-1": 1.0}, {"decode-0": 1.0, "decode-1": 0.0}
    ]  # fmt: skip
    assert page.mix_table(result, "even").rows[0][-2] == "0 100"


# --- the report ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result():
    routed = {"a": Routed("decode-0", 1)}
    return summed(
        [
            result_of(policy, served("a", CODE, (1, 2)), mix=mix, repeat=repeat, cpu_s=1.0 + repeat, routed=routed)
            for repeat in (0, 1)
            for mix in ("even", "skewed")
            for policy in POLICIES
        ]
    )


def test_the_json_has_a_row_for_each_mix_and_policy(result):
    document = json.loads(json.dumps(page.as_json(result, DemoOptions(Path("c"), Path("s")))))
    assert [(row["mix"], row["policy"]) for row in document["rows"]] == [
        (mix, policy) for mix in ("even", "skewed") for policy in POLICIES
    ]
    row = document["rows"][0]
    assert row["cpu_ms_per_token"] == 750.0  # 1 s and 2 s for 2 tokens
    assert row["spread"]["cpu_ms_per_token"] == [500.0, 1000.0]
    assert (row["tpot_p50_ms"], row["tpot_p99_ms"], row["ttft_p50_ms"]) == (1000.0, 1000.0, 1000.0)
    assert (row["active_experts_mean"], row["outputs_equal"]) == (10.0, True)


def test_the_headlines_say_what_was_measured_favourable_or_not():
    passes = [result_of(policy, served("a", CODE, (1, 2)), cpu_s=2.0, active=120.0) for policy in POLICIES[:-1]]
    passes.append(result_of("locality", served("a", CODE, (1, 2)), cpu_s=3.0, active=90.0))
    even, outputs = page.headlines(summed(passes))
    assert even == (
        "Even mix: locality against the best load balancer: 25.0% fewer experts per step (round_robin); "
        "25.0% fewer experts per token (round_robin); 50.0% more decode CPU time per token (round_robin)."
    )
    assert outputs == "Outputs: equal under every policy, token by token (5 requests)."


def headlines_of(*policies):
    return page.headlines(summed(result_of(policy, served("a", CODE, (1, 2))) for policy in policies))[:-1]


def test_there_is_a_headline_for_each_expert_aware_policy_or_why_there_is_none():
    first, second = headlines_of("least_load", "marginal", "locality_adaptive")
    assert first.startswith("Even mix: marginal against the best load balancer: 0.0% fewer experts per step (least_")
    assert second.startswith("Even mix: locality_adaptive against the best load balancer: ")
    assert headlines_of("marginal", "domain") == [
        "Nothing was compared: none of the policies is a load balancer (round_robin, random, least_load, power_of_two)."
    ]
    assert headlines_of("least_load", "domain") == ["Nothing was compared: none of the policies looks at experts."]


def test_failed_requests_are_not_compared():
    failed = replace(
        result_of("marginal", Served("a", CODE, (), None, "status 503")), counted=Counters(0, 0, 0), samples=()
    )
    even, _ = page.headlines(summed([result_of("random", served("a", CODE, (1, 2))), failed]))
    assert even == "Even mix: requests failed, so nothing can be said of marginal."


def test_a_table_gives_the_spread_under_each_row(result):
    table = page.mix_table(result, "even")
    assert len(table.rows) == 2 * len(POLICIES)
    assert table.rows[0][0] == "round_robin"
    assert table.rows[1][7] == "500.00–1000.00"


def test_the_page_shows_every_figure_and_needs_nothing_else(result):
    text = page.page(result, DemoOptions(Path("c"), Path("s")))
    for title in (
        "Time per output token",
        "Active experts over time",
        "Sizes of the locality band",
        "Signatures in two dimensions",
        "Use of the experts of layer",
    ):
        assert f"<title>{title}" in text
    assert "http" not in text.replace("http://www.w3.org", "").replace("http-equiv", "")


def test_no_two_policies_are_drawn_alike():
    assert len({line_of(policy) for policy in DECODE_POLICIES}) == len(DECODE_POLICIES)


@pytest.mark.parametrize(
    ("policies", "mixes", "said", "bands"),
    [
        (DECODE_POLICIES, MIXES, "nine policies", True),
        (("least_load",), ("drifting",), "one policy", False),
    ],
)
def test_there_is_a_page_for_any_policies_and_mixes(policies, mixes, said, bands):
    text = page.page(
        summed(result_of(policy, served("a", CODE, (1, 2)), mix=mix) for mix in mixes for policy in policies),
        DemoOptions(Path("c"), Path("s"), policies=policies, mixes=mixes),
    )
    assert f"The same requests under {said}" in text
    assert ("<title>Sizes of the locality band" in text) == bands
    assert "Drifting mix: the first half of a round" in text
    assert "Engines that share cores lend a crowded one their time" in text
    assert ("Skewed mix: the share" in text) == ("skewed" in mixes)


# --- counters --------------------------------------------------------------------------------------------

METRICS = """# HELP coterie:engine_steps_total steps
# TYPE coterie:engine_steps_total counter
coterie:engine_steps_total{engine="0",model_name="m"} 4.0
coterie:active_experts_total{engine="0",model_name="m"} 50.5
coterie:step_tokens_total{engine="0",model_name="m"} 64
coterie:step_tokens_total_more 7
"""


def test_counters_are_read_from_a_page_of_metrics():
    assert parse(METRICS) == Counters(4, 50.5, 64)
    assert parse("vllm:num_requests_running 3\n") is None


def test_counters_of_all_engines_are_added_up_unless_one_does_not_count():
    pages = {"a": METRICS, "b": METRICS, "c": ""}

    async def read(*hosts):
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=pages[request.url.host]))
        async with httpx.AsyncClient(transport=transport) as client:
            return await Watch(client, [f"http://{host}" for host in hosts]).read()

    assert asyncio.run(read("a", "b")) == Counters(8, 101, 128)
    assert asyncio.run(read("a", "c")) is None


def test_an_engine_that_is_gone_is_named():
    async def read():
        async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(500))) as client:
            await Watch(client, ["http://a"]).read()

    with pytest.raises(EngineError, match=r"http://a/metrics: .*500"):
        asyncio.run(read())


# --- the client --------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.seen.append((self.headers["x-request-id"], self.headers["x-coterie-domain"], body))
        status, text = self.server.answers.popleft()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def ask():
    """Serve one prompt with this answer; returns what became of it and what the server saw."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.answers, server.seen = deque(), []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        def ask_once(status, text, prompt=CODE, max_tokens=3):
            server.answers.append((status, text))
            url = f"http://127.0.0.1:{server.server_port}"
            done = []
            going = serve_all(
                url, "tiny", [("r", prompt)], max_tokens=max_tokens, concurrency=1, advance=lambda: done.append(1)
            )
            result = asyncio.run(going)
            assert done == [1]
            return result[0], server.seen[-1]

        yield ask_once
        server.shutdown()
        thread.join()


def stream(*chunks, end="data: [DONE]\n\n"):
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end


def tokens(*ids):
    return {"choices": [{"index": 0, "text": "", "token_ids": list(ids)}]}


def test_tokens_are_counted_by_id_even_where_their_text_is_empty(ask):
    result, (id_, domain, body) = ask(
        200, stream({"choices": [{"delta": {"role": "assistant"}}]}, tokens(5), tokens(6, 7))
    )
    assert result.tokens == (5, 6, 7)
    assert result.timeline.output_tokens == 3
    assert (id_, domain) == ("r", "code")
    sent = json.loads(body)
    assert (sent["prompt"], sent["stream"], sent["temperature"], sent["ignore_eos"]) == ("text", True, 0, True)


@pytest.mark.parametrize(
    ("status", "text", "problem"),
    [
        (503, '{"error": "no worker"}', 'status 503: {"error": "no worker"}'),
        (200, stream(tokens(1), end=""), "the stream ended before its [DONE]"),
        (200, stream(tokens(1), {"error": {"message": "lost"}}), "{'message': 'lost'}"),
        (200, stream(tokens(1, 2)), "2 tokens instead of 3"),
    ],
)
def test_a_failed_request_is_a_result_with_its_reason(ask, status, text, problem):
    result, _ = ask(status, text)
    assert result.error == problem
    assert result.timeline is None
