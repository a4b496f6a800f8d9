"""What a model's `forward` may do while it is recorded, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from libs.errors import ErrorCode, TokenloomError
from services.worker.models.llama import Llama
from services.worker.ops import cpu
from services.worker.ops.base import HeadShape, LayerCache, StepInputs, Value
from services.worker.ops.cpu import CpuOps
from services.worker.ops.native import CpuLibrary, Program, Team
from services.worker.ops.recording import Kind, Recording, Rows
from tests.support.tiny_llama import make_tiny_llama
from tests.unit.worker.helpers import load_engine

HEADS = HeadShape(2, 1, 16)
TABLE, WIDE = torch.zeros(10, 64), torch.zeros(10, 32)


class Recorder:
    """Operations without a library: what they would hand over is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recordings: list[Recording] = []
        monkeypatch.setattr(cpu, "Program", lambda library, team, recording, result, most: self.recordings.append(recording))
        self.ops = CpuOps(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]

    def kinds(self) -> list[Kind]:
        return [item.kind for item in self.recordings[-1].instructions]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def layer_cache(heads: HeadShape = HEADS, dtype: torch.dtype = torch.float32) -> LayerCache:
    keys = torch.zeros(4, heads.kv_heads, heads.head_dim, 16, dtype=dtype).transpose(2, 3)
    return LayerCache(keys, torch.zeros(4, heads.kv_heads, 16, heads.head_dim, dtype=dtype))


def test_a_models_operations_become_instructions_in_their_order(recorder: Recorder):
    ops, packed = recorder.ops, recorder.ops.pack_linear(torch.zeros(64, 32), None)
    head = ops.pack_linear(torch.zeros(10, 64), None)

    def forward(inputs: StepInputs, cache: Sequence[LayerCache]) -> Value:
        x = ops.embedding(inputs.token_ids, TABLE)
        queries = ops.rope_and_cache(ops.norm(x, torch.ones(64), 1e-5), torch.zeros(8, 16), cache[0], inputs, HEADS)
        x = ops.linear(ops.attention(queries, cache[0], inputs, HEADS, 0.25), packed, residual=x)
        return ops.head(ops.norm(x, torch.ones(64), 1e-5), inputs.sampled, head)

    ops.bind(forward, [layer_cache()], 8)
    expected = [Kind.EMBEDDING, Kind.NORM, Kind.ROPE_CACHE, Kind.ATTENTION, Kind.LINEAR, Kind.NORM, Kind.GATHER, Kind.LINEAR]
    assert recorder.kinds() == expected
    made = recorder.recordings[-1].instructions
    assert made[4].residual is made[0].to
    assert (made[7].to.rows, made[7].to.width) == (Rows.SAMPLED, 10)


