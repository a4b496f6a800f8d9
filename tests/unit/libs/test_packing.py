import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.packing import count_ids, pack_ids, unpack_ids

IDS = st.lists(st.integers(min_value=0, max_value=2**32 - 1), max_size=200)


@given(IDS)
def test_ids_survive_the_journey(ids):
    packed = pack_ids(ids)
    assert unpack_ids(packed) == ids
    assert count_ids(packed) == len(ids)
    assert len(packed) == 4 * len(ids)


def test_the_bytes_are_little_endian_on_every_machine():
    assert pack_ids([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])


@given(IDS, IDS)
def test_concatenated_bytes_are_concatenated_ids(left, right):
    assert unpack_ids(pack_ids(left) + pack_ids(right)) == left + right


@pytest.mark.parametrize("wrong", [-1, 2**32, 2**63])
def test_what_is_no_uint32_is_refused(wrong):
    with pytest.raises(OverflowError):
        pack_ids([wrong])


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_torn_bytes_are_refused(length):
    with pytest.raises(ValueError):
        unpack_ids(bytes(length))
