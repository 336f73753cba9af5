"""From an e-mail to its text."""

from __future__ import annotations

import email
import email.policy
from email.message import EmailMessage

from localbatch.data.errors import InputError
from localbatch.summaries import extract_docs


def read_mail(data: bytes) -> tuple[list[str], str]:
    """Return the subject and the text; what is attached is left out."""
    message = email.message_from_bytes(data, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    bodies = [message.get_body((kind,)) for kind in ("plain", "html")]
    texts = (_text(body) for body in bodies if isinstance(body, EmailMessage))
    text = next((text for text in texts if text.strip()), "")
    if not text:
        is_attached = any(True for _ in message.iter_attachments())
        raise InputError(
            "has no text, only what is attached" if is_attached
            else "has no text; it may be no e-mail"
        )  # fmt: skip
    heads = [f"{name}: {message[name]}" for name in ("From", "Date", "Subject") if message[name]]
    return [str(message["Subject"] or "")], "\n".join(heads) + "\n\n" + text


def _text(body: EmailMessage) -> str:
    """Return a part's text, which may be in another encoding than it says."""
    data = body.get_payload(decode=True)
    assert isinstance(data, bytes)
    text = _decoded(data, body.get_content_charset("utf-8"))
    if body.get_content_subtype() != "html" or not text.strip():
        return text
    return str(extract_docs.READERS["html"](text.encode("utf-8", "replace"))[1])


def _decoded(data: bytes, charset: str) -> str:
    for name in (charset, "utf-8", "cp1252"):
        try:
            return data.decode(name)
        except (LookupError, ValueError):
            continue
    return data.decode("latin-1")
