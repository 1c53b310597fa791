"""The report: what it shows is what was logged, whatever the run left behind, and what a model wrote stays text."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from grpo_ext.errors import ConfigError
from grpo_ext.tools import report as module
from grpo_ext.tools.plots import PLOTS, figure_class, plots_of
from grpo_ext.tools.report import load_run, report, report_or_reason
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
    return {"started": "2030-01-01", "data": {"rows": 22}, "plan": "16 completions", "model": model} | {
        "settings": settings
    }


def make_run(folder, lines, **changes):
    folder.mkdir(parents=True)
    began = {"step": 0, "start": entry(**changes)}
    (folder / "log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (began, *lines)))
    return folder


def drawn(*runs):
    """The curves of runs by the title of their plot."""
    loaded = [load_run(run) for run in runs]
    return {plot.title: dict(plot.curves) for plot in plots_of({run.name: run.series for run in loaded})}


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
    curves = drawn(make_run(tmp_path / "run", lines))
    assert list(curves) == [title for title, *_ in PLOTS]
    for title, together in names.items():
        expected = {name: ([1, 2, 3], [each["values"][name] for each in lines]) for name in together}
        assert {name: curves[title][name] for name in together} == expected


def test_the_page_says_the_numbers_and_holds_the_plots_itself(tmp_path):
    lines = [line(1, reward=0.125, entropy=1.5, kl=0.0), line(4, reward=0.875, entropy=0.5, kl=0.0)]
    run = make_run(tmp_path / "run", lines)
    path = report([run])
    assert path == run / "report" / "index.html"
    page = Page(path)
    for text in (
        "reward, first -> last 0.125 -> 0.875",
        "entropy 1.5 -> 0.5 (0.5 to 1.5)",
        "peak_memory_mib 101 -> 104",
        "kl 0 -> 0 (0 to 0)",
        "model Tiny parameters 12,345",
        "training time 0:00:08 in train()",
        "16 completions",
    ):
        assert text in page.text
    assert page.tags.count("img") == 2  # kl never changes
    assert all(value.startswith("data:") for _, name, value in page.attributes if name in ("src", "href"))


def test_settings_and_names_of_rewards_stay_text(tmp_path):
    lines = [line(n, **{f"rewards/{HOSTILE}/mean": n, "rewards/_a$b{/mean": 2.0}) for n in (1, 2)]
    page = Page(report([make_run(tmp_path / "run", lines, loss_type=HOSTILE)]))
    assert "script" not in page.tags
    assert all(value.startswith("data:") for tag, name, value in page.attributes if tag == "img" and name == "src")
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert HOSTILE in page.text
    assert "rewards/_a$b{/mean 2 -> 2" in page.text


def test_an_unfinished_run_and_one_killed_in_a_line_are_reported(tmp_path):
    run = make_run(tmp_path / "run", [line(1, reward=0.25), line(2, reward=0.5), line(3, reward=0.75)])
    text = (run / "log.jsonl").read_text()
    (run / "log.jsonl").write_text(text[:-30])
    page = Page(report([run]))
    assert "0.25 -> 0.5" in page.text
    assert "steps 2 of 4" in page.text
    assert "not finished: it goes on, or was killed" in page.text
    assert "1 line(s) of log.jsonl were not finished" in page.text


def test_a_run_that_goes_on_after_an_interrupt_is_not_finished(tmp_path):
    lines = [line(1), line(1, train_runtime=2.0)]
    assert "state finished" in Page(report([make_run(tmp_path / "ended", lines)])).text
    again = [*lines, {"step": 1, "start": entry()}, line(2)]
    assert "state not finished" in Page(report([make_run(tmp_path / "killed", again)])).text


def test_steps_that_were_done_again_are_shown_once(tmp_path):
    resumed = {"step": 1, "start": entry(learning_rate=0.5)}
    lines = [line(1), line(2, reward=9.0), resumed, line(2, reward=0.5), {"step": 2, "end": {"ended": "finished"}}]
    page = Page(report([make_run(tmp_path / "run", lines)]))
    assert "reward 0 -> 0.5 (0 to 0.5)" in page.text
    assert "Resumed from step 1" in page.text
    assert "settings.learning_rate 0.001 0.5" in page.text


def test_the_held_out_scores_of_a_demo_are_a_curve(tmp_path):
    run = make_run(tmp_path / "run", [line(6), line(12)])
    (run / "metrics.json").write_text(json.dumps({"exact_match_by_step": {"12": 0.75, "6": 0.5}}))
    assert drawn(run)["Evaluation"] == {"held_out_exact_match": ([6, 12], [0.5, 0.75])}


def test_several_runs_are_laid_over_each_other_with_what_differs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [
        make_run(Path("runs/a"), [line(1, reward=0.1, kl=0.5), line(2, reward=0.2, kl=0.6)]),
        make_run(Path("runs/b"), [line(1, reward=0.3), line(2, reward=0.9)], learning_rate=0.5),
    ]
    assert drawn(*runs) == {
        "Reward: reward": {"runs/a": ([1, 2], [0.1, 0.2]), "runs/b": ([1, 2], [0.3, 0.9])},
        "Entropy, KL to the reference: kl": {"runs/a": ([1, 2], [0.5, 0.6])},
    }
    path = report(runs)
    assert path == tmp_path / "runs" / "report-comparison" / "index.html"
    page = Page(path)
    assert "settings.learning_rate 0.001 0.5" in page.text
    assert "settings.loss_type" not in page.text.split("Curves")[0]
    assert "reward 0.1 -> 0.2 (0.1 to 0.2) 0.3 -> 0.9 (0.3 to 0.9)" in page.text
    assert page.tags.count("img") == 2


def test_runs_that_agree_are_said_to(tmp_path):
    rewards = {"a": (0.1, 0.2, 0.4), "b": (0.1, 0.2, 0.4), "c": (0.1, 0.3, 0.4), "longer": (0.1, 0.2, 0.4, 0.6)}
    a, b, c, longer = (
        make_run(tmp_path / n, [line(i, reward=r, loss=0.5) for i, r in enumerate(v)]) for n, v in rewards.items()
    )
    same = "Identical in all runs, to the last digit: Reward"
    assert same in Page(report([a, b])).text
    assert same not in Page(report([a, c])).text
    assert same not in Page(report([a, longer])).text


def test_a_folder_without_a_run_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        load_run(tmp_path / "none")
    with pytest.raises(ConfigError, match="holds no log lines"):
        load_run(tmp_path)
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(ConfigError, match="holds no log lines"):
        load_run(tmp_path)


def test_a_failed_report_is_a_sentence(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", [line(1)])
    for name, package in (("matplotlib.figure", "matplotlib"), ("jinja2", "jinja2")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            assert re.match(rf"No report was written: .* needs? {package}; install it with", report_or_reason(run))
    monkeypatch.setattr(module, "plots_of", lambda runs: 1 / 0)
    assert "ZeroDivisionError" in report_or_reason(run)


def test_the_command_writes_it_and_refuses_in_one_message(tmp_path):
    run = make_run(tmp_path / "run", [line(1)])
    done = forks.python("-m", "grpo_ext.tools.cli", "report", run)
    assert done.returncode == 0, done.stderr
    assert f"{run / 'report' / 'index.html'}" in done.stdout
    refused = forks.python("-m", "grpo_ext.tools.cli", "report", tmp_path)
    assert refused.returncode == 2
    assert "holds no log lines" in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr


def test_a_page_that_is_no_report_is_left_alone(tmp_path):
    run = make_run(tmp_path / "run", [line(1)])
    page = report([run])
    assert report([run]) == page  # its own page is replaced
    page.write_text("mine")
    with pytest.raises(ConfigError, match="would replace what is no report"):
        report([run])
    assert page.read_text() == "mine"


def test_a_file_that_cannot_be_written_is_refused():
    with pytest.raises(ConfigError, match=r"plot.xyz is no plot .* \.png, \.svg or \.pdf"):
        figure_class(Path("plot.xyz"))
