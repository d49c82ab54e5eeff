"""The example of generation inside a compiled loop runs as its docstring says, and shows what it claims."""

from test_examples_training import numbers, run


def test_generate_in_scan_learns_what_is_rewarded(tmp_path):
    out = run("generate_in_scan", tmp_path)
    rewards = numbers(r"mean reward ([\d.]+)", out)
    assert len(rewards) == 4 and rewards[-1] > 0.95 > rewards[0]
    greedy = [int(number) for number in numbers(r"\d+", out.splitlines()[-1].partition(":")[2])]
    assert sum(after == (before + 1) % 12 for before, after in zip([3, *greedy], greedy, strict=False)) >= 7
