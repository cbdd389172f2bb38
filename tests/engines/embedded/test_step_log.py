"""Measured decode steps: what the engine says of them, and what stands in the file."""

import multiprocessing

import numpy as np
import pytest
import toy_model
from toy_model import BLOCK, Story, ToyModel, ToyText, experts_of

from coterie.clock import ManualClock
from coterie.engines.embedded import step_log
from coterie.engines.embedded.engine import Engine, EngineConfig
from coterie.engines.embedded.request import Submission
from coterie.engines.embedded.sampling import SamplingParams
from coterie.engines.embedded.step_log import StepLog
from coterie.errors import ConfigError
from coterie.latency import StepPoint, read_step_points


class SlowModel(ToyModel):
    """Takes 10 ms for a step, by a clock of its own."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def forward(self, batch, kv):
        self.clock.advance(0.01)
        return super().forward(batch, kv)


def test_each_decode_step_is_told_with_its_batch_its_experts_and_its_time():
    clock, told = ManualClock(), []
    kv = np.full((64, BLOCK), toy_model.EMPTY, np.float32)
    config = EngineConfig(64, BLOCK, 200)
    rng = np.random.default_rng(0)
    engine = Engine(SlowModel(clock), ToyText(), kv, config, rng=rng, clock=clock, on_decode=told.append)
    heard = {name: [] for name in "ab"}
    for name, prompt in (("a", (1, 2, 3)), ("b", (4, 5))):
        params = SamplingParams(temperature=0.0, max_tokens=4 if name == "a" else 3, ignore_eos=True)
        engine.submit(Submission(name, prompt, params), heard[name].append)
    while engine.step():
        pass
    # One step computes the prompts, and is no decode step; two decode both requests, one a alone.
    assert [point.requests for point in told] == [2, 2, 1]
    assert [point.step_s for point in told] == [pytest.approx(0.01)] * 3
    tokens = {name: tuple(news.token_id for news in heard[name]) for name in heard}
    forwarded = [[(1, 2, 3, *tokens["a"][: i + 1]), (4, 5, *tokens["b"][: i + 1])] for i in range(2)]
    forwarded.append([(1, 2, 3, *tokens["a"][:3])])
    for point, texts in zip(told, forwarded, strict=True):
        used = {(layer, e) for text in texts for layer, row in enumerate(experts_of(text)) for e in row}
        assert point.active == len(used)


def test_an_engine_whose_steps_nobody_wants_tells_none():
    story = Story()
    story.submit("a", [1, 2, 3], max_tokens=3)
    assert story.run() > 0


def test_what_is_written_is_what_is_read(tmp_path):
    log = StepLog(tmp_path / "steps.csv")
    points = (StepPoint(1, 20, 0.0015), StepPoint(32, 210, 0.0123456))
    for point in points:
        log.add(point)
    log.close()
    assert read_step_points(tmp_path / "steps.csv") == (points[0], StepPoint(32, 210, 0.0123456))


def _write(path, worker):
    log = StepLog(path)
    for number in range(1, 301):
        log.add(StepPoint(worker, number, 0.001))
    log.close()


def test_several_processes_write_whole_lines_to_one_file_with_one_header(tmp_path):
    path = tmp_path / "steps.csv"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write, args=(path, worker)) for worker in range(1, 4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    points = read_step_points(path)
    for worker in range(1, 4):
        assert [point.active for point in points if point.requests == worker] == list(range(1, 301))


def test_a_full_log_ends_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(step_log, "MOST_BYTES", 100)
    log = StepLog(tmp_path / "steps.csv")
    for _ in range(50):
        log.add(StepPoint(1, 2, 0.001))
    assert (tmp_path / "steps.csv").stat().st_size < 120
    assert sum("no more steps are written" in message for message in caplog.messages) == 1
    assert read_step_points(tmp_path / "steps.csv")


def test_a_disk_that_is_full_ends_the_log_and_nothing_else(caplog):
    log = StepLog.__new__(StepLog)
    log._path, log._file = "full", step_log.os.open("/dev/full", step_log.os.O_WRONLY)
    log.add(StepPoint(1, 2, 0.001))
    log.add(StepPoint(1, 2, 0.001))
    assert [message for message in caplog.messages if "No space left" in message] == [caplog.messages[0]]


def test_files_that_are_something_else_are_refused_and_left_alone(tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    with pytest.raises(
        ConfigError, match=r"notes.txt: a file that does not begin with requests,active_experts,step_ms"
    ):
        StepLog(other)
    assert other.read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot be written"):
        StepLog(tmp_path)
