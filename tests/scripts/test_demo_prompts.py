"""The demo's prompts as they are in the tree."""

from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer

from coterie.calibration.prompts import read_prompts
from coterie.up.demo import MIXES, DemoOptions, draw_schedule

ROOT = Path(__file__).parent.parent.parent
CALIBRATE, SERVE = (ROOT / "examples" / "demo" / f"{name}.jsonl" for name in ("calibrate", "serve"))


def test_every_domain_has_its_prompts_and_none_is_in_both_files():
    calibrate, serve = (read_prompts(file).prompts for file in (CALIBRATE, SERVE))
    domains = ("code", "math", "dictionary", "kjv", "fr", "de", "ru", "zh")
    assert Counter(prompt.label for prompt in calibrate) == dict.fromkeys(domains, 64)
    assert Counter(prompt.label for prompt in serve) == dict.fromkeys(domains, 72)
    assert len({prompt.text for prompt in calibrate + serve}) == len(calibrate) + len(serve)


def test_every_prompt_has_64_tokens_of_the_shipped_model():
    tokenizer = Tokenizer.from_file(str(ROOT / "models" / "coterie-tiny" / "tokenizer.json"))
    texts = [prompt.text for file in (CALIBRATE, SERVE) for prompt in read_prompts(file).prompts]
    assert {len(encoding.ids) for encoding in tokenizer.encode_batch(texts)} == {64}


def test_there_are_prompts_enough_for_the_demo_with_any_seed():
    for seed in range(20):
        assert {one.mix for one in draw_schedule(DemoOptions(CALIBRATE, SERVE, seed=seed, mixes=MIXES))} == set(MIXES)
