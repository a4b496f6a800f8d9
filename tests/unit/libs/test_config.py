from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from libs.config import NONE_WORD, ServiceConfig, parse, to_args
from libs.errors import TokenloomError


class ExampleConfig(ServiceConfig):
    """An example."""

    listen: str = Field("127.0.0.1:0", description="Address.")
    max_num_seqs: int = Field(64, ge=1, description="Sequences.")
    share: float = Field(0.9, gt=0, le=1, description="Share.")
    chunked: bool = Field(True, description="Chunked.")
    names: list[str] = Field(default_factory=list, description="Names.")
    limit: int | None = Field(None, description="Limit.")
    policy: Literal["fcfs", "priority"] = Field("fcfs", description="Policy.")
    directory: Path | None = Field(None, description="Directory.")


def read(*args):
    return parse(ExampleConfig, args, prog="example")


def test_a_flag_wins_over_the_environment_which_wins_over_the_default(monkeypatch):
    assert read().max_num_seqs == 64
    monkeypatch.setenv("TOKENLOOM_MAX_NUM_SEQS", "8")
    assert read().max_num_seqs == 8
    assert read("--max-num-seqs", "4").max_num_seqs == 4


def test_booleans_take_both_spellings():
    assert read("--no-chunked").chunked is False
    assert read("--chunked").chunked is True


def test_lists_are_repeated_flags_or_items_between_commas(monkeypatch):
    assert read("--names=a", "--names", "b").names == ["a", "b"]
    assert read("--names=a, b", "--names=c").names == ["a", "b", "c"]
    assert read("--names=").names == []
    monkeypatch.setenv("TOKENLOOM_NAMES", "k1,k2")
    assert read().names == ["k1", "k2"]


@pytest.mark.parametrize("typed", ['"quoted', "[x", "{y}", "back\\slash", "null", "1", "a b"])
def test_an_item_arrives_as_it_was_typed(typed):
    assert read(f"--names={typed}").names == [typed]


def test_an_item_with_a_comma_cannot_become_a_flag_and_says_so():
    with pytest.raises(TokenloomError, match="--names: an item must not contain a comma"):
        to_args(ExampleConfig(names=["a,b"]), ["names"])


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--max-num-seqs", "0"), "--max-num-seqs"),
        (("--max-num-seqs", "many"), "--max-num-seqs"),
        (("--share", "1.5"), "--share"),
        (("--unheard-of", "1"), "--unheard-of"),
    ],
)
def test_a_wrong_flag_ends_the_command_with_code_2_and_its_name(args, named, capsys):
    with pytest.raises(SystemExit) as ended:
        read(*args)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_help_shows_every_flag_with_its_description(capsys):
    with pytest.raises(SystemExit) as ended:
        read("--help")
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in ExampleConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in shown
        assert field.description.split()[0] in shown


def test_a_config_cannot_be_changed_after_parsing():
    with pytest.raises(ValueError, match="frozen"):
        read().max_num_seqs = 3


def test_only_what_was_given_becomes_a_flag_again():
    assert to_args(read("--max-num-seqs=3"), list(ExampleConfig.model_fields)) == ["--max-num-seqs=3"]
    assert to_args(read("--max-num-seqs=3"), ["share"]) == []


# Values of one line, without blanks around them: those do not count.
LINE = st.characters(exclude_categories=("C", "Zl", "Zp"))
TEXT = st.text(LINE, max_size=20).map(str.strip).filter(lambda text: text != NONE_WORD)
ITEM = TEXT.map(lambda text: text.replace(",", "").strip()).filter(lambda text: text not in ("", NONE_WORD))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "listen": TEXT,
            "max_num_seqs": st.integers(1, 10**9),
            "share": st.floats(0.001, 1),
            "chunked": st.booleans(),
            "names": st.lists(ITEM, max_size=4),
            "limit": st.integers(-(10**9), 10**9),
            "policy": st.sampled_from(["fcfs", "priority"]),
            "directory": st.text("abc/._é", min_size=1, max_size=12).map(Path),
        },
    )
)
def test_a_config_survives_the_journey_through_a_command_line(values):
    config = ExampleConfig(**values)
    again = read(*to_args(config, list(ExampleConfig.model_fields)))
    assert again.model_dump() == config.model_dump()


@pytest.mark.parametrize("values", [{"listen": NONE_WORD}, {"names": [NONE_WORD]}, {"directory": Path(NONE_WORD)}])
def test_the_word_for_no_value_is_refused_as_a_value(values):
    with pytest.raises(TokenloomError, match="None stands for no value") as raised:
        to_args(ExampleConfig(**values), list(values))
    assert raised.value.param == next(iter(values))
