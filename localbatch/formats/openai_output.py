"""OpenAI's batch output, and vLLM's, made from the records of a job.

Ids are hashes of job and row, times are the job's: the same records give the same bytes.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localbatch.formats.openai_batch import CHAT, LineError

Record = Mapping[str, Any]
"""What `outputs.record` makes of a row."""

_SERVER_ERROR, _INPUT_ERROR = 500, 400


@dataclass(frozen=True)
class BatchJob:
    """What the lines of an output have in common."""

    id: str
    created: int
    """Unix time."""
    endpoint: str
    model: str


def openai_line(row: Record, job: BatchJob) -> dict[str, Any]:
    """Return a line of OpenAI's output file, or of its error file if the row failed."""
    key = _key(row, job)
    line: dict[str, Any] = {
        "id": f"batch_req_{key}", "custom_id": str(row["id"]), "response": None, "error": None
    }  # fmt: skip
    if row["finish_reason"] == "aborted":
        message = "the row was called off before its end"
        return line | {"error": {"code": "batch_cancelled", "message": message}}
    is_error = is_failed(row)
    line["response"] = {
        "status_code": _status(row),
        "request_id": _hash(key, "request"),
        "body": {"error": _error(row)} if is_error else _body(row, job, key),
    }
    return line


def vllm_line(row: Record, job: BatchJob) -> dict[str, Any]:
    """Return a line of the output of `vllm run-batch`, where an error is beside the response."""
    key = _key(row, job)
    is_error = is_failed(row)
    return {
        "id": f"vllm-{key}",
        "custom_id": str(row["id"]),
        "response": {
            "status_code": _status(row),
            "request_id": f"vllm-batch-{_hash(key, 'request')}",
            "body": None if is_error else _body(row, job, key),
        },
        "error": {"error": {**_error(row), "code": _status(row)}} if is_error else None,
    }


def is_failed(row: Record) -> bool:
    """Whether a row goes into the error file."""
    return row["finish_reason"] in ("error", "aborted")


def _key(row: Record, job: BatchJob) -> str:
    # Rows that failed because their id was taken have the same id as another.
    return _hash(job.id, str(row["id"]), str(row.get("error", {}).get("line", "")))


def _hash(*parts: str) -> str:
    text = "\0".join(parts).encode(errors="backslashreplace")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _status(row: Record) -> int:
    if not is_failed(row):
        return 200
    error = row.get("error", {})
    return _INPUT_ERROR if "field" in error or "code" in error else _SERVER_ERROR


def _error(row: Record) -> dict[str, Any]:
    error = row.get("error", {"message": "the row was called off before its end"})
    is_input = _status(row) == _INPUT_ERROR
    return {
        "message": error["message"],
        "type": "invalid_request_error" if is_input else "server_error",
        "param": error.get("field"),
        "code": error.get("code"),
    }


def _body(row: Record, job: BatchJob, key: str) -> dict[str, Any]:
    is_chat = job.endpoint == CHAT
    choices = row.get("choices", [row])
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{key}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": job.created,
        "model": job.model,
        "choices": [(_chat_choice if is_chat else _choice)(i, c) for i, c in enumerate(choices)],
        "usage": _usage(row["usage"]),
        "system_fingerprint": None,
    }
    if cut := row["usage"].get("cut_tokens"):
        body["localbatch"] = {"cut_tokens": cut}
    return body


def _usage(usage: Record) -> dict[str, Any]:
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": {"reasoning_tokens": usage.get("reasoning_tokens", 0)},
    }


def _chat_choice(index: int, choice: Record) -> dict[str, Any]:
    message = {"role": "assistant", "content": choice["text"], "refusal": None}
    if "reasoning" in choice:
        message["reasoning_content"] = choice["reasoning"]
    logprobs = None
    if "logprobs" in choice:
        content = [
            {**{k: v for k, v in token.items() if k != "top"}, "top_logprobs": token["top"]}
            for token in choice["logprobs"]
        ]
        logprobs = {"content": content, "refusal": None}
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": choice["finish_reason"],
    }


