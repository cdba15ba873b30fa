import re
from functools import cached_property

import pytest
from pydantic import PositiveInt, model_validator

from fd_interp.config import Frozen, InputError, nearest


class Inner(Frozen):
    size: PositiveInt = 1
    names: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _is_even(self) -> "Inner":
        if self.size > 1 and self.size % 2:
            raise InputError(f"size must be even, not {self.size}")
        return self


class Outer(Frozen):
    """What a thing is made of."""

    rate: float
    """Steps in a second."""
    inner: Inner = Inner()
    table: dict[str, float] = {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "Outer needs the field 'rate'"),
        ({"rate": 1, "raet": 2}, "Outer has no field 'raet', did you mean rate?"),
        ({"rate": 1, "zzz": 2}, "Outer has no field 'zzz', known: inner, rate, table"),
        ({"rate": "fast"}, "rate: Input should be a valid number, unable to parse string as a number, not 'fast'"),
        ({"rate": float("nan")}, "rate: Input should be a finite number, not nan"),
        ({"rate": 1, "inner": {"size": 3}}, "inner: size must be even, not 3"),
        ({"rate": 1, "inner": {"size": 0}}, "inner: size: Input should be greater than 0, not 0"),
        ({"rate": 1, "inner": {"sise": 2}}, "inner: Inner has no field 'sise', did you mean size?"),
        ({"rate": 1, "table": {"W_Q": "x"}}, "table.W_Q: Input should be a valid number"),
        ({"rate": "fast", "raet": 1}, "not 'fast'; Outer has no field 'raet', did you mean rate?"),
    ],
)
def test_each_wrong_field_gets_one_sentence(fields: dict, message: str):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        Outer(**fields)
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_a_rule_of_the_value_itself_is_said_as_it_is():
    with pytest.raises(InputError) as caught:
        Inner(size=5)
    assert str(caught.value) == "size must be even, not 5"


def test_an_input_error_is_a_value_error():
    with pytest.raises(ValueError, match="needs the field"):
        Outer()  # pyright: ignore


def test_values_are_frozen_hashable_and_equal_by_content():
    inner = Inner(size=2)
    with pytest.raises(ValueError, match="frozen"):
        inner.size = 4
    assert inner == Inner(size=2) != Inner(size=4)
    assert len({inner, Inner(size=2), Inner(size=4)}) == 2


def test_what_a_value_has_computed_is_no_part_of_it():
    class Square(Frozen):
        side: float

        @cached_property
        def area(self) -> float:
            return self.side**2

    square = Square(side=2.0)
    assert square.area == 4
    assert square == Square(side=2.0)
    assert hash(square) == hash(Square(side=2.0))
    assert square.model_copy(update={"side": 3.0}).area == 9
    assert square != Inner(size=2)


def test_a_copy_is_checked_like_any_other_value():
    outer = Outer(rate=1, inner=Inner(size=4))
    changed = outer.model_copy(update={"rate": 2.0})
    assert (changed.rate, changed.inner, outer.rate) == (2.0, Inner(size=4), 1.0)
    assert outer.model_copy() == outer
    with pytest.raises(InputError, match="did you mean rate"):
        outer.model_copy(update={"raet": 2.0})
    with pytest.raises(InputError, match="size must be even"):
        outer.inner.model_copy(update={"size": 3})


def test_survives_json():
    outer = Outer(rate=0.1, inner=Inner(size=2, names=("a", "b")), table={"W_Q": 1e-3})
    assert Outer.model_validate_json(outer.model_dump_json()) == outer
    assert Outer(**outer.model_dump()) == outer


def test_docstrings_below_fields_are_their_descriptions():
    assert Outer.model_fields["rate"].description == "Steps in a second."


def test_nearest_offers_what_is_close_or_all_there_is():
    known = ["persistence", "context", "redraw"]
    assert nearest("persistance", known) == "did you mean persistence?"
    assert nearest("xyz", known) == "known: context, persistence, redraw"
    assert nearest("hook_q", ["hook_q1", "hook_q2", "other"]) in (
        "did you mean hook_q1 or hook_q2?",
        "did you mean hook_q2 or hook_q1?",
    )
    assert nearest("contxt", (name for name in known)) == "did you mean context?"
