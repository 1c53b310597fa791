"""The report: what it shows is what was logged, whatever the run left behind, and what a model wrote stays text."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser

import pytest

from grpo_ext.errors import ConfigError
from grpo_ext.tools import report as module
from grpo_ext.tools.report import load_run, plots_of, report, report_or_reason
from tests.support import forks

HOSTILE = '<script>alert("x")</script></pre><img src=x onerror=alert(1)>{{ 7*7 }}'


class Page(HTMLParser):
    """Tags and visible text of a page."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.words = [], [], []
        self.feed(path.read_text())
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.words.append(data)


def line(step, **values):
    return {"step": step, "time": 2.0 * step, "peak_memory_mib": 100.0 + step, "values": {"reward": 0.0, **values}}


def entry(**changes):
    settings = {"loss_type": "dapo", "learning_rate": 1e-3, "max_steps": 4} | changes
    model = {"class": "Tiny", "parameters": 12345, "sha256": "ab"}
    return {"started": "2030-01-01", "plan": "16 completions", "model": model, "settings": settings}


def make_run(folder, lines, **changes):
    folder.mkdir(parents=True)
    began = {"step": 0, "start": entry(**changes)}
    (folder / "log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (began, *lines)))
    return folder


def test_every_plot_holds_exactly_what_was_logged(tmp_path):
    names = {
        "Evaluation": ("eval_pass@1", "eval_math_pass@8", "eval_reward"),
        "Reward": ("reward", "rewards/letters/mean"),
        "Completion length": ("completions/mean_length", "completions/max_length"),
        "Cut completions, clipped tokens, groups without variance": ("frac_reward_zero_std", "cispo_clip_ratio"),
        "Entropy, KL to the reference": ("entropy", "kl"),
        "Gradient norm before clipping": ("grad_norm",),
        "Time by phase": ("step_time", "time/rollout"),
    }
    every = [name for together in names.values() for name in together]
    lines = [line(step, **{name: place + 0.1 * step for place, name in enumerate(every)}) for step in (1, 2, 3)]
    plots = plots_of(load_run(make_run(tmp_path / "run", lines))[1])
    assert list(plots) == list(names)
    for title, together in names.items():
        expected = {name: ([1, 2, 3], [each["values"][name] for each in lines]) for name in together}
        assert plots[title][1] == expected


def test_the_page_says_the_numbers_and_holds_the_plots_itself(tmp_path):
    lines = [line(1, reward=0.125, entropy=1.5, kl=0.0), line(4, reward=0.875, entropy=0.5, kl=0.0)]
    run = make_run(tmp_path / "run", lines)
    path = report(run)
    assert path == run / "report" / "index.html"
    page = Page(path)
    for text in (
        "reward, first -> last 0.125 -> 0.875",
        "entropy 1.5 0.5 0.5 1.5",
        "peak_memory_mib 101 104 101 104",
        "kl 0 0 0 0",
        "model Tiny parameters 12,345",
        "training time 0:00:08 in train()",
        "16 completions",
    ):
        assert text in page.text
    assert page.tags.count("img") == 2  # kl never changes
    assert all(value.startswith("data:") for _, name, value in page.attributes if name in ("src", "href"))


def test_settings_and_names_of_rewards_stay_text(tmp_path):
    lines = [line(n, **{f"rewards/{HOSTILE}/mean": n, "rewards/_a$b{/mean": 2.0}) for n in (1, 2)]
    page = Page(report(make_run(tmp_path / "run", lines, loss_type=HOSTILE)))
    assert "script" not in page.tags
    assert all(value.startswith("data:") for tag, name, value in page.attributes if tag == "img" and name == "src")
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert HOSTILE in page.text
    assert "rewards/_a$b{/mean 2 2 2 2" in page.text


def test_a_run_killed_in_a_line_is_shown_up_to_that_line(tmp_path):
    run = make_run(tmp_path / "run", [line(1, reward=0.25), line(2, reward=0.5), line(3, reward=0.75)])
    (run / "log.jsonl").write_text((run / "log.jsonl").read_text()[:-30])
    text = Page(report(run)).text
    assert (
        "steps 2 of 4 state not finished: it is still running, or was killed reward, first -> last 0.25 -> 0.5" in text
    )


def test_a_log_without_starts_has_curves_and_one_that_began_again_is_not_finished(tmp_path):
    run = make_run(tmp_path / "run", lines := [line(1), line(1, train_runtime=2.0)])
    (run / "log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert "steps 1 state finished reward, first" in Page(report(run)).text
    again = [*lines, {"step": 1, "start": entry()}, line(2)]
    assert "state not finished" in Page(report(make_run(tmp_path / "again", again))).text


def test_steps_that_were_done_again_are_shown_once(tmp_path):
    resumed = {"step": 1, "start": entry(learning_rate=0.5)}
    lines = [line(1), line(2, reward=9.0), resumed, line(2, reward=0.5), {"step": 2, "end": {"ended": "finished"}}]
    page = Page(report(make_run(tmp_path / "run", lines)))
    assert "reward 0 0.5 0 0.5" in page.text
    assert "resumed from step 1; steps" in page.text
    assert "start 2: settings.learning_rate 0.001 0.5" in page.text
    assert "settings.loss_type" not in page.text, "it is the same"


def test_the_held_out_scores_of_a_demo_are_a_curve(tmp_path):
    run = make_run(tmp_path / "run", [line(6), line(12)])
    (run / "metrics.json").write_text(json.dumps({"exact_match_by_step": {"6": 0.5, "12": 0.75}}))
    assert plots_of(load_run(run)[1])["Evaluation"][1] == {"held_out_exact_match": ([6, 12], [0.5, 0.75])}


def axis_of(run, title):
    """The ticks and the number of marked points of a plot."""
    from matplotlib.figure import Figure

    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure))
        module._picture(*plots_of(load_run(run)[1])[title])
    (axis,) = drawn[0].axes
    low, high = axis.get_xlim()
    ticks = [tick for tick in axis.get_xticks() if low <= tick <= high]
    return ticks, [line.get_marker() for line in axis.get_lines()], (low, high)


