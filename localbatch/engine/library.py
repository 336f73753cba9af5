"""llama.cpp as a library: whether it fits, what it logs, what it was built for, and its GPUs.

What is made with it, models and contexts, is in `binding`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from localbatch.data.errors import BindingError

SUPPORTED = "llama-cpp-python 0.3.36"

# An aborting llama.cpp would otherwise fork a debugger (ggml.c, ggml_print_backtrace).
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

try:
    import llama_cpp.llama_cpp
except Exception as error:  # the package raises what it likes when its library can't be loaded
    raise BindingError(
        f"llama-cpp-python can't be loaded ({error}); install {SUPPORTED}"
    ) from error

lib = llama_cpp.llama_cpp
"""The raw functions."""

_BUFFER = re.compile(rb"(KV|compute|output|model) +buffer size += +([0-9.]+) MiB")
_WARN, _ERROR, _CONTINUED = 3, 4, 5  # enum ggml_log_level in ggml.h

_FIELDS = {
    "llama_model_params": {
        "n_gpu_layers", "vocab_only", "use_extra_bufts", "devices", "split_mode", "tensor_split",
    },
    "llama_context_params": {
        "n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch",
        "flash_attn_type", "kv_unified", "swa_full", "type_k", "type_v",
    },
    "llama_batch": {"n_tokens", "token", "embd", "pos", "n_seq_id", "seq_id", "logits"},
}  # fmt: skip
_FUNCTIONS = (
    "llama_backend_init", "llama_log_set", "llama_model_load_from_file", "llama_model_free",
    "llama_init_from_model", "llama_free", "llama_decode", "llama_get_logits", "llama_get_memory",
    "llama_memory_seq_rm", "llama_memory_seq_cp", "llama_memory_clear", "llama_n_ctx_seq",
    "llama_tokenize", "llama_token_to_piece", "llama_vocab_is_eog", "llama_vocab_get_attr",
    "llama_model_chat_template", "llama_set_n_threads", "llama_model_meta_val_str_by_index",
)  # fmt: skip


def check_binding() -> str:
    """Return the binding's version; raises `BindingError` if it does not fit.

    A structure that differs from the C library's would not fail, it would write to the wrong
    memory. So names are checked, and defaults that llama.cpp documents (`llama.h`,
    `llama_context_default_params`) must be found in their places.
    """
    version = str(getattr(llama_cpp, "__version__", "unknown"))
    problems = [
        f"{name} lacks {', '.join(sorted(missing))}"
        for name, wanted in _FIELDS.items()
        if (missing := wanted - {f[0] for f in getattr(getattr(lib, name, None), "_fields_", ())})
    ]
    problems += [f"no {name}" for name in _FUNCTIONS if not hasattr(lib, name)]
    if not problems:
        params = lib.llama_context_default_params()
        found = (params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max, params.type_k)
        if found != (512, 2048, 512, 1, 1):
            problems.append(f"llama_context_params reads as {found}")
    if problems:
        raise BindingError(
            f"llama-cpp-python {version} does not fit ({'; '.join(problems)}); install {SUPPORTED}"
        )
    return version


class LogTail:
    """Keeps the last warnings and errors that llama.cpp logged, and prints none."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=20)
        self._keep = False
        self.buffer_mib: dict[str, float] = {}
        """Buffers that llama.cpp said it made: KV, compute, output."""
        self._callback = lib.llama_log_callback(self._on_log)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Collect while loading; outside of it log calls cost nothing."""
        self._lines.clear()
        self.buffer_mib.clear()
        lib.llama_log_set(self._callback, ctypes.c_void_p(0))
        try:
            yield
        finally:
            lib.llama_log_set(_SILENT, ctypes.c_void_p(0))

    def last(self) -> str:
        """Return the last line that says something, or an empty string."""
        lines = [line.strip() for line in "".join(self._lines).splitlines() if line.strip()]
        telling = [line for line in lines if "failed to load model" not in line.lower()]
        return (telling or lines or [""])[-1]

    def _on_log(self, level: int, text: bytes, _data: Any) -> None:
        if level != _CONTINUED:
            self._keep = level in (_WARN, _ERROR)
        if found := _BUFFER.search(text):
            kind = found[1].decode()
            self.buffer_mib[kind] = self.buffer_mib.get(kind, 0.0) + float(found[2])
        if self._keep:
            self._lines.append(text.decode("utf-8", "replace"))


def _silent_sink() -> Any:
    """Return a native function to send log lines to, so that none takes the interpreter's lock."""
    if os.name == "nt":
        return lib.llama_log_callback(lambda _level, _text, _data: None)
    return ctypes.cast(ctypes.CDLL(None).abs, lib.llama_log_callback)


_SILENT = _silent_sink()
_started = False


def start() -> None:
    """Start llama.cpp once for this process."""
    global _started
    if not _started:
        check_binding()
        lib.llama_log_set(_SILENT, ctypes.c_void_p(0))
        lib.llama_backend_init()
        _started = True


def system_info() -> str:
    """Return llama.cpp's line on the processor features it was built with and found."""
    start()
    return str(lib.llama_print_system_info().decode())


def supports_gpu() -> bool:
    """Return whether llama.cpp was built for a GPU and finds one."""
    start()
    return bool(lib.llama_supports_gpu_offload())


class Device(NamedTuple):
    """A device that is no CPU, and its memory in bytes."""

    handle: int
    name: str
    description: str
    free_bytes: int
    total_bytes: int


_GPU_TYPES = (1, 2)  # enum ggml_backend_dev_type in ggml-backend.h: GPU, IGPU


def gpu_devices() -> list[Device]:
    """Return the GPUs that llama.cpp finds, integrated ones last, as it would use them itself."""
    if not supports_gpu():
        return []
    found = []
    for number in range(_ggml("ggml_backend_dev_count", ctypes.c_size_t)()):
        handle = _ggml("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)(number)
        kind = _ggml("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)(handle)
        if kind in _GPU_TYPES:
            found.append((kind, _device(handle)))
    kinds = [kind for kind, _ in found]
    # llama.cpp leaves integrated GPUs alone when there are others (src/llama.cpp).
    wanted = min(kinds, default=0)
    return [device for kind, device in found if kind == wanted]


def _device(handle: int) -> Device:
    def text(function: str) -> str:
        said = _ggml(function, ctypes.c_char_p, ctypes.c_void_p)(handle)
        return bytes(said or b"").decode("utf-8", "replace")

    free, total = free_memory(handle)
    name, description = text("ggml_backend_dev_name"), text("ggml_backend_dev_description")
    return Device(handle, name, description, free, total)


def free_memory(device: int) -> tuple[int, int]:
    """Return the free and all bytes of a device."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    pointer = ctypes.POINTER(ctypes.c_size_t)
    ask = _ggml("ggml_backend_dev_memory", None, ctypes.c_void_p, pointer, pointer)
    ask(device, ctypes.byref(free), ctypes.byref(total))
    return int(free.value), int(total.value)


def _ggml(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of ggml, which llama-cpp-python does not declare."""
    function = getattr(lib._lib, name, None)  # of the libraries that libllama needs, too
    if function is None:
        from llama_cpp import _ggml as ggml

        function = getattr(ggml.libggml, name)
    function.restype, function.argtypes = result, list(arguments)
    return function
