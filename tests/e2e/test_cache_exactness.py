"""A KV cache of 40 blocks, with and without prefix caching: hits, evictions and preemptions happen and change no token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from libs.blocks import BLOCK_SIZE
from tests.support.mesh import BLOCK_BYTES, Mesh
from tests.support.prompts import PROMPTS
from tests.support.reference import Reference
from tests.support.streams import Reader, Wish, ask, read_all

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]
BLOCKS = 40
HEAD = 6 * BLOCK_SIZE
FREE = 'tokenloom:kv_blocks{state="free"}'
HITS, PREEMPTIONS = "tokenloom:prefix_cache_hits_total", 'tokenloom:num_preemptions_total{reason="no_blocks"}'


@dataclass(frozen=True, slots=True)
class Tight:
    """A mesh whose cache holds 40 blocks."""

    mesh: Mesh
    caches: bool

    async def read(self, *wishes: Wish) -> list[Reader]:
        """All at once, to their ends."""
        async with self.mesh.client() as client:
            return await read_all(client, self.mesh.model, wishes)


@pytest.fixture(scope="module", params=["enable-prefix-caching", "no-enable-prefix-caching"])
def tight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Tight]:
    mesh = Mesh.start(tmp_path_factory.mktemp("tight"), f"--kv-cache-memory-bytes={BLOCKS * BLOCK_BYTES}", f"--{request.param}")
    yield Tight(mesh, request.param == "enable-prefix-caching")
    assert mesh.stop() == 0


@pytest.fixture(scope="module")
def ids(model_dir: Path) -> list[int]:
    """1,500 tokens of text and code; slices that begin at different places share no block."""
    text, count = PROMPTS[-1]
    return list(Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text, add_special_tokens=False).ids[:count])


@pytest.fixture(scope="module")
def family(ids: list[int]) -> list[Wish]:
    """Prompts that begin with the same six blocks, greedy and seeded in turn."""
    return [Wish((*ids[:HEAD], *ids[200 + 9 * n : 205 + 10 * n]), 12, seed=40 + n if n % 2 else None) for n in range(6)]


@pytest.fixture(scope="module")
def crowd(ids: list[int]) -> list[Wish]:
    """Prompts of six blocks that grow to nine: eight of them together want 72 blocks."""
    return [Wish(tuple(ids[300 + 101 * n :][:HEAD]), 2 * BLOCK_SIZE + 8, seed=80 + n if n % 2 else None) for n in range(8)]


def check_greedy(reference: Reference, readers: list[Reader]) -> None:
    for reader in readers:
        if reader.wish.seed is None:
            reference.check(list(reader.wish.prompt), reader.ids)


async def test_the_cache_is_as_small_as_it_should_be(tight: Tight) -> None:
    seen = await tight.mesh.settle()
    assert {name: value for name, value in seen.items() if name.startswith("tokenloom:kv_blocks") and value} == {FREE: BLOCKS}


@pytest.mark.composes("prefix caching", "greedy", "streaming")
@pytest.mark.composes("prefix caching", "seed", "streaming")
async def test_prompts_that_begin_alike_share_blocks_and_change_no_token(tight: Tight, reference: Reference, family: list[Wish]) -> None:
    before = (await tight.mesh.settle())[HITS]
    cold = [(await tight.read(wish))[0] for wish in family]
    warm = await tight.read(*family)
    hits = (await tight.mesh.settle())[HITS] - before
    assert [reader.answer for reader in warm] == [reader.answer for reader in cold]
    check_greedy(reference, cold)
    assert hits == sum(reader.cached_tokens for reader in [*cold, *warm])
    if tight.caches:
        assert [reader.cached_tokens for reader in cold] == [0, *[HEAD] * 5]
        assert all(reader.cached_tokens == HEAD for reader in warm)
    else:
        assert hits == 0


@pytest.mark.composes("preemption", "prefix caching", "greedy", "streaming")
@pytest.mark.composes("preemption", "prefix caching", "seed", "streaming")
async def test_preempted_requests_get_exactly_their_tokens_and_evicted_blocks_are_computed_again(
    tight: Tight, reference: Reference, family: list[Wish], crowd: list[Wish]
) -> None:
    mesh, first = tight.mesh, Wish((*family[0].prompt[HEAD:], *family[0].prompt[:HEAD]), 12)
    alone = [ask(mesh.url, mesh.model, wish) for wish in crowd]
    before = (await mesh.settle())[PREEMPTIONS]
    known = [(await tight.read(first))[0] for _ in range(2)]
    together = await tight.read(*crowd)
    # Who is preempted lacked a block: at that moment every block was held, those of `first` too.
    assert (await mesh.settle())[PREEMPTIONS] > before
    evicted = [(await tight.read(first))[0] for _ in range(2)]
    assert [reader.answer for reader in together] == alone
    assert len({reader.answer for reader in [*known, *evicted]}) == 1
    check_greedy(reference, [*known, *together])
    assert [reader.cached_tokens for reader in [*known, *evicted]] == ([0, HEAD, 0, HEAD] if tight.caches else [0] * 4)
    assert mesh.metrics("scheduler")["tokenloom:requests_failed_total"] == 0