@pytest.mark.parametrize("step", [1, 12, 4000])
def test_one_evaluation_is_marked_on_an_axis_of_whole_steps(tmp_path, step):
    scores = {"eval_pass@1": 0.25, "eval_pass@2": 0.5}
    ticks, markers, (low, high) = axis_of(make_run(tmp_path / "run", [line(step, **scores)]), "Evaluation")
    assert ticks == [step - 1, step, step + 1]
    assert (low, high) == (step - 1, step + 1)
    assert markers == [".", "."]


def test_two_evaluations_span_the_axis(tmp_path):
    lines = [line(step, **{"eval_pass@1": step / 100}) for step in (10, 20)]
    ticks, _, (low, high) = axis_of(make_run(tmp_path / "run", lines), "Evaluation")
    assert low < 10 < 20 < high
    assert high - low < 12
    assert all(tick == int(tick) for tick in ticks)


def test_pass_at_k_is_drawn_for_doublings_and_the_largest_k_of_every_set(tmp_path):
    names = [f"eval_{part}pass@{k}" for part in ("", "math_") for k in range(1, 9)] + ["eval_math_pass@12"]
    run = make_run(tmp_path / "run", [line(1, **{name: n / 100 for n, name in enumerate(names)})])
    curves = plots_of(load_run(run)[1])["Evaluation"][1]
    assert [*curves] == [f"eval_{part}pass@{k}" for part in ("", "math_") for k in (1, 2, 4, 8)] + ["eval_math_pass@12"]
    assert "eval_pass@7" in Page(report(run)).text, "the table has all"


def test_the_time_of_several_starts_is_named_as_their_sum(tmp_path):
    lines = [line(1), line(2), {"step": 1, "start": entry()}, line(2), {"step": 2, "start": entry()}, line(3)]
    page = Page(report(make_run(tmp_path / "run", lines)))
    assert "training time 0:00:14 in train(), the sum over 3 starts, with steps that were done again" in page.text


def test_a_folder_without_a_run_is_a_clear_error(tmp_path):
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=r"log\.jsonl is missing or empty; name the output_dir of a run"):
            load_run(folder)
        (tmp_path / "log.jsonl").touch()


def test_a_failed_report_is_a_sentence(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", [line(1)])
    for name in ("matplotlib.figure", "jinja2"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            reason = report_or_reason(run)
            assert f"No report was written: the report needs {name}; run `pip install " in reason
    monkeypatch.setattr(module, "plots_of", lambda series: 1 / 0)
    assert "ZeroDivisionError" in report_or_reason(run)


def test_the_command_writes_it(tmp_path):
    run = make_run(tmp_path / "run", [line(1)])
    done = forks.python("-m", "grpo_ext.tools.cli", "report", run)
    assert done.returncode == 0, done.stderr
    assert f"{run / 'report' / 'index.html'}" in done.stdout


def test_a_page_that_is_no_report_is_left_alone(tmp_path):
    run = make_run(tmp_path / "run", [line(1)])
    page = report(run)
    assert report(run) == page  # its own page is replaced
    page.write_text("mine")
    with pytest.raises(ConfigError, match="is not a report and would be overwritten"):
        report(run)
    assert page.read_text() == "mine"
