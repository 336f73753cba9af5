"""Requests to a llama-server that runs on this machine."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from peers.job import BenchError, Row

_TIMEOUT_S = 3600
_GREEDY = {"temperature": 0}
_GREEDY_BY_TOP_K = {"samplers": ["top_k"], "top_k": 1}


def body_of(prompt: Sequence[int], tokens: int, *, tuned: bool) -> dict[str, Any]:
    """Return the request for one row.

    Temperature 0 leaves the other samplers in place, which sort the vocabulary for each token. A
    tuned request has one sampler only, which picks the same token.
    """
    body = {
        "prompt": list(prompt), "n_predict": tokens, "ignore_eos": True, "return_tokens": True,
    }  # fmt: skip
    return body | (_GREEDY_BY_TOP_K if tuned else _GREEDY)


class Client:
    """Talks to the server at `127.0.0.1:port`."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get(self, path: str, *, timeout: float = 10) -> Any:
        """Return the answer to a GET; raises `OSError` or `BenchError`."""
        return self._ask("GET", path, None, timeout)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one completion."""
        answer: dict[str, Any] = self._ask("POST", "/completion", body, _TIMEOUT_S)
        return answer

    def complete_all(self, bodies: Sequence[dict[str, Any]], slots: int) -> list[dict[str, Any]]:
        """Return the answers to all; as many again wait at the server as it has slots."""
        with ThreadPoolExecutor(clients(len(bodies), slots)) as pool:
            return list(pool.map(self.complete, bodies))

    def _ask(self, method: str, path: str, body: object, timeout: float) -> Any:
        # A connection for each: an open one that is idle would keep one of the server's threads.
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise BenchError(f"{path}: {answer.status} {content.decode('utf-8', 'replace')[:300]}")
        return json.loads(content)


def clients(rows: int, slots: int) -> int:
    """Return how many requests are under way: twice the slots, so that none waits for the next."""
    return min(rows, 2 * slots)


def tokens_of(answers: Sequence[dict[str, Any]], rows: Sequence[Row]) -> list[list[int]]:
    """Return the tokens of each row; raises `BenchError` if an answer has none."""
    for answer, row in zip(answers, rows, strict=True):
        if "tokens" not in answer or answer.get("truncated"):
            raise BenchError(f"{row.id}: the server's answer has no tokens, or was cut off")
    return [answer["tokens"] for answer in answers]
