"""The process that holds the model.

llama.cpp aborts its process on some inputs, and the kernel may kill it for its memory. In a process
of its own it takes nothing else along.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import BinaryIO

from localbatch.data.config import EngineConfig
from localbatch.data.errors import EngineError, LocalbatchError
from localbatch.data.request import Completion
from localbatch.engine.backend import Backend
from localbatch.engine.engine import Engine
from localbatch.engine.fake import FakeBackend, fake_placement
from localbatch.engine.messages import (
    Abort,
    Failed,
    Heartbeat,
    Look,
    Prepare,
    Ready,
    Report,
    Seen,
    Start,
    Submit,
)
from localbatch.engine.preview import preview
from localbatch.engine.rows import TextPiece

_REPORT_EVERY_S = 0.25
_HEARTBEAT_EVERY_S = 1.0
_sending = threading.Lock()


def make_backend(config: EngineConfig) -> Backend:
    """Load the backend that the settings name."""
    if config.backend == "fake":
        return FakeBackend(config.fake_step_s, config.fake_dies_on, fake_placement(config))
    from localbatch.engine.llama import LlamaBackend, find_placement

    return LlamaBackend(
        config.model, placement=find_placement(config), tensor_split=config.tensor_split,
        metadata_only=config.metadata_only,
    )  # fmt: skip


def main() -> None:
    """Serve one parent over standard input and output until it hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    outbox = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the messages
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(sys.stdin.buffer, inbox), daemon=True).start()
    try:
        _serve(inbox, outbox, partial(_start_beating, outbox))
    except LocalbatchError as error:
        _send(outbox, Failed(error))
    except Exception as error:
        traceback.print_exc()
        _send(outbox, Failed(EngineError(f"internal error: {type(error).__name__}: {error}")))


def _receive(pipe: BinaryIO, inbox: queue.SimpleQueue[object]) -> None:
    """Read messages; when the parent is gone, so is the reason to compute on."""
    try:
        while True:
            inbox.put(pickle.load(pipe))
    except (EOFError, OSError, pickle.UnpicklingError):
        os._exit(0)


def _send(outbox: BinaryIO, message: object) -> None:
    data = pickle.dumps(message)
    try:
        with _sending:
            outbox.write(data)
            outbox.flush()
    except OSError:
        os._exit(0)


def _start_beating(outbox: BinaryIO, engine: Engine) -> None:
    """Tell the parent every second how far the engine is, whatever it is busy with."""

    def beat() -> None:
        while True:
            time.sleep(_HEARTBEAT_EVERY_S)
            _send(outbox, Heartbeat(engine.num_calls))

    threading.Thread(target=beat, daemon=True).start()


def _serve(
    inbox: queue.SimpleQueue[object],
    outbox: BinaryIO,
    on_ready: Callable[[Engine], object] = lambda engine: None,
) -> None:
    start = inbox.get()
    assert isinstance(start, Start)
    backend = make_backend(start.config)
    gpus = tuple(gpu.name for gpu in backend.placement.gpus)
    _send(outbox, Ready(backend.card, gpus, backend.placement.others))
    engine = Engine(backend, start.config)
    on_ready(engine)
    run, events = 0, list[Completion | TextPiece]()
    last_report = 0.0
    while True:
        while not (inbox.empty() and engine.has_work):
            message = inbox.get()
            if isinstance(message, Submit):
                run, engine.streams_text = message.run, message.streams_text
                events += engine.submit(message.requests)
            elif isinstance(message, Prepare):
                failed = engine.submit(message.requests)
                engine.prepare()
                _send(outbox, Report(message.run, [*failed], engine.stats))
                engine.forget()
            elif isinstance(message, Look):
                _send(outbox, Seen(preview(engine, message.requests, whole=message.whole)))
            elif isinstance(message, Abort):
                engine.abort()
                events.clear()  # they are of the run that was called off
            if not engine.has_work and events:
                break
        if engine.has_work:
            events += engine.step()
        now = time.perf_counter()
        if events or now - last_report > _REPORT_EVERY_S:
            _send(outbox, Report(run, events, engine.stats))
            events, last_report = [], now


if __name__ == "__main__":
    main()
