"""The experts kernel against NumPy in float64, and a row's result whatever is around it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.compile.formats import FORMATS
from buddy_pipeline.compile.kernels import experts
from buddy_pipeline.compile.target import Target
from tests.compile.harness import (
    ROUNDOFF,
    assert_same_bits,
    host,
    run_experts,
    run_linear,
    runnable_targets,
)

on_each_target = pytest.mark.parametrize("target", runnable_targets())
in_each_form = pytest.mark.parametrize(
    "form", ["f32", "bf16", "bf16_exact", "f16", "w8a32", "w8a16", "w8a8"]
)


class Case:
    """A layer of experts and tokens that have chosen some."""

    def __init__(
        self,
        tokens: int,
        number: int = 5,
        choices: int = 2,
        depth: int = 256,
        outputs: int = 71,
        rows: int = 1,
        seed: int = 0,
    ) -> None:
        random = np.random.default_rng([tokens, number, choices, depth, outputs, rows, seed])
        self.x = random.standard_normal((tokens, rows, depth), np.float32)
        self.weight = random.standard_normal((number, outputs, depth), np.float32)
        self.bias = random.standard_normal((number, outputs), np.float32)
        order = [random.permutation(number)[:choices] for _ in range(tokens)]
        self.choice = np.array(order, np.int64).reshape(tokens, choices)

    def run(
        self, target: Target, team: int = 1, form: str = "f32", bias: bool = True
    ) -> np.ndarray:
        added = self.bias if bias else None
        return run_experts(target, self.x, self.choice, self.weight, added, team, form)

    def check(self, target: Target, team: int, form: str = "f32", bias: bool = True) -> None:
        """As the linear kernel: within one chain of `depth` roundings."""
        stored = FORMATS[form]
        depth, outputs = self.x.shape[2], self.weight.shape[1]
        x = stored.activation(target).reference(self.x.reshape(-1, depth))
        x = np.broadcast_to(x.reshape(self.x.shape), (*self.choice.shape, depth))
        flat = stored.from_f32(self.weight.reshape(-1, depth))
        wide = stored.reference(flat).astype(np.float64).reshape(-1, outputs, depth)[self.choice]
        added = self.bias[self.choice].astype(np.float64) if bias else 0.0
        got = self.run(target, team, form, bias)
        wanted = np.einsum("tjk,tjnk->tjn", x.astype(np.float64), wide) + added
        size = np.einsum("tjk,tjnk->tjn", np.abs(x), np.abs(wide)) + np.abs(added)
        roundings = depth + 1 + stored.scaled
        assert (np.abs(got - wanted) <= roundings * ROUNDOFF * size).all()


@on_each_target
@in_each_form
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_rows_are_multiplied_with_the_chosen_matrices(
    target: Target, form: str, tokens: int
) -> None:
    Case(tokens).check(target, 2, form)
    Case(tokens, rows=2).check(target, 1, form, bias=False)


@on_each_target
@pytest.mark.parametrize("depth", [1, 33, 700])
@pytest.mark.parametrize("outputs", [1, 31, 64, 130])
def test_odd_sizes(target: Target, depth: int, outputs: int) -> None:
    Case(6, 3, 3, depth, outputs).check(target, 3)


@on_each_target
def test_groups_that_are_full_and_results_in_pieces(target: Target) -> None:
    """More rows of one expert than a group takes, more panels than are multiplied at once."""
    case = Case(150, 2, 1, 40, (experts.GROUP_PANELS + 1) * target.panel + 3)
    case.check(target, 1)
    assert_same_bits(case.run(target, 3), case.run(target))


@on_each_target
@pytest.mark.parametrize("form", ["f32", "bf16", "f16", "w8a8", "w4g32"])
def test_a_row_has_the_bits_of_the_linear_kernel(target: Target, form: str) -> None:
    case = Case(70, 3, 2)
    got = case.run(target, 2, form)
    for expert in range(3):
        tokens, places = np.nonzero(case.choice == expert)
        linear = run_linear(
            target, case.x[tokens, 0], case.weight[expert], case.bias[expert], form=form
        )
        assert_same_bits(got[tokens, places], linear)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4), st.data())
def test_other_tokens_and_teams_change_no_bit(
    tokens: int, number: int, team: int, data: st.DataObject
) -> None:
    case = Case(tokens, number, data.draw(st.integers(1, number)), 70, 45)
    whole = case.run(host())
    count = data.draw(st.integers(1, tokens))
    chosen = np.array(data.draw(st.permutations(range(tokens))))[:count]
    case.x, case.choice = case.x[chosen], case.choice[chosen]
    assert_same_bits(case.run(host(), team), whole[chosen])


def test_experts_that_nobody_chose_are_not_read() -> None:
    case = Case(4, 5)
    case.choice[:] = [3, 1]
    clean = case.run(host())
    case.weight[[0, 2, 4]] = np.nan
    assert_same_bits(case.run(host()), clean)