REFUSED: dict[str, tuple[Callable[[CpuOps, StepInputs, LayerCache, Value], object], str]] = {
    "arithmetic": (lambda ops, inputs, cache, x: x + 1, r"unsupported operand"),
    "a torch function": (lambda ops, inputs, cache, x: torch.relu(x), r"must be Tensor"),
    "indexing": (lambda ops, inputs, cache, x: x[0], r"not subscriptable"),
    "a shape": (lambda ops, inputs, cache, x: inputs.token_ids.shape, r"no attribute 'shape'"),
    "a branch on a value": (lambda ops, inputs, cache, x: 1 if x else 2, r"not known when it is recorded"),
    "a branch on an input": (lambda ops, inputs, cache, x: 1 if inputs.token_ids else 2, r"token_ids is not known"),
    "other ids": (lambda ops, inputs, cache, x: ops.embedding(inputs.positions, TABLE), r"the step's token ids"),
    "another result": (lambda ops, inputs, cache, x: torch.zeros(1), r"result is a Tensor"),
    "a tensor": (lambda ops, inputs, cache, x: ops.norm(TABLE, torch.ones(64), 1e-5), r"a Tensor, which no operation computed"),
    "a wrong width": (lambda ops, inputs, cache, x: ops.linear(x, ops.pack_linear(WIDE, None)), r"64 columns that takes 32"),
    "a foreign weight": (lambda ops, inputs, cache, x: ops.linear(x, WIDE), r"did not pack"),
    "a wrong norm": (lambda ops, inputs, cache, x: ops.norm(x, torch.ones(63), 1e-5), r"shape \(63,\)"),
    "a strided table": (lambda ops, inputs, cache, x: ops.embedding(inputs.token_ids, torch.zeros(64, 10).t()), r"layout"),
    "a 16-bit norm": (lambda ops, inputs, cache, x: ops.norm(x, torch.ones(64).half(), 1e-5), r"float16"),
    "a 16-bit product": (lambda ops, inputs, cache, x: ops.pack_linear(WIDE.half(), None), r"float16"),
    "an odd gate": (lambda ops, inputs, cache, x: ops.pack_linear(torch.zeros(3, 64), None, gated=True), r"3 outputs"),
    "a residual of another width": (
        lambda ops, inputs, cache, x: ops.linear(x, ops.pack_linear(torch.zeros(10, 64), None), residual=x),
        r"64 columns that takes 10",
    ),
    "heads that are too many": (
        lambda ops, inputs, cache, x: ops.attention(x, cache, inputs, HeadShape(64, 1, 16), 1.0),
        r"attention with HeadShape\(query_heads=64",
    ),
    "another cache": (
        lambda ops, inputs, cache, x: ops.rope_and_cache(x, torch.zeros(8, 16), layer_cache(HeadShape(2, 2, 16)), inputs, HEADS),
        r"a cache of shape \(4, 2, 16, 16\)",
    ),
    "a 16-bit cache": (
        lambda ops, inputs, cache, x: ops.rope_and_cache(x, torch.zeros(8, 16), layer_cache(dtype=torch.half), inputs, HEADS),
        r"float16",
    ),
    "a cache whose keys and values lie apart": (
        lambda ops, inputs, cache, x: ops.rope_and_cache(
            x, torch.zeros(8, 16), LayerCache(cache.keys[::2], cache.values[:2]), inputs, HEADS
        ),
        r"a cache of shape \(2, 1, 16, 16\)",
    ),
    "other rows": (
        lambda ops, inputs, cache, x: ops.rope_and_cache(x, torch.zeros(8, 16), cache, SimpleNamespace(), HEADS),
        r"the step's own rows",
    ),
    "a head over all tokens": (
        lambda ops, inputs, cache, x: ops.head(x, inputs.token_ids, ops.pack_linear(TABLE, None)),
        r"the step's sampled tokens",
    ),
    "other tokens than the sampled ones": (lambda ops, inputs, cache, x: ops.pick(x, inputs.token_ids), r"the step's sampled tokens"),
    "a choice of picked tokens": (lambda ops, inputs, cache, x: ops.pick(ops.pick(x, inputs.sampled), inputs.sampled), r"picked before"),
    "attention of picked tokens": (
        lambda ops, inputs, cache, x: ops.attention(ops.pick(x, inputs.sampled), cache, inputs, HeadShape(4, 1, 16), 1.0),
        r"sampled tokens alone",
    ),
    "a sum of all and some": (
        lambda ops, inputs, cache, x: ops.linear(
            x,
            ops.pack_linear(torch.zeros(64, 64), None),
            residual=ops.head(x, inputs.sampled, ops.pack_linear(torch.zeros(64, 64), None)),
        ),
        r"all tokens with sampled ones",
    ),
    "a sum with a gated product": (
        lambda ops, inputs, cache, x: ops.linear(x, ops.pack_linear(torch.zeros(128, 64), None, gated=True), residual=x),
        r"a gated product that is added to something",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_program_cannot_express_is_refused_by_name(recorder: Recorder, name: str):
    operation, message = REFUSED[name]
    with pytest.raises(TokenloomError, match=message) as caught:
        recorder.ops.bind(
            lambda inputs, cache: operation(recorder.ops, inputs, cache[0], recorder.ops.embedding(inputs.token_ids, TABLE)),
            [layer_cache()],
            8,
        )
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert not recorder.recordings


def test_operations_outside_of_a_recording_are_refused(recorder: Recorder):
    kept: list[Value] = []

    def forward(inputs: StepInputs, cache: Sequence[LayerCache]) -> Value:
        kept.append(recorder.ops.embedding(inputs.token_ids, TABLE))
        return kept[0]

    recorder.ops.bind(forward, [], 8)
    with pytest.raises(TokenloomError, match="outside of `bind`"):
        recorder.ops.norm(kept[0], torch.ones(64), 1e-5)


def test_a_value_of_another_recording_is_no_result(recorder: Recorder):
    kept: list[Value] = []

    def forward(inputs: StepInputs, cache: Sequence[LayerCache]) -> Value:
        kept.append(recorder.ops.embedding(inputs.token_ids, TABLE))
        return kept[0]

    recorder.ops.bind(forward, [], 8)
    with pytest.raises(TokenloomError, match="not what an operation computed"):
        recorder.ops.bind(forward, [], 8)


def test_values_of_another_recording_are_no_operands(recorder: Recorder):
    kept: list[Value] = []

    def forward(inputs: StepInputs, cache: Sequence[LayerCache]) -> Value:
        kept.append(recorder.ops.embedding(inputs.token_ids, TABLE))
        return recorder.ops.norm(kept[0], torch.ones(64), 1e-5)

    recorder.ops.bind(forward, [], 8)
    with pytest.raises(TokenloomError, match="of another recording"):
        recorder.ops.bind(forward, [], 8)


def test_a_family_that_cannot_be_recorded_is_refused_while_loading(tmp_path, monkeypatch: pytest.MonkeyPatch):
    path = make_tiny_llama(tmp_path / "model")
    forward = Llama.forward
    monkeypatch.setattr(Llama, "forward", lambda self, inputs, cache: forward(self, inputs, cache) * 2)
    with pytest.raises(TokenloomError, match=r"--kernels reference") as caught:
        load_engine(path, kernels="cpu")
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_after_the_last_attention_the_sampled_tokens_alone_go_on(tmp_path, monkeypatch: pytest.MonkeyPatch):
    recordings, program = [], cpu.Program

    def kept(library: CpuLibrary, team: Team, recording: Recording, result: Value, most: int) -> Program:
        recordings.append(recording)
        return program(library, team, recording, result, most)

    monkeypatch.setattr(cpu, "Program", kept)
    load_engine(make_tiny_llama(tmp_path / "model"), kernels="cpu")
    made = recordings[0].instructions
    after = max(index for index, item in enumerate(made) if item.kind is Kind.ATTENTION) + 1
    assert {item.to.rows for item in made[:after]} == {Rows.TOKENS}
    assert {item.to.rows for item in made[after:]} == {Rows.SAMPLED}