def _choice(index: int, choice: Record) -> dict[str, Any]:
    made: dict[str, Any] = {"index": index, "text": choice["text"], "logprobs": None}
    if "reasoning" in choice:
        made["reasoning_content"] = choice["reasoning"]
    if "logprobs" in choice:
        made["logprobs"] = _token_lists(choice["logprobs"])
    return made | {"finish_reason": choice["finish_reason"]}


def _token_lists(tokens: Sequence[Record]) -> dict[str, Any]:
    """Return log probabilities as `/v1/completions` has them; a token's own is among its top."""
    lists: dict[str, Any] = {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
    }  # fmt: skip
    decoder, offset = codecs.getincrementaldecoder("utf-8")("replace"), 0
    for token in tokens:
        lists["tokens"].append(_token_name(token))
        lists["token_logprobs"].append(token["logprob"])
        likeliest = {_token_name(other): other["logprob"] for other in token["top"]}
        lists["top_logprobs"].append({**likeliest, _token_name(token): token["logprob"]})
        lists["text_offset"].append(offset)
        offset += len(decoder.decode(bytes(token["bytes"])))
    return lists


def _token_name(token: Record) -> str:
    """Return a token's text; a part of a character has its bytes written as OpenAI does."""
    data = bytes(token["bytes"])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass
class BatchCounts:
    """Rows and tokens of an output."""

    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, row: Record) -> None:
        """Count a record."""
        if is_failed(row):
            self.failed += 1
        else:
            self.completed += 1
        usage = row["usage"]
        self.prompt_tokens += usage["prompt_tokens"]
        self.completion_tokens += usage["completion_tokens"]
        self.reasoning_tokens += usage.get("reasoning_tokens", 0)


@dataclass(frozen=True)
class BatchFiles:
    """Names of a batch's files; they stand for OpenAI's file ids."""

    source: str
    output: str
    errors: str


def batch_object(
    job: BatchJob, files: BatchFiles, counts: BatchCounts, total: int, completed_at: int | None
) -> dict[str, Any]:
    """Return the batch object of a job; without `completed_at` (Unix time) it is in progress."""
    batch = _batch(job, files.source)
    batch |= {
        "status": "in_progress" if completed_at is None else "completed",
        "output_file_id": files.output if counts.completed else None,
        "error_file_id": files.errors if counts.failed else None,
        "in_progress_at": job.created,
        "finalizing_at": completed_at,
        "completed_at": completed_at,
    }
    batch["request_counts"] = {
        "total": total, "completed": counts.completed, "failed": counts.failed
    }  # fmt: skip
    batch["usage"] = _batch_usage(counts)
    return batch


def failed_batch_object(
    job: BatchJob, source: str, errors: Sequence[LineError], failed_at: int
) -> dict[str, Any]:
    """Return the batch object of a file that was refused at `failed_at` (Unix time)."""
    data = [
        {"code": e.code, "message": e.message, "param": e.param, "line": e.line} for e in errors
    ]
    batch = _batch(job, source)
    return batch | {
        "status": "failed",
        "errors": {"object": "list", "data": data},
        "failed_at": failed_at,
    }


def _batch(job: BatchJob, source: str) -> dict[str, Any]:
    """Return a batch object of which nothing is known but its job; the order is OpenAI's."""
    return {
        "id": f"batch_{job.id}",
        "object": "batch",
        "endpoint": job.endpoint,
        "model": job.model,
        "errors": None,
        "input_file_id": source,
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": job.created,
        "in_progress_at": None,
        "expires_at": None,
        "finalizing_at": None,
        "completed_at": None,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": _batch_usage(BatchCounts()),
        "metadata": None,
    }


def _batch_usage(counts: BatchCounts) -> dict[str, Any]:
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }
