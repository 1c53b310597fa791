"""The report: what it shows is what was logged, whatever the run left behind, and what a model wrote stays text."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from grpo_ext.errors import ConfigError
from grpo_ext.tools.plots import figure_class
from grpo_ext.tools.report import page as report_module
from grpo_ext.tools.report.page import report, report_or_reason
from grpo_ext.tools.report.plots import PLOTS, panels
from grpo_ext.tools.report.runs import load_run
from tests.support import forks

GEOMETRY = {
    "num_generations": 4,
    "global_batch_size": 16,
    "rollout_batch_size": 16,
    "num_iterations": 1,
    "micro_batch_size": 5,
    "num_processes": 1,
    "rollout_chunk_size": 8,
}
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
    values = {"reward": 0.0, "reward_std": 0.5, **values}
    return {"step": step, "epoch": 0.1, "time": 2.0 * step, "peak_memory_mib": 100.0 + step, "memory_of": "process"} | {
        "values": values,
    }


def entry(**changes):
    settings = {"loss_type": "dapo", "learning_rate": 1e-3, "max_steps": 4, "bf16": True} | changes
    model = {"class": "Tiny", "parameters": 12345, "sha256": "ab"}
    start = {"started": "2030-01-01", "geometry": GEOMETRY, "data": {"rows": 22}, "plan": "16 completions"}
    return {**start, "model": model, "settings": settings}


def make_run(folder, lines, start=None, **changes):
    folder.mkdir(parents=True)
    began = {"step": 0, "start": start or entry(**changes)}
    (folder / "log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (began, *lines)))
    return folder


FULL = {
    "rewards/letters/mean": 0.3,
    "rewards/short/mean": 0.6,
    "completions/mean_length": 5.0,
    "completions/min_length": 1.0,
    "completions/max_length": 9.0,
    "completions/clipped_ratio": 0.25,
    "tools/call_frequency": 1.5,
    "tools/failure_frequency": 0.2,
    "entropy": 1.5,
    "clip_ratio/region_mean": 0.01,
    "kl": 0.02,
    "frac_reward_zero_std": 0.4,
    "dynamic_sampling/replaced_groups": 3.0,
    "time/rollout": 2.0,
    "time/train": 4.0,
    "layout/useful_tokens_per_second": 900.0,
    "fp16/loss_scale": 1024.0,
    "fp16/overflows": 1.0,
    "grad_norm": 0.7,
    "learning_rate": 1e-3,
    "loss": 0.1,
    "eval_reward": 0.8,
    "eval_accuracy": 0.9,
    "eval_pass@1": 0.25,
    "eval_math_pass@8": 0.3,
    "eval_math_mean@8": 0.2,
}


def test_every_plot_holds_exactly_what_was_logged(tmp_path):
    lines = [
        line(step, **{name: value * step for name, value in FULL.items()}, reward=0.1 * step) for step in (1, 2, 3)
    ]
    found = {panel.title: panel for panel in panels([load_run(make_run(tmp_path / "run", lines))])}
    assert list(found) == [title for title, *_ in PLOTS]
    shown = {(name, curve.label): (curve.steps, curve.values) for name, panel in found.items() for curve in panel.lines}
    expected = {
        ("Reward", "reward"): "reward",
        ("Reward", "short"): "rewards/short/mean",
        ("Evaluation: pass@k", "pass@1"): "eval_pass@1",
        ("Evaluation: pass@k", "math_pass@8"): "eval_math_pass@8",
        ("Evaluation", "reward"): "eval_reward",
        ("Evaluation", "math_mean@8"): "eval_math_mean@8",
        ("Accuracy", "eval_accuracy"): "eval_accuracy",
        ("Completion length", "max"): "completions/max_length",
        ("Tokens whose ratio is clipped", "region"): "clip_ratio/region_mean",
        ("Dynamic sampling", "replaced_groups"): "dynamic_sampling/replaced_groups",
        ("Time per phase", "train"): "time/train",
        ("Loss scale (fp16)", "loss scale"): "fp16/loss_scale",
        ("Overflows (fp16)", "overflows"): "fp16/overflows",
    }
    for key, name in expected.items():
        assert shown[key] == ([1, 2, 3], [one["values"][name] for one in lines]), key
    assert shown["Peak memory of the main process", "peak"] == ([1, 2, 3], [101.0, 102.0, 103.0])
    assert found["Reward"].lines[0].band == [0.5, 0.5, 0.5]


def test_the_page_says_the_numbers_and_holds_the_plots_itself(tmp_path):
    run = make_run(tmp_path / "run", [line(1, reward=0.125, entropy=1.5), line(4, reward=0.875, entropy=0.5)])
    path = report([run])
    assert path == run / "report" / "index.html"
    page = Page(path)
    assert "reward, first -> last 0.125 -> 0.875" in page.text
    assert "entropy 1.5 -> 0.5 (0.5 to 1.5)" in page.text
    assert "model Tiny parameters 12,345" in page.text
    assert "precision bf16" in page.text
    assert "training time 0:00:08 in train()" in page.text
    assert "16 completions" in page.text
    assert page.tags.count("img") == 3
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
    assert "state finished" in page.text


def test_the_held_out_scores_of_a_demo_are_a_curve(tmp_path):
    run = make_run(tmp_path / "run", [line(6), line(12)])
    (run / "metrics.json").write_text(json.dumps({"exact_match_by_step": {"12": 0.75, "6": 0.5}}))
    assert load_run(run).series("held_out_exact_match") == ([6, 12], [0.5, 0.75])


def test_several_runs_are_laid_over_each_other_with_what_differs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [
        make_run(Path("runs/a"), [line(1, reward=0.1, kl=0.5), line(2, reward=0.2, kl=0.6)]),
        make_run(Path("runs/b"), [line(1, reward=0.3), line(2, reward=0.9)], learning_rate=0.5),
    ]
    found = {panel.title: panel for panel in panels([load_run(run) for run in runs])}
    curves = [(curve.label, curve.values) for curve in found["Reward"].lines]
    assert curves == [("runs/a", [0.1, 0.2]), ("runs/b", [0.3, 0.9])]
    assert [curve.label for curve in found["KL to the reference"].lines] == ["runs/a"]
    path = report(runs)
    assert path == tmp_path / "runs" / "report-comparison" / "index.html"
    page = Page(path)
    assert "settings.learning_rate 0.001 0.5" in page.text
    assert "settings.loss_type dapo" not in page.text
    assert "reward 0.1 -> 0.2 (0.1 to 0.2) 0.3 -> 0.9 (0.3 to 0.9)" in page.text
    assert page.tags.count("img") == 3
    assert report([Path("runs/a/../a"), runs[1]]) == path  # written again


def test_runs_that_agree_are_said_to(tmp_path):
    rewards = {"a": (0.1, 0.2, 0.4), "b": (0.1, 0.2, 0.4), "c": (0.1, 0.3, 0.4), "longer": (0.1, 0.2, 0.4, 0.6)}
    a, b, c, longer = (
        make_run(tmp_path / n, [line(i, reward=r, loss=0.5) for i, r in enumerate(v)]) for n, v in rewards.items()
    )
    same = "Identical in all runs, to the last digit: Reward"
    assert same in Page(report([a, b], tmp_path / "same")).text
    assert same not in Page(report([a, c], tmp_path / "others")).text
    assert same not in Page(report([a, longer], tmp_path / "partly")).text


def test_what_never_changes_is_a_row_and_no_plot(tmp_path):
    run = make_run(tmp_path / "run", [line(i, reward=float(i), kl=0.0) for i in (1, 2)])
    text = report([run]).read_text()
    assert "<h3>Reward</h3>" in text
    assert "<h3>KL to the reference</h3>" not in text
    assert "<th>kl</th><td>0 -&gt; 0 (0 to 0)</td>" in text


def test_a_report_is_written_again_and_nothing_else_overwritten(tmp_path):
    run = make_run(tmp_path / "run", [line(1, kl=0.5)])
    report([run])
    make_run(tmp_path / "later", [line(1)])
    (run / "log.jsonl").write_text((tmp_path / "later" / "log.jsonl").read_text())
    assert "<th>kl</th>" not in report([run]).read_text()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "index.html").write_text("<html>my page</html>")
    with pytest.raises(ConfigError, match="is no report, so it is left alone"):
        report([run], mine)
    assert (mine / "index.html").read_text() == "<html>my page</html>"
    with pytest.raises(ConfigError, match="is a file"):
        report([run], run / "log.jsonl")


def test_a_folder_without_a_run_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        load_run(tmp_path / "none")
    with pytest.raises(ConfigError, match="holds no log lines"):
        load_run(tmp_path)
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(ConfigError, match="holds no log lines"):
        load_run(tmp_path)


def test_a_failed_report_is_a_sentence(tmp_path, monkeypatch, capsys):
    assert report_or_reason(tmp_path).startswith("No report was written: ")
    run = make_run(tmp_path / "run", [line(1)])
    for module, package in (("matplotlib.figure", "matplotlib"), ("jinja2", "jinja2")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            said = report_or_reason(run)
            assert re.match(rf"No report was written: .* needs? {package}; install it with", said)
    monkeypatch.setattr(report_module, "panels", lambda runs: 1 / 0)
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


def test_a_file_that_cannot_be_written_is_refused():
    with pytest.raises(ConfigError, match=r"plot.xyz is no plot .* \.png, \.svg or \.pdf"):
        figure_class(Path("plot.xyz"))
