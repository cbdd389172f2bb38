"""Frames between the processes of a gateway."""

import asyncio

import pytest
from stories import story

from coterie.errors import WireError
from coterie.gateway.processes import control
from coterie.gateway.processes.control import Answer, Ask, Ready, receive, send


class Wire:
    """A writer whose bytes a reader gets."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()

    def write(self, data: bytes) -> None:
        self.reader.feed_data(data)


@story
async def test_frames_come_as_they_were_sent_and_answers_may_come_before_a_process_serves():
    wire = Wire()
    sent = [Answer(3, 200, [(b"a", b"b")], b"body"), Ready(lines=("x",)), Answer(4, 404, [], b"")]
    for message in sent:
        send(wire, message)
    assert [await receive(wire.reader, Ready, Answer) for _ in sent] == sent
    wire.reader.feed_eof()
    with pytest.raises(EOFError):
        await receive(wire.reader, Ready, Answer)


@story
async def test_a_frame_of_another_kind_or_size_is_refused(monkeypatch):
    wire = Wire()
    send(wire, Ready())
    with pytest.raises(WireError, match="not a frame of this kind"):
        await receive(wire.reader, Ask)
    monkeypatch.setattr(control, "MAX_FRAME_BYTES", 3)
    send(wire, Ready())
    with pytest.raises(WireError, match="at most 3"):
        await receive(wire.reader, Ready)
